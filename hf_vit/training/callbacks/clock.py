"""What happens beside the steps of a training."""

import time
from typing import Any

from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from ...data.augmentation.datasets import AugmentedDataset


class DatasetEpoch(TrainerCallback):
    """Moves an `AugmentedDataset` from epoch to epoch, also in a training that is taken up in the middle of one.

    accelerate's loader does so on one process only. With this, several processes draw the images that one would.
    """

    def on_epoch_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        train_dataloader: DataLoader[Any],
        **kwargs: Any,
    ) -> None:
        """Tells the data which epoch begins, before the loader reads its first image."""
        if isinstance(train_dataloader.dataset, AugmentedDataset):
            # Where a training is taken up again, a part of the epoch is already done.
            train_dataloader.dataset.set_epoch(int(state.epoch))


class TrainingClock(TrainerCallback, ExportableState):
    """Counts the seconds of a training, those before it was killed and taken up again included."""

    def __init__(self) -> None:
        """Starts at zero."""
        self.earlier = 0.0
        self.start: float | None = None

    @property
    def seconds(self) -> float:
        """The time in training until now, or until it ended."""
        return self.earlier + (0.0 if self.start is None else time.monotonic() - self.start)

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps."""
        return {"args": {}, "attributes": {"earlier": self.seconds}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Starts the clock."""
        self.start = time.monotonic()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stops the clock."""
        self.earlier, self.start = self.seconds, None


class FreshDropout(TrainerCallback):
    """Lets a training go on that was at its end, and is now given more epochs.

    The checkpoint of the last step keeps the wish to stop, and the library restores it with the callbacks.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Forgets the wish."""
        control.should_training_stop = False
