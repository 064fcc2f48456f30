"""Callbacks that load what a checkpoint holds beside the files that the library's Trainer knows."""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState, TrainingArguments

from ..distillation.base import Distillation


class ResumeCallback(TrainerCallback):
    """A callback that loads its own part of a checkpoint, when a training resumes and for the best model.

    `on_train_begin` comes after the library has loaded weights and optimizer, `on_train_end` after the best model.
    """

    checkpoint: Path | None = None  # that the training resumes from; set by `HfViTTrainer.train`


def best_checkpoint(args: TrainingArguments, state: TrainerState) -> Path | None:
    """Returns the checkpoint that the library loads at the end of a training, or None if it keeps the last weights."""
    is_loaded = args.load_best_model_at_end and state.best_model_checkpoint is not None
    return Path(state.best_model_checkpoint) if is_loaded else None


class DistillationCheckpoints(ResumeCallback):
    """Loads what trains beside a student when its training resumes."""

    def __init__(self, distillation: Distillation) -> None:
        self.distillation = distillation

    def on_train_begin(self, *_: Any, **kwargs: Any) -> None:
        if self.checkpoint is not None:
            self.distillation.load(self.checkpoint)
