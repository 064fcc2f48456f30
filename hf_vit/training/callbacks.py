"""What happens beside the steps of a training."""

from typing import Any

from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..data.transforms import AugmentedDataset


class DatasetEpoch(TrainerCallback):
    """Moves an `AugmentedDataset` from epoch to epoch, also in a training that is taken up in the middle of one.

    accelerate's loader does so in a training of one process only; with this, several processes draw the images that
    one process would.
    """

    def on_epoch_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        train_dataloader: DataLoader[Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Tells the data of the epoch that begins, before the loader reads the first image of it."""
        assert train_dataloader is not None
        if isinstance(train_dataloader.dataset, AugmentedDataset):
            # A share of the epoch, where a checkpoint was saved in the middle of it, is already done.
            train_dataloader.dataset.set_epoch(int(state.epoch))
