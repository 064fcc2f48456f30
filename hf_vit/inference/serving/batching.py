"""Combine requests that wait at the same time into batches, in a thread."""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any


Request = tuple[Any, Future[Any]]
STOP = None  # special request that stops the thread


class QueueFullError(Exception):
    """Raised if inputs are refused because too many are waiting."""


@dataclass(eq=False)
class BatchThread:
    """Thread that answers all waiting inputs in one batch.

    A future that is cancelled before its batch starts is not computed. If a batch fails, its inputs are answered one
    by one, so that an error affects only its own input.
    """

    answer: Callable[[list[Any]], Sequence[Any]]  # returns the answers for a list of inputs
    batch_size: int  # maximum number of inputs per batch
    max_queue: int | None = None  # maximum number of inputs that wait or are computed; None means unlimited
    record_size: Callable[[int], None] = lambda size: None  # receives the size of each batch
    num_pending: int = 0  # inputs that wait or are computed

    def __post_init__(self) -> None:
        self._requests, self._lock = queue.SimpleQueue[Request | None](), threading.Lock()
        self.thread = threading.Thread(target=self._run, daemon=True, name="batches")

    def __enter__(self) -> "BatchThread":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._requests.put(STOP)  # All inputs that already wait are answered first.
        self.thread.join()

    def submit(self, items: Sequence[Any]) -> list[Future[Any]]:
        """Add inputs to the queue and return a future per answer. If not all fit, raise `QueueFullError`."""
        with self._lock:
            if self.max_queue is not None and self.num_pending + len(items) > self.max_queue:
                raise QueueFullError(f"{self.num_pending} of at most {self.max_queue} images are waiting. Try again.")
            self.num_pending += len(items)
        futures = [Future[Any]() for _ in items]
        for request in zip(items, futures, strict=True):
            request[1].add_done_callback(self._forget)
            self._requests.put(request)
        return futures

    def _forget(self, _: Future[Any]) -> None:
        with self._lock:
            self.num_pending -= 1

    def _run(self) -> None:
        while (request := self._requests.get()) is not STOP:
            batch = [request]
            while len(batch) < self.batch_size and not self._requests.empty():
                if (further := self._requests.get()) is STOP:
                    self._requests.put(STOP)
                    break
                batch.append(further)
            batch = [request for request in batch if request[1].set_running_or_notify_cancel()]
            if batch:
                self.record_size(len(batch))
                self._answer(batch)
            del batch, request  # release the memory of images before waiting

    def _answer(self, batch: list[Request]) -> None:
        try:
            for (_, future), answer in zip(batch, self.answer([item for item, _ in batch]), strict=True):
                future.set_result(answer)
        except Exception as error:  # Whoever waits for the future raises it.
            if len(batch) == 1:
                batch[0][1].set_exception(error)
                return
            for request in batch:
                self._answer([request])
