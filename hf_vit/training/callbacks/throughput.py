"""Training throughput: images per second, FLOPs, memory, and the progress bar."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ProgressCallback

from ...convert.loading import peak_memory
from ...flops import forward_flops, peak_flops
from ...model.task_image_classification import HfViTForImageClassification


class Throughput(TrainerCallback):
    """Count images and FLOPs from the first batch on, and measure the training time without evaluation and saving.

    The clock stops when `pause` is called before saving, and restarts when the Trainer has saved.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.start: float | None = None  # start time of the clock, None before the first batch
        self._paused_at: float | None = None
        self._images = 0
        self._flops = 0

    def on_train_begin(self, *_: Any, **kwargs: Any) -> None:
        self._reset()

    def on_save(self, *_: Any, **kwargs: Any) -> None:
        self.resume()

    def count(self, images: int, flops: int) -> None:
        """Add the images and FLOPs of a batch whose computation starts now."""
        if self.start is None:
            self.start = time.perf_counter()
        self._images += images
        self._flops += flops

    def pause(self) -> None:
        """Stop the clock that measures the training time after the GPU has finished its work."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._paused_at = time.perf_counter()

    def resume(self) -> None:
        """Restart the clock that measures the training time."""
        if self.start is not None and self._paused_at is not None:
            self.start += time.perf_counter() - self._paused_at
        self._paused_at = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager that stops the clock that measures the training time."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def take(self) -> tuple[int, int, float]:
        """Return the numbers of images, FLOPs and seconds since the last call. Requires at least one counted batch."""
        assert self.start is not None
        now = time.perf_counter()
        work = self._images, self._flops, now - self.start
        self.start, self._images, self._flops = now, 0, 0
        return work

    def measures(self, args: TrainingArguments) -> dict[str, float]:
        """Return additional values for the log: `images_per_second`, `peak_memory_mib` and, if known, `mfu`.

        `images_per_second` is the rate of all processes since the last call, `peak_memory_mib` is the peak memory of
        the first process (of its GPU, if it has one), and `mfu` is the model FLOPs utilization, a share of the peak
        FLOPs of the GPU.
        """
        if self.start is None:
            return {}
        images, flops, seconds = self.take()
        is_on_gpu = args.device.type == "cuda"
        peak_mib = torch.cuda.max_memory_allocated(args.device) // 2**20 if is_on_gpu else peak_memory()
        logs = {"images_per_second": images * args.world_size / seconds, "peak_memory_mib": peak_mib}
        peak = best_flops(args)
        return {**logs, "mfu": flops / (seconds * peak * args.n_gpu)} if peak and flops else logs


def best_flops(args: TrainingArguments) -> float | None:
    """Return the peak FLOPs per second of the GPU in half precision, or None if unknown."""
    if args.device.type != "cuda" or not (args.bf16 or args.fp16):
        return None
    return peak_flops(torch.cuda.get_device_name(args.device))


def training_flops(model: nn.Module, height: int, width: int) -> int:
    """Return the FLOPs of a forward and backward pass per image, or 0 if unknown.

    The FLOPs are known for image classifiers if all of their weights are trained.
    """
    if not isinstance(model, HfViTForImageClassification) or not all(p.requires_grad for p in model.parameters()):
        return 0
    return 3 * forward_flops(model.config, height, width)


class TrainingProgress(ProgressCallback):
    """Progress bar that also shows the remaining time, loss, images per second and peak memory.

    If a run resumes, the bar starts at the resumed step, and only later steps are used to estimate the remaining time.
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
            self.training_bar.total = state.max_steps  # the total number of steps can change during training
        super().on_step_end(args, state, control, **kwargs)

    def on_log(self, *args: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        super().on_log(*args, logs=logs, **kwargs)
        if self.training_bar is not None and "images_per_second" in logs:
            shown = {"loss": f"{logs['loss']:.4g}", "img/s": f"{logs['images_per_second']:.4g}"}
            self.training_bar.set_postfix(**shown, memory=f"{logs['peak_memory_mib']} MiB")

    def close(self) -> None:
        """Close the progress bars, so that the next output starts on a new line."""
        for bar in (self.prediction_bar, self.training_bar):
            if bar is not None:
                bar.close()
        self.prediction_bar = self.training_bar = None
