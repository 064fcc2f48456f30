"""Callbacks that load what a checkpoint holds beside the files that the library's Trainer knows."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from transformers import TrainerCallback, TrainerState, TrainingArguments

from ...options.field import option
from ..distillation.base import Distillation


@dataclass
class ResumeArguments:
    """Options of a training that resumes, beside those of the library."""

    resume_with_changes: bool = option(
        default=False,
        help="Resume on other images or with other arguments than the training was started with; the card then "
        "tells from which step on.",
        group="Output",
        resume="free",
        private=True,
    )


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


class NewOptions(ResumeCallback):
    """Gives an optimizer its options as they are now, where the state in a checkpoint has brought back the old ones.

    Args:
        options: Of each group, such as `lr` (before the schedule), `weight_decay`, `betas`; filled when it is made.
    """

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []

    def on_train_begin(
        self, *_: Any, optimizer: torch.optim.Optimizer, lr_scheduler: LRScheduler, **kwargs: Any
    ) -> None:
        if self.checkpoint is None:
            return
        for group, options in zip(optimizer.param_groups, self.options, strict=True):
            begun = group.get("initial_lr", group["lr"])  # before the schedule, if it has one
            if begun != options["lr"]:
                group["lr"] *= options["lr"] / begun if begun else 0.0
            group |= {name: value for name, value in options.items() if name not in ("lr", "params")}
            group["initial_lr"] = options["lr"]
        lr_scheduler.base_lrs = [options["lr"] for options in self.options]
