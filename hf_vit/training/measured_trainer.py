"""A Trainer that tells how fast it is and how much memory it takes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.trainer_callback import ProgressCallback

from ..convert import peak_memory
from ..model.task_classification import HfViTForImageClassification
from .callbacks.throughput import Throughput, TrainingProgress, Work, forward_flops, peak_flops
from .safe_trainer import SafeTrainer


class MeasuredTrainer(SafeTrainer):
    """`SafeTrainer`, which logs three more numbers with the loss.

    `images_per_second` of all processes since the last entry, without evaluations and the saving of checkpoints.

    `peak_memory_mib` of the first process: of its GPU if it has one, else of the process.

    `mfu`, the share of what the GPU can do at best that the model itself asks for, where both are known: for image
    classifiers of which all weights are trained, in bfloat16 or float16, on a GPU in `PEAK_TFLOPS`.

    The progress bar shows the first two.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes the arguments of `transformers.Trainer`."""
        super().__init__(*args, **kwargs)
        self.throughput = Throughput()
        self._flops: dict[tuple[int, int], int] = {}
        self.progress = TrainingProgress()
        if self.pop_callback(ProgressCallback) is not None:  # not in a notebook, nor with disable_tqdm
            self.add_callback(self.progress)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains."""
        self.throughput = Throughput()
        try:
            return super().train(*args, **kwargs)
        finally:
            self.progress.close()

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Makes a step of a training on a batch, and counts its images."""
        if "pixel_values" in inputs:
            count, _, height, width = inputs["pixel_values"].shape
            self.throughput.count(count, count * self.flops_of_image(height, width))
        return super().training_step(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Logs; beside the loss of a training also how fast it is and what memory it takes."""
        if "loss" in logs and self.throughput.start is not None:
            work = self.throughput.take()
            logs["images_per_second"] = work.images * self.args.world_size / work.seconds
            logs["peak_memory_mib"] = self._peak_memory()
            logs.update(self._utilization(work))
        super().log(logs, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Scores the model."""
        with self._paused():
            return super().evaluate(*args, **kwargs)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Saves a checkpoint."""
        with self._paused():
            super()._save_checkpoint(model, trial)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        if self.args.device.type == "cuda":
            torch.cuda.synchronize()  # what has been asked for is not yet done
        with self.throughput.paused():
            yield

    def flops_of_image(self, height: int, width: int) -> int:
        """Returns the operations of the model for an image forward and, twice as many, backward; 0 if not known."""
        # Not functools.cache: a trainer that holds itself leaves its worker processes to the garbage collector, which
        # closes their queues first, and each is then waited for.
        if (height, width) not in self._flops:
            self._flops[height, width] = self._count_flops(height, width)
        return self._flops[height, width]

    def _count_flops(self, height: int, width: int) -> int:
        model = self.model
        if not isinstance(model, HfViTForImageClassification) or not all(p.requires_grad for p in model.parameters()):
            return 0
        return 3 * forward_flops(model.config, height, width)

    def _utilization(self, work: Work) -> dict[str, float]:
        if self.args.device.type != "cuda" or not (self.args.bf16 or self.args.fp16) or not work.flops:
            return {}
        peak = peak_flops(torch.cuda.get_device_name(self.args.device))
        return {} if peak is None else {"mfu": work.flops / (work.seconds * peak * self.args.n_gpu)}

    def _peak_memory(self) -> int:
        if self.args.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.args.device) // 2**20
        return peak_memory()
