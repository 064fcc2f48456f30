"""What happens beside the steps of a training."""

from typing import Any

from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..data.augmented_dataset import AugmentedDataset


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
