"""Throughput of a training run: images per second, memory, and the progress bar."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ProgressCallback

from ...convert.loading import peak_memory


class Throughput(TrainerCallback):
    """Counts images from the first batch on, and times them without the pauses for evaluations and saving.

    A pause for saving begins with `pause` and ends when the Trainer has saved.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.start: float | None = None  # the first batch starts the clock
        self._paused_at: float | None = None
        self._images = 0

    def on_train_begin(self, *_: Any, **kwargs: Any) -> None:
        self._reset()

    def on_save(self, *_: Any, **kwargs: Any) -> None:
        self.resume()

    def count(self, images: int) -> None:
        """Add a batch that begins now."""
        if self.start is None:
            self.start = time.perf_counter()
        self._images += images

    def pause(self) -> None:
        """Stops the clock, once the GPU has done what it was asked for."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._paused_at = time.perf_counter()

    def resume(self) -> None:
        """Lets the clock run on."""
        if self.start is not None and self._paused_at is not None:
            self.start += time.perf_counter() - self._paused_at
        self._paused_at = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clock while something else is done."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def take(self) -> tuple[int, float]:
        """Return the number of images and the seconds since the last call; `count` must have been called."""
        assert self.start is not None
        now = time.perf_counter()
        work = self._images, now - self.start
        self.start, self._images = now, 0
        return work

    def measures(self, args: TrainingArguments) -> dict[str, float]:
        """Return `images_per_second` of all processes since the last call, and `peak_memory_mib` of this process.

        The memory is that of the GPU if there is one.
        """
        if self.start is None:
            return {}
        images, seconds = self.take()
        is_on_gpu = args.device.type == "cuda"
        peak_mib = torch.cuda.max_memory_allocated(args.device) // 2**20 if is_on_gpu else peak_memory()
        return {"images_per_second": images * args.world_size / seconds, "peak_memory_mib": peak_mib}


class TrainingProgress(ProgressCallback):
    """The library's bar of steps with the time left, which also shows loss, images per second and peak memory.

    In a training that resumes it starts where that was, and tells the time from there.
    """

    training_bar: Any
    prediction_bar: Any

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self.current_step = state.global_step
        if self.training_bar is not None:
            bar = self.training_bar
            bar.unit = "step"
            bar.initial = bar.n = bar.last_print_n = state.global_step
            bar.refresh()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.training_bar is not None:
            self.training_bar.total = state.max_steps  # which can change on the way
        super().on_step_end(args, state, control, **kwargs)

    def on_log(self, *args: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        super().on_log(*args, logs=logs, **kwargs)
        if self.training_bar is not None and "images_per_second" in logs:
            shown = {"loss": f"{logs['loss']:.4g}", "img/s": f"{logs['images_per_second']:.4g}"}
            self.training_bar.set_postfix(**shown, memory=f"{logs['peak_memory_mib']} MiB")

    def close(self) -> None:
        """Leaves the bars as they are, so that what is printed next starts on a line of its own."""
        for bar in (self.prediction_bar, self.training_bar):
            if bar is not None:
                bar.close()
        self.prediction_bar = self.training_bar = None
