"""Scoring of a saved model for segmentation or depth by a script."""

from dataclasses import dataclass
from typing import Any, ClassVar, cast

from ..convert import load_image_processor
from ..data import DensePredictionCollator
from .arguments import ImageDataArguments, ModelArguments, TrainedImagesArguments
from .checks import check_packages
from .dense_arguments import (
    DenseAugmentationArguments,
    DenseTrainingArguments,
    DepthEvaluationArguments,
    DepthImagesArguments,
    SemanticEvaluationArguments,
    SemanticImagesArguments,
    UniversalImagesArguments,
)
from .dense_report import score_split
from .dense_scorer import check_truth
from .dense_task import DenseTask
from .dense_trainer import DenseTrainer
from .depth_estimation import DepthEstimation
from .evaluation import Evaluation, EvaluationArguments, ScoredModel
from .load_dense import load_scored_dense
from .models import open_trained
from .semantic_segmentation import SemanticSegmentation
from .universal_segmentation import UniversalSegmentation


@dataclass
class DenseEvaluationArguments(EvaluationArguments):
    """The same, with batches that suit dense prediction."""

    per_device_eval_batch_size: int = DenseTrainingArguments.per_device_eval_batch_size


class DenseEvaluation(Evaluation):
    """Scoring of a saved model for segmentation or depth; see `Evaluation`."""

    task_class: ClassVar[type[DenseTask]]

    def __init__(
        self, scored: ScoredModel, data: ImageDataArguments, args: DenseEvaluationArguments, *options: Any
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
        self.task = self.task_class(ModelArguments(), images, DenseAugmentationArguments(), args, *options)

    def prepare(self) -> tuple[str, int]:
        """Opens model and data."""
        name, task = self.scored.model_name_or_path, self.task
        check_packages(*task.packages)
        self.model = open_trained(task.model_class, name)
        self.processor = load_image_processor(name, patch_size=self.model.config.patch_size)
        label2id = self.model.config.label2id
        split, task.loaded = load_scored_dense(task.open_data, self.data, self.scored.split, label2id, self.args)
        self.split, self.examples = split, task.loaded.examples(split)
        self.scorer = task.make_scorer(self.model, self.processor)
        check_truth(self.scorer, split, self.examples)
        return split, len(self.examples)

    def score(self) -> dict[str, float]:
        """Writes the scores, those of each class where there are classes, and a picture of a few images."""
        trainer = DenseTrainer(
            model=self.model,
            args=self.args,
            data_collator=DensePredictionCollator(self.processor),
            scorer=self.scorer,
        )
        scores, _ = score_split(trainer, self.split, self.examples)
        return scores


class SemanticEvaluation(DenseEvaluation):
    """Scoring of semantic segmentation."""

    task_class = SemanticSegmentation
    argument_types = (ScoredModel, SemanticImagesArguments, DenseEvaluationArguments, SemanticEvaluationArguments)


class UniversalEvaluation(DenseEvaluation):
    """Scoring of universal segmentation."""

    task_class = UniversalSegmentation
    argument_types = (ScoredModel, UniversalImagesArguments, DenseEvaluationArguments)


class DepthEvaluation(DenseEvaluation):
    """Scoring of depth."""

    task_class = DepthEstimation
    argument_types = (ScoredModel, DepthImagesArguments, DenseEvaluationArguments, DepthEvaluationArguments)
