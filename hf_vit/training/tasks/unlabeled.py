"""What trainings without labels share: their images, and neighbors that tell what the features are good for.

Shapes: B batch, C channels, H W pixels, D size of the features, M images of known classes.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import BaseImageProcessor, PreTrainedModel
from transformers.trainer_utils import EvalLoopOutput
from transformers.utils import logging

from ...data import AugmentedDataset, AugmentedStream, TargetDataset, masked_image_target
from ...evaluation.evaluator import BaseEvaluator
from ...evaluation.features import NeighborAccuracy, classify_by_neighbors
from ...model.configuration_hf_vit import HfViTConfig
from ..arguments import UnlabeledDataArguments
from ..evaluator_trainer import EvaluatorTrainer
from ..load_stream import UnlabeledImages, load_images
from ..trainer import HfViTTrainer
from .base import EvaluatedModel, Task


logger = logging.get_logger(__name__)
FEW_IMAGES = 2000  # 900 photos were hardly a better start than random weights, 3,000 were (model_cards/)
RAW_SIZE = 32  # pixels a side of the images whose pixels are taken for features


class NeighborEvaluator(BaseEvaluator):
    """Evaluator that knows how to classify an image by its nearest training images, see `classify_by_neighbors`."""

    metric: NeighborAccuracy

    def __init__(self, processor: BaseImageProcessor, has_classes: bool) -> None:
        super().__init__(processor, NeighborAccuracy(has_classes))
        # Features (M, D) and classes (M,) of training images
        self.known: tuple[Tensor, Tensor] | None = None

    @abstractmethod
    def features(self, model: PreTrainedModel, pixel_values: Tensor) -> Tensor:
        """Returns the features of each image, (B, D)."""

    def classes(self, model: PreTrainedModel, pixel_values: Tensor) -> Sequence[int | None]:
        """Returns the class number of each image by its neighbors, None where no classes are known."""
        if self.known is None:
            return [None] * len(pixel_values)
        numbers: list[int] = classify_by_neighbors(self.features(model, pixel_values), *self.known).tolist()
        return numbers


def raw_pixels(pixel_values: Tensor) -> Tensor:
    """Returns the pixels of images (B, C, H, W) at a small size, (B, C·32·32), as features that are not trained."""
    return F.interpolate(pixel_values, size=(RAW_SIZE, RAW_SIZE), mode="bilinear", antialias=True).flatten(1)


class NeighborTrainer(EvaluatorTrainer):
    """`EvaluatorTrainer`, whose evaluations start with the features of training images whose class is known."""

    evaluator: NeighborEvaluator

    def __init__(self, *args: Any, known: TargetDataset, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.known = known

    def score_weights(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Scores all images."""
        if len(self.known):
            self.evaluator.known = self.describe_known()
        return super().score_weights(*args, **kwargs)

    @torch.no_grad()
    def describe_known(self) -> tuple[Tensor, Tensor]:
        """Returns features (M, D) and classes (M,) of all these images, of which each process encodes a share."""
        self.model.eval()
        features, classes = [], []
        for batch in self.get_test_dataloader(self.known):
            inputs = self._prepare_inputs(batch)
            described = self.evaluator.features(self.plain_model, inputs["pixel_values"])
            numbers = torch.tensor(inputs["targets"], device=described.device)
            described, numbers = self.accelerator.gather_for_metrics((described, numbers))
            features.append(described)
            classes.append(numbers)
        return torch.cat(features), torch.cat(classes)


@dataclass
class UnlabeledTask(Task):
    """A pretraining without labels."""

    trainer_class = NeighborTrainer

    data: UnlabeledDataArguments

    loaded: UnlabeledImages = field(init=False)

    def load_training_data(self) -> UnlabeledImages:
        """Opens and checks the images of a training, and warns of few."""
        loaded = load_images(self.data, self.args)
        if loaded.stream is None and loaded.num_train < FEW_IMAGES:
            logger.warning(
                f"{loaded.num_train:,} images are few to learn from without labels: the encoder may be no better a "
                "start than random weights. Give more of the kind, with labels or without."
            )
        return loaded

    def load_evaluation_data(self, saved: EvaluatedModel, label2id: dict[str, int]) -> tuple[str, UnlabeledImages]:
        """Refuses: outside of a training, the features are what is evaluated."""
        raise ValueError(
            f"{saved.model_name_or_path} was trained without labels, and has no task of its own to evaluate. "
            "Evaluate its features: scripts/extract_features.py and scripts/evaluate_features.py."
        )

    def count_training_images(self) -> int:
        """Returns the number of training images, of a stream that of those that are read in advance."""
        return self.loaded.num_train

    def count_evaluated_images(self, split: str) -> int:
        """Returns the number of images that an evaluation of a split reads, those of known classes included."""
        return super().count_evaluated_images(split) + len(self.loaded.known)

    def training_arguments(self, model: PreTrainedModel, processor: BaseImageProcessor) -> dict[str, Any]:
        """Returns the training images whose class is known."""
        return {"known": TargetDataset(self.loaded.known, masked_image_target)}

    def training_examples(
        self, processor: BaseImageProcessor, config: HfViTConfig
    ) -> AugmentedDataset | AugmentedStream:
        """Returns the augmented images to train on."""
        if self.loaded.stream is None:
            examples: AugmentedDataset = super().training_examples(processor, config)
            return examples
        data, transform = self.data, self.make_transform(processor, config)
        return AugmentedStream(
            self.loaded.stream,
            transform,
            self.args.seed,
            data.shuffle_buffer_size,
            data.skip_unreadable,
            shard_by_process=data.shard_by_process,
        )

    def evaluate_baseline(self, trainer: HfViTTrainer, split: str) -> tuple[str, dict[str, float]]:
        """Evaluates, on all processes, what is not trained, see `make_baseline`."""
        assert isinstance(trainer, NeighborTrainer)
        evaluator, average = trainer.evaluator, trainer.average
        name, trainer.evaluator = self.make_baseline(evaluator)
        trainer.average = None  # what has no weights is evaluated once
        metrics = trainer.predict(self.loaded.examples(split), metric_key_prefix=split).metrics
        trainer.evaluator, trainer.average = evaluator, average
        scores = {score: metrics[f"{split}_{score}"] for score in ("loss", *evaluator.metric.score_names)}
        return name, scores

    @abstractmethod
    def make_baseline(self, evaluator: NeighborEvaluator) -> tuple[str, NeighborEvaluator]:
        """Returns the name of what a model has to beat, and its evaluator."""
