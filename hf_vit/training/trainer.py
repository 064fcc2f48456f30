"""The library's Trainer, made safe to open and exact to take up again."""

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .callbacks import DatasetEpoch


class HfViTTrainer(Trainer):
    """`transformers.Trainer`, except for four things.

    The arguments of a training are saved as training_args.json: the library pickles them into training_args.bin, and
    unpickling a file from someone else can run any code.

    Several processes draw those images of an `AugmentedDataset` that one process would, see `DatasetEpoch`.

    An evaluation sees all images, even with `dataloader_drop_last`.

    A training that was killed goes on from `last_checkpoint` as if it had not been, bit for bit, even with worker
    processes that outlive an epoch.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes the arguments of `transformers.Trainer`."""
        super().__init__(*args, **kwargs)
        self.add_callback(DatasetEpoch())

    def _get_dataloader(self, *args: Any, is_training: bool = False, **kwargs: Any) -> DataLoader[Any]:
        """Returns a loader that drops images in training only, with a random generator of its own.

        A loader that starts worker processes draws a seed. It does so once if they stay, and again when the training
        is taken up: from the global generator, the dropout would no longer be that of the training that went through.
        """
        drop_last = self.args.dataloader_drop_last
        # The library applies it to evaluations too, whose scores would then depend on the batch size.
        self.args.dataloader_drop_last = drop_last and is_training
        try:
            loader = super()._get_dataloader(*args, is_training=is_training, **kwargs)
        finally:
            self.args.dataloader_drop_last = drop_last
        loader.base_dataloader.generator = torch.Generator().manual_seed(self.args.seed)
        return loader

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Saves the model, its image processor and the arguments."""
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            folder = Path(output_dir if output_dir is not None else self.args.output_dir)
            (folder / TRAINING_ARGS_NAME).unlink()
            (folder / "training_args.json").write_text(self.args.to_json_string() + "\n", encoding="utf-8")

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Saves a checkpoint; where one of an earlier training is written over, it stops counting as complete."""
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.should_save:
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
        super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        """Saves the random state, of all processes before trainer_state.json tells that the checkpoint is complete."""
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()
