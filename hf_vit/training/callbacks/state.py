"""Callbacks with a state that a resumed training run continues from: epoch, time, optimizer options."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.utils import logging

from ...data.augmentation.datasets import AugmentedDataset
from ..checkpoints import find_loss, on_first_process, read_state
from ..errors import CheckpointError, how_to_resume


logger = logging.get_logger(__name__)


class StatefulCallback(TrainerCallback):
    """A callback that saves its state with checkpoints and loads it again.

    `HfViTTrainer` calls both methods for every one of its callbacks. What is a few numbers is an `ExportableState` of
    the library instead, which keeps them in trainer_state.json.
    """

    is_published = False  # whether the state also stands beside the model that a training ends with

    def save_state(self, folder: Path, is_writer: bool) -> None:
        """Save the state to a folder.

        Args:
            folder: A checkpoint.
            is_writer: Whether this process writes files. All processes call it together.
        """

    def load_state(self, folder: Path) -> None:
        """Load the state from a checkpoint: the one a training resumes from, or the best one when it ends."""


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

    def on_train_begin(self, args: Any, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            return
        optimizer: torch.optim.Optimizer = kwargs["optimizer"]
        for group, options in zip(optimizer.param_groups, self.options, strict=True):
            begun = group.get("initial_lr", group["lr"])  # before the schedule, if it has one
            if begun != options["lr"]:
                group["lr"] *= options["lr"] / begun if begun else 0.0
            group |= {name: value for name, value in options.items() if name not in ("lr", "params")}
            group["initial_lr"] = options["lr"]
        kwargs["lr_scheduler"].base_lrs = [options["lr"] for options in self.options]


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
