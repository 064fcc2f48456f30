"""Training of models whose predictions are scored image by image."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import BaseImageProcessor, PreTrainedModel, TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from ...data import AugmentedDataset, TargetData
from ...evaluation.evaluator import Evaluator, check_truth
from ...model.configuration_hf_vit import HfViTConfig
from ...model.pretrained import HfViTPreTrainedModel
from ..arguments import ModelArguments, TrainedImagesArguments
from ..checks import check_packages, check_training
from ..distillation.arguments import DistillationArguments, make_distillation
from ..evaluator_trainer import EvaluationPictures, EvaluatorTrainer, TargetCollator
from ..load_data import load_targets
from ..models import load_model
from ..publishing.record import describe_data, describe_options
from ..publishing.report import write_scored_report
from ..trainer import HfViTTrainer
from .arguments import ScoredTrainingArguments
from .base import TrainingTask


@dataclass
class ScoredTask(TrainingTask):
    """Training of a model for one task by a script.

    Args:
        model: Which model to train.
        data: On which images and targets.
        augmentation: How they are changed at random.
        args: How to train.
        distillation: From which teacher, if any.
    """

    model_class: ClassVar[type[HfViTPreTrainedModel]]
    pipeline: ClassVar[str]  # name of the pipeline
    parts: ClassVar[str] = "in {} classes"
    collator_class: ClassVar[type[TargetCollator]]
    packages: ClassVar[tuple[str, ...]] = ("matplotlib",)  # that only some trainings need

    model: ModelArguments
    data: TrainedImagesArguments
    augmentation: Any
    args: ScoredTrainingArguments
    distillation: DistillationArguments

    @abstractmethod
    def open_data(self) -> TargetData:
        """Opens the data."""

    @abstractmethod
    def make_processor(self, processor: BaseImageProcessor, config: HfViTConfig) -> BaseImageProcessor:
        """Returns the image processor of the trained model, given the one that belongs to the model it starts from."""

    @abstractmethod
    def make_transform(self, config: HfViTConfig) -> Callable[[Any], Any]:
        """Returns what changes training examples at random and brings them to the size of the model."""

    @abstractmethod
    def make_evaluator(self, model: PreTrainedModel, processor: BaseImageProcessor) -> Evaluator:
        """Returns what predicts and scores images."""

    @abstractmethod
    def describe_model(self, model: PreTrainedModel) -> dict[str, str]:
        """Says of a model's head and loss, under these names, what a card shall say."""

    @abstractmethod
    def describe_size(self, config: HfViTConfig) -> str:
        """Says how large images are for a model."""

    def facts_for_config(self) -> dict[str, dict[str, Any]]:
        """Returns what the data tell of options of heads, by the field of `HfViTConfig` that holds these."""
        return {}

    def make_collator(self, processor: BaseImageProcessor, config: HfViTConfig) -> TargetCollator:
        """Returns what makes batches of training examples."""
        return self.collator_class(processor)

    def callbacks(self) -> list[TrainerCallback]:
        """Returns what happens beside the steps of this task's trainings."""
        return []

    def load_data(self) -> list[str]:
        """Opens and checks the data and returns the names of its classes.

        Raises:
            ImportError: if a package is missing that this task needs, however late.
            OSError: if the data is missing.
            ValueError: if it is bad.
        """
        check_packages(*self.packages)
        self.loaded = load_targets(self.open_data, self.data, self.args)
        return list(self.loaded.names)

    def make_trainer(self) -> EvaluatorTrainer:
        """Returns the trainer of a new or a saved model; without validation images none are scored in training.

        Raises:
            ImportError: if torchvision is missing.
            ValueError: if a value is out of range, a split has no truth, or the best model cannot be chosen.
        """
        model, processor = load_model(self.model_class, self.model, self.loaded.names, self.facts_for_config())
        processor = self.make_processor(processor, model.config)
        distillation = make_distillation(self.distillation, model, processor)
        evaluator = self.make_evaluator(model, processor)
        splits = self.loaded.splits
        for split in splits:
            check_truth(evaluator, split, self.loaded.examples(split))
        has_validation = "validation" in splits
        scores = {"loss", *evaluator.metric.score_names}
        callbacks = [*check_training(self.args, len(splits["train"]), has_validation, scores), *self.callbacks()]
        transform = self.make_transform(model.config)
        trainer = EvaluatorTrainer(
            model=model,
            args=self.args,
            train_dataset=AugmentedDataset(self.loaded.examples("train"), transform, self.args.seed, column=None),
            eval_dataset=self.loaded.examples("validation") if has_validation else None,
            data_collator=self.make_collator(processor, model.config),
            processing_class=processor,
            callbacks=callbacks,
            distillation=distillation,
            evaluator=evaluator,
        )
        if has_validation and self.args.eval_strategy != IntervalStrategy.NO:
            trainer.add_callback(EvaluationPictures(trainer))
        return trainer

    def count_examples(self) -> dict[str, int]:
        """Returns the number of examples of each split."""
        return {name: len(rows) for name, rows in self.loaded.splits.items()}

    def write_report(self, trainer: HfViTTrainer, **facts: Any) -> dict[str, float]:
        """Scores a trained model; see `write_scored_report`."""
        assert isinstance(trainer, EvaluatorTrainer)
        return write_scored_report(
            trainer,
            self.loaded,
            lambda split: describe_data(
                self.data.dataset_name,
                self.data.dataset_license,
                self.count_examples(),
                split,
                self.loaded.names,
                examples=self.examples,
                parts=self.parts,
            ),
            task=self.pipeline,
            recipe={
                **self.describe_model(trainer.model),
                "input size": self.describe_size(trainer.model.config),
                "augmentation": describe_options(self.augmentation),
                **trainer.describe_teacher(),
            },
            **facts,
        )
