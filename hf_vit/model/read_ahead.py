"""Reads what an iterable gives in threads: in its order, and only so far ahead."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Lock, Semaphore, Thread
from typing import Generic, TypeVar


S = TypeVar("S")
T = TypeVar("T")


class ReadAhead(Generic[S, T]):
    """Iterates over what `read` makes of each item of a source, in order, while threads read those that follow.

    No more than `limit` items are taken from the source before they are asked for, so that memory is bounded, however
    long the source is. One thread at a time takes an item from it, other than the one that iterates here. What the
    source or `read` raises is raised at the place of its item.

    Args:
        source: What to read; it may wait for its items to come.
        read: Called in the threads, several at a time.
        threads: Number of them, at least one.
        limit: Number of items, at least one.
    """

    def __init__(self, source: Iterable[S], read: Callable[[S], T], threads: int, limit: int) -> None:
        self.read, self._items = read, iter(source)
        self._threads = [Thread(target=self._work, daemon=True, name="read_ahead") for _ in range(threads)]
        self._room, self._taking, self._is_closed = Semaphore(limit), Lock(), False
        self._found: SimpleQueue[Future[T] | None] = SimpleQueue()  # None at the end

    def __iter__(self) -> Iterator[T]:
        for thread in self._threads:
            thread.start()
        try:
            while (found := self._found.get()) is not None:
                self._room.release()
                yield found.result()
        finally:  # also where nobody wants the rest
            self._is_closed = True
            for _ in self._threads:
                self._room.release()

    def is_waiting(self) -> bool:
        """Whether the source has not given the next item yet."""
        return self._found.empty()

    def _work(self) -> None:
        while True:
            self._room.acquire()
            with self._taking:
                if self._is_closed:
                    return
                result: Future[T] = Future()
                try:
                    item = next(self._items)
                except StopIteration:
                    self._end()
                    return
                except BaseException as error:  # which belongs to the thread that iterates
                    result.set_exception(error)
                    self._found.put(result)
                    self._end()
                    return
                self._found.put(result)
            try:
                result.set_result(self.read(item))
            except BaseException as error:
                result.set_exception(error)
            del item, result  # which may be large, while the source is waited for

    def _end(self) -> None:
        self._is_closed = True
        self._found.put(None)
