"""The library's Trainer, made exact: on several processes, in evaluations, and when taken up again."""

import os
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ..modeling_detection_hf_vit import HfViTForObjectDetection
from ..modeling_keypoints_hf_vit import HfViTForKeypointDetection
from .callbacks import DatasetEpoch, NewStart, TrainingClock
from .checkpoints import stopped_early_at
from .safe_trainer import SafeTrainer


logger = logging.get_logger(__name__)


class HfViTTrainer(SafeTrainer):
    """`transformers.Trainer`, safe to open (see `SafeTrainer`) and exact in four ways.

    Several processes draw those images of an `AugmentedDataset` that one process would, see `DatasetEpoch`.

    Losses of object detection and of keypoints are divided by the number of objects, or of images, of all batches of a
    step on all processes.

    An evaluation sees all images, even with `dataloader_drop_last`.

    A training that was killed goes on from `last_checkpoint` as if it had not been, bit for bit, even with worker
    processes that outlive an epoch.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes the arguments of `transformers.Trainer`."""
        super().__init__(*args, **kwargs)
        self.add_callback(DatasetEpoch())
        self.add_callback(TrainingClock())
        self.add_callback(NewStart())

    @property
    def seconds(self) -> float:
        """The wall time of the training so far, with what came before it was taken up again."""
        clock = next(callback for callback in self.callback_handler.callbacks if isinstance(callback, TrainingClock))
        return clock.seconds

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Trains; a training that early stopping has ended stays ended when it is taken up again."""
        if isinstance(resume_from_checkpoint, str | os.PathLike):
            step = stopped_early_at(resume_from_checkpoint)
            if step is not None:
                logger.warning(f"Early stopping has ended this training at step {step}: no more steps are made.")
                self.args.max_steps = step
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Counts what the loss of a step is divided by, at least 1, as the model counts its labels."""
        counts = isinstance(self.model, HfViTForObjectDetection | HfViTForKeypointDetection)
        if not counts or not all("labels" in batch for batch in batch_samples):
            return super()._get_num_items_in_batch(batch_samples, device)
        # The library adds up numbers of entries, of all processes.
        items = [torch.zeros(self.model.count_items(batch["labels"])) for batch in batch_samples]
        count = super()._get_num_items_in_batch([{"labels": labels} for labels in items], device)
        return None if count is None else count.clamp_min(1)

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
