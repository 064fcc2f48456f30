"""Scoring of a saved model with a `Scorer` by a script."""

from dataclasses import dataclass
from typing import Any, ClassVar, cast

from ..convert import load_image_processor
from .arguments import ImageDataArguments, ModelArguments, TrainedImagesArguments
from .checks import check_packages
from .distillation import DistillationArguments
from .evaluation import Evaluation, EvaluationArguments, ScoredModel
from .load_targets import load_scored_targets
from .models import open_trained
from .scored_arguments import ScoredTrainingArguments
from .scored_report import score_split
from .scored_task import ScoredTask
from .scorer import check_truth
from .scoring_trainer import ScoringTrainer


@dataclass
class ScoredEvaluationArguments(EvaluationArguments):
    """The same, with batches that suit targets of more than a class."""

    per_device_eval_batch_size: int = ScoredTrainingArguments.per_device_eval_batch_size


class ScoredEvaluation(Evaluation):
    """Scoring of a saved model for one task; see `Evaluation`."""

    task_class: ClassVar[type[ScoredTask]]

    def __init__(
        self, scored: ScoredModel, data: ImageDataArguments, args: ScoredEvaluationArguments, *options: Any
    ) -> None:
        """Takes what a script was told.

        Args:
            scored: Which model to score, and on which split.
            data: On which images and targets.
            args: How to run it.
            *options: How to score it, if there is a choice.
        """
        self.scored = scored
        self.data = data
        self.args = args
        # Of the task, only how it opens data and scores is used, which takes nothing that is for training alone.
        images = cast(TrainedImagesArguments, data)
        self.task = self.task_class(ModelArguments(), images, None, args, DistillationArguments(), *options)

    def prepare(self) -> tuple[str, int]:
        """Opens model and data."""
        name, task = self.scored.model_name_or_path, self.task
        check_packages(*task.packages)
        self.model = open_trained(task.model_class, name)
        self.processor = load_image_processor(name, patch_size=self.model.config.patch_size)
        label2id = self.model.config.label2id
        split, task.loaded = load_scored_targets(task.open_data, self.data, self.scored.split, label2id, self.args)
        self.split, self.dataset = split, task.loaded.examples(split)
        self.scorer = task.make_scorer(self.model, self.processor)
        check_truth(self.scorer, split, self.dataset)
        return split, len(self.dataset)

    def score(self) -> dict[str, float]:
        """Writes the scores, those of each class where there are classes, and a picture of a few images."""
        trainer = ScoringTrainer(
            model=self.model,
            args=self.args,
            data_collator=self.task.collator_class(self.processor),
            scorer=self.scorer,
        )
        scores, _ = score_split(trainer, self.split, self.dataset)
        return scores
