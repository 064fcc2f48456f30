"""Callbacks with a state (epoch, optimizer options) that is saved in checkpoints and restored on resume."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.utils import logging

from ... import __version__
from ...data.augmentation.datasets import AugmentedDataset
from ...outputs import write_atomically
from ...processes import on_first_process
from ..checkpoints import CONDITIONS, find_load_error, read_state
from ..errors import CheckpointError, how_to_resume


logger = logging.get_logger(__name__)


class StatefulCallback(TrainerCallback):
    """Callback that saves its state with checkpoints and restores it.

    `HfViTTrainer` calls `save_state` and `load_state` of each such callback. Callbacks with only a few numbers use
    `ExportableState` in transformers instead, which saves the numbers in trainer_state.json.
    """

    is_published = False  # whether the callback state is also saved with the final model

    def save_state(self, folder: Path, is_writer: bool) -> None:
        """Save the state to a folder.

        Args:
            folder: Folder of a checkpoint.
            is_writer: Whether this process writes files. All processes call the method together.
        """

    def load_state(self, folder: Path) -> None:
        """Load the state from the checkpoint to resume from or, at the end of training, from the best checkpoint."""


class LoadStates(TrainerCallback):
    """Load callback states: from the resumed checkpoint when training starts, from the best checkpoint when it ends.

    The best checkpoint is searched in the parent folder of the resumed checkpoint, because folders may have moved. If
    it is missing, a warning is logged, and the best of the remaining checkpoints is loaded. Without
    this callback, transformers would keep the last weights, or load weights from a damaged file.
    """

    def __init__(self) -> None:
        self.start(None, ())

    def start(self, checkpoint: Path | None, callbacks: Sequence[StatefulCallback]) -> None:
        """Set the callbacks of a training run, and the checkpoint to resume from, if any."""
        self.checkpoint, self.callbacks = checkpoint, callbacks

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        if self.checkpoint is None:
            return
        self._load(self.checkpoint)
        # Read the path of the best checkpoint from its file: transformers may have removed it from `state`.
        place = read_state(self.checkpoint)["best_model_checkpoint"]
        if not args.load_best_model_at_end or place is None:
            return
        best = self.checkpoint.with_name(Path(place).name)
        fault = on_first_process(args, lambda: find_load_error(best))
        if fault is None:
            state.best_model_checkpoint = str(best)
            return
        logger.warning(
            f"The best checkpoint so far, {best}, cannot be used: {fault}. It will be replaced by the best checkpoint "
            f"after step {state.global_step}."
        )
        state.best_metric = state.best_global_step = state.best_model_checkpoint = None

    def on_train_end(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        if not args.load_best_model_at_end or state.best_model_checkpoint is None:
            return
        best = Path(state.best_model_checkpoint)
        if (fault := on_first_process(args, lambda: find_load_error(best))) is not None:
            raise CheckpointError(
                f"The best checkpoint, {best}, cannot be used: {fault}. {how_to_resume(args.output_dir)}"
            )
        self._load(best)

    def _load(self, checkpoint: Path) -> None:
        for callback in self.callbacks:
            callback.load_state(checkpoint)


class Conditions(StatefulCallback):
    """Training conditions (options and data of a run), which are saved in checkpoints."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def save_state(self, folder: Path, is_writer: bool) -> None:
        if is_writer:
            conditions = {"hf_vit": __version__, **self.values}
            write_atomically(folder / CONDITIONS, json.dumps(conditions, indent=2) + "\n")


class NewOptions(TrainerCallback):
    """Set the optimizer options of this run again, after a loaded checkpoint has replaced them with saved options."""

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []

    def record(self, options: list[dict[str, Any]]) -> None:
        """Record the options of each group of a new optimizer: `lr` (before the schedule), `weight_decay`, `betas`."""
        self.options = options

    def on_train_begin(self, args: Any, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            return
        optimizer: torch.optim.Optimizer = kwargs["optimizer"]
        for group, options in zip(optimizer.param_groups, self.options, strict=True):
            begun = group.get("initial_lr", group["lr"])  # base learning rate, which schedulers save as `initial_lr`
            if begun != options["lr"]:
                group["lr"] *= options["lr"] / begun if begun else 0.0
            group |= {name: value for name, value in options.items() if name not in ("lr", "params")}
            group["initial_lr"] = options["lr"]
        kwargs["lr_scheduler"].base_lrs = [options["lr"] for options in self.options]


class DatasetEpoch(TrainerCallback):
    """Set the epoch of an `AugmentedDataset`, even if training resumes in the middle of an epoch.

    The data loader of accelerate only sets the epoch in single-process runs. This callback makes several processes
    draw the same images as a single process.
    """

    def on_epoch_begin(
        self, args: Any, state: TrainerState, *_: Any, train_dataloader: DataLoader[Any], **kwargs: Any
    ) -> None:
        # The epoch must be set before the data loader reads its first image.
        if isinstance(train_dataloader.dataset, AugmentedDataset):
            # `state.epoch` is not an integer if training resumes in the middle of an epoch.
            train_dataloader.dataset.set_epoch(int(state.epoch))


class StepReport(TrainerCallback):
    """Print the total number of training steps before training. The progress bar shows the remaining time.

    Args:
        report: Function that prints a line of text.
        find_warnings: Function that returns warnings about the given number of steps, logged at the start of training.
    """

    def __init__(self, report: Callable[[str], None], find_warnings: Callable[[int], list[str]]) -> None:
        self.report, self.find_warnings = report, find_warnings

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        left = state.max_steps - state.global_step
        batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        self.report(f"Steps: {left:,} of {batch} images{'' if state.global_step == 0 else ' are left'}.")
        for sentence in self.find_warnings(state.max_steps) if state.global_step == 0 else ():
            logger.warning(sentence)
