"""The best checkpoint of a training that resumes: where it is, and whether it still is what it was."""

import json
from pathlib import Path
from typing import Any

from transformers import TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import logging

from ..errors import CheckpointError, how_to_resume
from ..saving.checkpoints import find_loss, on_first_process
from .resume import ResumeCallback, best_checkpoint


logger = logging.get_logger(__name__)


class BestCheckpoint(ResumeCallback):
    """Looks for the best checkpoint beside the one that the training resumes from: folders may have moved.

    If it is lost, the best of the steps that follow is looked for instead, with a warning. (The library would end with
    the last weights, or with what the damaged file has in their place.)
    """

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        if self.checkpoint is None or not args.load_best_model_at_end:
            return
        # The library may have forgotten the place by now, but not the score.
        saved = json.loads((self.checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        if saved.get("best_model_checkpoint") is None:
            return
        best = self.checkpoint.with_name(Path(saved["best_model_checkpoint"]).name)
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
        if (best := best_checkpoint(args, state)) is None:
            return
        if (fault := on_first_process(args, lambda: find_loss(best))) is not None:
            raise CheckpointError(f"The best checkpoint, {best}, is lost: {fault}. {how_to_resume(args.output_dir)}")
