"""State of callbacks in checkpoints, and what else a training that resumes needs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.utils import logging

from ..errors import CheckpointError, how_to_resume
from ..saving.checkpoints import find_loss, on_first_process, read_state
from .stateful import StatefulCallback


logger = logging.get_logger(__name__)


class LoadStates(TrainerCallback):
    """Loads the state of callbacks from the checkpoint that a training resumes from, and in the end from the best one.

    The best checkpoint is looked for beside the one that the training resumes from, as folders may have moved. If it
    is lost, a warning says so, and the best of the steps that follow takes its place. (The library would end with the
    last weights, or with what the damaged file has in their place.)
    """

    def __init__(self) -> None:
        # Both are set by `HfViTTrainer.train`.
        self.callbacks: Sequence[StatefulCallback] = ()
        self.checkpoint: Path | None = None  # that the training resumes from

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        if self.checkpoint is None:
            return
        self._load(self.checkpoint)
        # The library may have forgotten the place by now, but not the score.
        place = read_state(self.checkpoint)["best_model_checkpoint"]
        if not args.load_best_model_at_end or place is None:
            return
        best = self.checkpoint.with_name(Path(place).name)
        fault = on_first_process(args, lambda: find_loss(best))
        if fault is None:
            state.best_model_checkpoint = str(best)
            return
        logger.warning(
            f"The best checkpoint so far, {best}, is lost: {fault}. The best one after step {state.global_step} will "
            "take its place."
        )
        state.best_metric = state.best_global_step = state.best_model_checkpoint = None

    def on_train_end(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        if not args.load_best_model_at_end or state.best_model_checkpoint is None:
            return
        best = Path(state.best_model_checkpoint)
        if (fault := on_first_process(args, lambda: find_loss(best))) is not None:
            raise CheckpointError(f"The best checkpoint, {best}, is lost: {fault}. {how_to_resume(args.output_dir)}")
        self._load(best)

    def _load(self, checkpoint: Path) -> None:
        for callback in self.callbacks:
            callback.load_state(checkpoint)


class NewOptions(TrainerCallback):
    """Gives an optimizer its options as they are now, where the state in a checkpoint has brought back the old ones.

    Args:
        options: Of each group, such as `lr` (before the schedule), `weight_decay`, `betas`; filled when it is made.
    """

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        *_: Any,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: LRScheduler,
        **kwargs: Any,
    ) -> None:
        if state.global_step == 0:
            return
        for group, options in zip(optimizer.param_groups, self.options, strict=True):
            begun = group.get("initial_lr", group["lr"])  # before the schedule, if it has one
            if begun != options["lr"]:
                group["lr"] *= options["lr"] / begun if begun else 0.0
            group |= {name: value for name, value in options.items() if name not in ("lr", "params")}
            group["initial_lr"] = options["lr"]
        lr_scheduler.base_lrs = [options["lr"] for options in self.options]
