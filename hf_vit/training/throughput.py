"""How much a training gets done between two entries of its log."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """What has been done in a time.

    Args:
        images: Number of images that went forward and back.
        flops: Floating-point operations of the model for them.
        seconds: The time.
    """

    images: int
    flops: int
    seconds: float


class Throughput:
    """Counts work, from the first batch on, and times it without the pauses."""

    def __init__(self) -> None:
        """Begins; the clock starts with the first batch."""
        self.start: float | None = None
        self._images = 0
        self._flops = 0

    def count(self, images: int, flops: int) -> None:
        """Adds a batch that begins now."""
        if self.start is None:
            self.start = time.perf_counter()
        self._images += images
        self._flops += flops

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clock while something else is done."""
        began = time.perf_counter()
        try:
            yield
        finally:
            if self.start is not None:
                self.start += time.perf_counter() - began

    def take(self) -> Work:
        """Returns the work since the last call, and begins to count anew; there must be some."""
        assert self.start is not None
        now = time.perf_counter()
        work = Work(self._images, self._flops, now - self.start)
        self.start, self._images, self._flops = now, 0, 0
        return work
