"""Signals that ask a training to end: of a cluster that wants its machine back, or whose time is up."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import torch


# What SLURM, Kubernetes and torchrun send, and what SLURM sends before the time is up (--signal=USR1@120). Not SIGINT:
# who presses Ctrl-C wants an end at once. Windows has no SIGUSR1.
STOP_SIGNALS = tuple(number for number in signal.Signals if number.name in ("SIGTERM", "SIGUSR1"))


class PreemptionSignals:
    """Notes signals that ask a training to end."""

    def __init__(self) -> None:
        """Begins without a signal."""
        self.received = 0
        # In shared memory, so that worker processes see it.
        self.is_training = torch.zeros((), dtype=torch.int64).share_memory_()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Notes signals in `received` rather than die of them, in the main thread, where alone Python allows it.

        One that comes too late for the training to see it counts as if it had come after it.
        """
        self.received = 0
        numbers = STOP_SIGNALS if threading.current_thread() is threading.main_thread() else ()
        before = {number: signal.signal(number, self._note) for number in numbers}
        self.is_training.fill_(len(before))
        try:
            yield
        finally:
            self.is_training.zero_()
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)
        if self.received:
            signal.raise_signal(self.received)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # Not another of them: torchrun and SLURM may both send one.
        self.received = self.received or number


@dataclass(frozen=True)
class WorkerStart:
    """Begins a worker process of a loader, which a signal to all processes shall not end before the training.

    The training still needs the rest of its batch. It ends its workers by SIGTERM too, when it is no longer running.

    Args:
        is_training: Tells the worker so, in shared memory.
        before: What else begins a worker.
    """

    is_training: torch.Tensor
    before: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        """Begins the worker with a number."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._end)
        if self.before is not None:
            self.before(worker)

    def _end(self, number: int, frame: FrameType | None) -> None:
        if not self.is_training:
            os._exit(0)
