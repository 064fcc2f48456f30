"""The epoch of augmented data, and the time of a training."""

import time
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from ...data.augmentation.datasets import AugmentedDataset


class DatasetEpoch(TrainerCallback):
    """Moves an `AugmentedDataset` from epoch to epoch, also in a training that resumes in the middle of one.

    accelerate's loader does so on one process only. With this, several processes draw the images that one would.
    """

    def on_epoch_begin(
        self, args: Any, state: TrainerState, *_: Any, train_dataloader: DataLoader[Any], **kwargs: Any
    ) -> None:
        # Before the loader reads its first image.
        if isinstance(train_dataloader.dataset, AugmentedDataset):
            # Where a training resumes, a part of the epoch is already done.
            train_dataloader.dataset.set_epoch(int(state.epoch))


class TrainingClock(TrainerCallback, ExportableState):
    """Counts the seconds of a training, those before it was killed and resumed included."""

    def __init__(self) -> None:
        self.earlier = 0.0
        self.start: float | None = None

    @property
    def seconds(self) -> float:
        """The time in training until now, or until it ended."""
        return self.earlier + (0.0 if self.start is None else time.monotonic() - self.start)

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"earlier": self.seconds}}

    def on_train_begin(self, *_: Any, **kwargs: Any) -> None:
        self.start = time.monotonic()

    def on_train_end(self, *_: Any, **kwargs: Any) -> None:
        self.earlier, self.start = self.seconds, None


class StepReport(TrainerCallback):
    """Reports how many steps there are, before the first one; the progress bar shows the time left.

    Args:
        report: Called with a line.
        warn: Called with the number of steps of a training that starts.
    """

    def __init__(self, report: Callable[[str], None], warn: Callable[[int], None]) -> None:
        self.report, self.warn = report, warn

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        left = state.max_steps - state.global_step
        batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        self.report(f"Steps: {left:,} of {batch} images{'' if state.global_step == 0 else ' are left'}.")
        if state.global_step == 0:
            self.warn(state.max_steps)
