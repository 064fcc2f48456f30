"""Base classes for pretraining without labels: images, and evaluation of features by nearest neighbors.

In shapes, B is the batch size, C the number of channels, (H, W) the image size, D the feature size, and M the number
of labeled training images.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from ..data.collators import masked_image_target
from ..data.datasets import TargetData, TargetDataset
from ..evaluation.base import BaseEvaluator
from ..evaluation.features import NUM_NEIGHBORS, TEMPERATURE, classify_by_neighbors
from ..options.training_arguments import HfViTTrainingArguments
from .base import Task
from .common.arguments import UnlabeledArguments
from .common.streams import UnlabeledImages, load_images


logger = logging.get_logger(__name__)
# Model card code that uses a model in the transformers pipeline for feature extraction
DESCRIBE = """(features,) = describe("image.png")
print(len(features), "tokens of", len(features[0]), "features")"""
FEW_IMAGES = 2000  # training improved random weights on 3,000 photos, but hardly on 900 (model_cards/)
RAW_SIZE = 32  # side in pixels of the downscaled images of the raw pixel baseline


@dataclass(eq=False)
class NeighborEvaluator(BaseEvaluator):
    """Evaluator that classifies an image by its nearest training images, see `classify_by_neighbors`."""

    loss_meaning: ClassVar[str]  # description of the loss
    compared: ClassVar[str]  # description of the features that are compared
    baseline_name: ClassVar[str]
    known: TargetDataset  # training images that have a class label
    is_baseline: bool = field(default=False, kw_only=True)  # whether to use raw pixels as features
    _neighbors: tuple[Tensor, Tensor] | None = field(init=False, default=None)  # features and classes of `known`

    @torch.no_grad()
    def prepare(self, trainer: Any) -> None:
        """Compute the features of all training images with a class label. The processes share the work."""
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
        """Return a description of the scores."""
        if not self.metric.score_names:
            return self.loss_meaning
        return (
            f"{self.loss_meaning}; knn_accuracy: the class of {NUM_NEIGHBORS} neighbors among training images, "
            f"weighted at temperature {TEMPERATURE}, by {self.compared}"
        )

    def described(self, model: PreTrainedModel, pixel_values: Tensor) -> Tensor:
        """Return the features of each image, (B, D). The features of the baseline are the downscaled pixels."""
        return raw_pixels(pixel_values) if self.is_baseline else self.features(model, pixel_values)

    @abstractmethod
    def features(self, model: PreTrainedModel, pixel_values: Tensor) -> Tensor:
        """Return the features of each image, (B, D)."""

    def classes(self, model: PreTrainedModel, pixel_values: Tensor) -> Sequence[int | None]:
        """Predict the class index of each image from its nearest neighbors; None if no training image has a class."""
        if self._neighbors is None:
            return [None] * len(pixel_values)
        numbers: list[int] = classify_by_neighbors(self.described(model, pixel_values), *self._neighbors).tolist()
        return numbers


def pixel_levels(processor: Any) -> tuple[Any, Any]:
    """Return the mean and standard deviation, numbers or one per channel, that convert inputs to pixels in [0, 1]."""
    return (processor.image_mean, processor.image_std) if processor.do_normalize else ((0.0,), (1.0,))


def raw_pixels(pixel_values: Tensor) -> Tensor:
    """Return the pixels of downscaled images (B, C, H, W) as untrained features (B, C·32·32)."""
    return F.interpolate(pixel_values, size=(RAW_SIZE, RAW_SIZE), mode="bilinear", antialias=True).flatten(1)


@dataclass(frozen=True)
class UnlabeledTask(Task):
    """Base class of tasks for pretraining without labels."""

    pipeline = "image-feature-extraction"
    can_evaluate = False  # after training, only the features can be evaluated

    options: UnlabeledArguments

    def load_data(self, args: HfViTTrainingArguments) -> UnlabeledImages:
        """Open and check the training images, and warn if there are few."""
        data = load_images(self.options, args)
        if data.stream is None and data.num_train < FEW_IMAGES:
            logger.warning(
                f"{data.num_train:,} images are few for training without labels: the encoder may be no better "
                "than random weights. Add images of the same kind, with or without labels."
            )
        return data

    def evaluate_baselines(self, trainer: Any, data: TargetData, split: str) -> dict[str, dict[str, float]]:
        """Evaluate the baseline that the evaluator defines, on all processes."""
        assert isinstance(trainer.evaluator, NeighborEvaluator)
        evaluator = replace(trainer.evaluator, is_baseline=True)
        with trainer.evaluating_with(evaluator):
            metrics = trainer.predict(data.examples(split), metric_key_prefix=split).metrics
        names = ("loss", *evaluator.metric.score_names)
        return {evaluator.baseline_name: {score: metrics[f"{split}_{score}"] for score in names}}


def labeled_images(data: TargetData) -> TargetDataset:
    """Return the training images that have a class label."""
    assert isinstance(data, UnlabeledImages)
    return TargetDataset(data.known, masked_image_target)
