"""What trainings without labels share: their images, and neighbors that tell what the features are good for.

Shapes: B batch, C channels, H W pixels, D size of the features, M images of known classes.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from ...data.collators import masked_image_target
from ...data.datasets import TargetDataset
from ...evaluation.base import BaseEvaluator
from ...evaluation.features import NUM_NEIGHBORS, TEMPERATURE, classify_by_neighbors
from ..arguments import UnlabeledArguments
from ..evaluator_trainer import EvaluatorTrainer
from ..streams import UnlabeledImages, load_images
from .base import EvaluationArguments, Task


logger = logging.get_logger(__name__)
# Use of a model as the stock pipeline of features
DESCRIBE = """(features,) = describe("image.png")
print(len(features), "tokens of", len(features[0]), "features")"""
FEW_IMAGES = 2000  # 900 photos were hardly a better start than random weights, 3,000 were (model_cards/)
RAW_SIZE = 32  # pixels a side of the images whose pixels are taken for features


@dataclass(eq=False)
class NeighborEvaluator(BaseEvaluator):
    """Evaluator that classifies an image by its nearest training images, see `classify_by_neighbors`."""

    loss_meaning: ClassVar[str]  # in words
    compared: ClassVar[str]  # features, in words
    baseline_name: ClassVar[str]
    known: TargetDataset  # training images whose class is known
    is_baseline: bool = field(default=False, kw_only=True)  # the features are then raw pixels, whatever the model
    _neighbors: tuple[Tensor, Tensor] | None = field(init=False, default=None)  # their features (M, D), classes (M,)

    @torch.no_grad()
    def prepare(self, trainer: EvaluatorTrainer) -> None:
        """Encodes all training images whose class is known, of which each process takes a share."""
        if not len(self.known):
            return
        trainer.model.eval()
        features, classes = [], []
        for batch in trainer.get_test_dataloader(self.known):
            inputs = trainer._prepare_inputs(batch)
            described = self.described(trainer.plain_model, inputs["pixel_values"])
            numbers = torch.tensor(inputs["targets"], device=described.device)
            described, numbers = trainer.accelerator.gather_for_metrics((described, numbers))
            features.append(described)
            classes.append(numbers)
        self._neighbors = torch.cat(features), torch.cat(classes)

    def describe_evaluation(self) -> str:
        """Returns what the scores are of, in words."""
        if not self.metric.score_names:
            return self.loss_meaning
        return (
            f"{self.loss_meaning}; knn_accuracy: the class of {NUM_NEIGHBORS} neighbors among training images, "
            f"weighted at temperature {TEMPERATURE}, by {self.compared}"
        )

    def described(self, model: PreTrainedModel, pixel_values: Tensor) -> Tensor:
        """Returns the features of each image (B, D), those of the baseline being its pixels at a small size."""
        return raw_pixels(pixel_values) if self.is_baseline else self.features(model, pixel_values)

    @abstractmethod
    def features(self, model: PreTrainedModel, pixel_values: Tensor) -> Tensor:
        """Returns the features of each image, (B, D)."""

    def classes(self, model: PreTrainedModel, pixel_values: Tensor) -> Sequence[int | None]:
        """Returns the class number of each image by its neighbors, None where no classes are known."""
        if self._neighbors is None:
            return [None] * len(pixel_values)
        numbers: list[int] = classify_by_neighbors(self.described(model, pixel_values), *self._neighbors).tolist()
        return numbers


def raw_pixels(pixel_values: Tensor) -> Tensor:
    """Returns the pixels of images (B, C, H, W) at a small size, (B, C·32·32), as features that are not trained."""
    return F.interpolate(pixel_values, size=(RAW_SIZE, RAW_SIZE), mode="bilinear", antialias=True).flatten(1)


@dataclass
class UnlabeledTask(Task):
    """A pretraining without labels."""

    pipeline = "image-feature-extraction"

    options: UnlabeledArguments

    loaded: UnlabeledImages = field(init=False)

    def load_training_data(self) -> UnlabeledImages:
        """Opens and checks the images of a training, and warns of few."""
        loaded = load_images(self.options, self.args)
        if loaded.stream is None and loaded.num_train < FEW_IMAGES:
            logger.warning(
                f"{loaded.num_train:,} images are few to learn from without labels: the encoder may be no better a "
                "start than random weights. Give more of the kind, with labels or without."
            )
        return loaded

    def make_evaluation_trainer(self, saved: EvaluationArguments) -> tuple[EvaluatorTrainer, str]:
        """Raise `ValueError`: outside of a training run, only the features are evaluated."""
        raise ValueError(
            f"{saved.model_name_or_path} was trained without labels, and has no task of its own to evaluate. "
            "Evaluate its features: hf-vit features extract, then hf-vit features evaluate."
        )

    def count_training_images(self) -> int:
        """Returns the number of training images, of a stream that of those that are read in advance."""
        return self.loaded.num_train

    def count_evaluated_images(self, split: str) -> int:
        """Returns the number of images that an evaluation of a split reads, those of known classes included."""
        return super().count_evaluated_images(split) + len(self.loaded.known)

    @property
    def known(self) -> TargetDataset:
        """The training images whose class is known."""
        return TargetDataset(self.loaded.known, masked_image_target)

    def evaluate_baseline(self, trainer: EvaluatorTrainer, split: str) -> tuple[str, dict[str, float]]:
        """Evaluates, on all processes, the baseline of the evaluator."""
        assert isinstance(trainer.evaluator, NeighborEvaluator)
        evaluator = replace(trainer.evaluator, is_baseline=True)
        with trainer.scoring_by(evaluator):
            metrics = trainer.predict(self.loaded.examples(split), metric_key_prefix=split).metrics
        return evaluator.baseline_name, {
            score: metrics[f"{split}_{score}"] for score in ("loss", *evaluator.metric.score_names)
        }
