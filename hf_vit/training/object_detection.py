"""Training of object detection: how images are predicted, scored and drawn, and what a script is told.

Shapes: K classes, Q queries, N objects.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor
from transformers import BaseImageProcessor, PreTrainedModel
from transformers.utils import logging

from ..configuration_hf_vit import HfViTConfig, to_pair
from ..data import (
    ObjectDetectionCollator,
    TargetData,
    detection_augmentation,
    load_object_detection,
    multi_scale_sizes,
)
from ..metrics import DetectionMetric
from ..modeling_detection_hf_vit import HfViTForObjectDetection
from ..outputs_hf_vit import DetectionPrediction
from ..task_detection import class_loss_of, detection_loss
from ..visualize import draw_detections, draw_precision_recall
from .distillation import DistillationArguments
from .object_arguments import (
    DetectionAugmentationArguments,
    DetectionDataArguments,
    DetectionModelArguments,
    DetectionTrainingArguments,
)
from .processors import describe_whole_images, whole_image_processor
from .record import describe_weights
from .scored_task import ScoredTask
from .scorer import Batch, Scored, Scorer
from .scoring_trainer import ScoringTrainer


logger = logging.get_logger(__name__)

Target = dict[str, Tensor]
Prediction = dict[str, Tensor]


class DetectionScorer(Scorer):
    """Predicts and scores boxes with classes."""

    class_score = "AP"
    metric: DetectionMetric

    def __init__(self, processor: BaseImageProcessor, metric: DetectionMetric, num_queries: int) -> None:
        """Begins.

        Args:
            processor: Makes boxes of outputs.
            metric: Scores them.
            num_queries: How many objects the model finds at most.
        """
        super().__init__(processor, metric)
        self.num_queries = num_queries

    def predict(self, model: PreTrainedModel, batch: Batch) -> list[Scored]:
        """Returns the boxes of each image, and its sum of losses beside its number of objects."""
        outputs = model(batch["pixel_values"], patch_attention_mask=batch.get("patch_attention_mask"))
        sizes = [tuple(target["size"].tolist()) for target in batch["targets"]]
        found = self.processor.post_process_object_detection(outputs, threshold=0.0, target_sizes=sizes)
        return [
            Scored(
                {"boxes": result["boxes"], "class_labels": result["labels"], "scores": result["scores"]},
                self._sum_of_losses(model, DetectionPrediction(logits[None], boxes[None]), label),
                len(label["class_labels"]),
            )
            for result, logits, boxes, label in zip(
                found, outputs.logits, outputs.pred_boxes, batch["labels"], strict=True
            )
        ]

    def _sum_of_losses(self, model: PreTrainedModel, prediction: DetectionPrediction, label: Target) -> float:
        loss, _ = detection_loss([prediction], [label], model.options, num_boxes=1)
        return float(loss)

    def per_class(self) -> dict[str, dict[str, float]]:
        """Returns the scores of each class."""
        return self.metric.per_class()

    def has_truth(self, target: Target) -> bool:
        """Whether there is an object that is no crowd."""
        return bool((~target["is_crowd"]).any())

    def describe_lack(self, targets: Iterable[Target]) -> str:
        """Says that there are no objects."""
        return "none has an object with a box. Check the annotations."

    def trivial(self, targets: Iterable[Target]) -> tuple[str, Callable[[Target], Prediction]]:
        """Finds one object of each class in every image, as sure as the class is common, where they are on average."""
        count = len(self.metric.names)
        sums, counts = torch.zeros(count, 4, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
        for target in targets:
            kept = ~target["is_crowd"]
            labels, boxes = target["class_labels"][kept], target["boxes"][kept].double()
            sums.index_add_(0, labels, boxes / corners_of(target["size"]))
            counts.index_add_(0, labels, torch.ones(len(labels), dtype=torch.float64))
        (known,) = counts.nonzero(as_tuple=True)
        means, shares = sums[known] / counts[known, None], counts[known] / counts.sum()

        def predict(target: Target) -> Prediction:
            return {"boxes": means * corners_of(target["size"]), "class_labels": known, "scores": shares}

        return "mean box of each class", predict

    def draw(
        self, images: list[Image], predictions: list[Prediction], targets: list[Target], file: str | PathLike[str]
    ) -> None:
        """Draws true boxes beside those that are likely."""
        draw_detections(images, predictions, targets, self.metric.names, file)

    def draw_scores(self, folder: Path, split: str) -> dict[str, str]:
        """Draws precision over recall."""
        file = f"{split}_precision_recall.png"
        draw_precision_recall(self.metric.precision_recall(), folder / file)
        return {"Precision over recall at IoU 0.5": file}

    def describe_evaluation(self) -> str:
        """Says what is scored."""
        return f"whole images, the {self.num_queries} most likely pairs of a box and a class; AP and AR as COCO's"

    def describe_limits(self) -> str:
        """Says what the model is not good for."""
        return (
            f"It knows {len(self.metric.names)} classes, and finds {self.num_queries} objects in an image at most. It "
            "has seen images like those that it was trained on, and its score says little about others."
        )


def corners_of(size: Tensor) -> Tensor:
    """Returns what the corners (4,) of a box are relative to in an image of a height and width (2,)."""
    height, width = size.double()
    return torch.stack((width, height, width, height))


def warn_of_full_images(data: TargetData, num_queries: int) -> None:
    """Warns of images with more objects than a model finds, crowds aside: the others are neither learned nor found."""
    counts = [crowds.count(False) for rows in data.splits.values() for crowds in rows["is_crowd"][:]]
    if num_full := sum(count > num_queries for count in counts):
        logger.warning(
            "%d of %d images have more objects than num_queries=%d, up to %d, and no more than that are learned and "
            "found in any. Raise num_queries, which is in detection_config.",
            num_full,
            len(counts),
            num_queries,
            max(counts),
        )


@dataclass
class ObjectDetection(ScoredTask):
    """Training of object detection by a script; see `ScoredTask`."""

    argument_types = (
        DetectionModelArguments,
        DetectionDataArguments,
        DetectionAugmentationArguments,
        DetectionTrainingArguments,
        DistillationArguments,
    )
    model_class = HfViTForObjectDetection
    pipeline = "object-detection"
    packages = ("matplotlib", "scipy", "faster_coco_eval")
    collator_class = ObjectDetectionCollator

    data: DetectionDataArguments
    augmentation: DetectionAugmentationArguments

    def open_data(self) -> TargetData:
        """Opens images and boxes."""
        return load_object_detection(self.data.dataset_name, **self.data.source_options())

    def make_trainer(self) -> ScoringTrainer:
        """Returns the trainer, and warns if the model has not enough queries; see `ScoredTask`."""
        trainer = super().make_trainer()
        warn_of_full_images(self.loaded, trainer.model.options.num_queries)
        return trainer

    def make_processor(self, processor: BaseImageProcessor, config: HfViTConfig) -> BaseImageProcessor:
        """Returns an image processor that leaves nothing of an image out."""
        return whole_image_processor(processor, config, self.augmentation.keep_aspect_ratio)

    def make_transform(self, config: HfViTConfig) -> Callable[[Any], Any]:
        """Returns what changes images and boxes at random."""
        return detection_augmentation(
            to_pair(config.image_size), num_channels=config.num_channels, **self.augmentation.options()
        )

    def make_collator(self, processor: BaseImageProcessor, config: HfViTConfig) -> ObjectDetectionCollator:
        """Returns what makes batches, of several sizes if asked for."""
        return ObjectDetectionCollator(processor, self._sizes(config) if self.augmentation.multi_scale else None)

    def _sizes(self, config: HfViTConfig) -> list[tuple[int, int]]:
        patch = to_pair(config.patch_size)
        window = (1, 1) if config.window_size is None else to_pair(config.window_size)
        return multi_scale_sizes(to_pair(config.image_size), (patch[0] * window[0], patch[1] * window[1]))

    def make_scorer(self, model: PreTrainedModel, processor: BaseImageProcessor) -> DetectionScorer:
        """Returns what predicts and scores images."""
        return DetectionScorer(processor, DetectionMetric(self.loaded.names), model.options.num_queries)

    def describe_model(self, model: PreTrainedModel) -> dict[str, str]:
        """Says of decoder and loss what a card shall say."""
        options = model.options
        classes = class_loss_of(options).replace("_", " ")
        weights = {f"{classes} of the class": 1.0, "L1": options.bbox_weight, "GIoU": options.giou_weight}
        return {
            "decoder": f"{options.decoder}, {options.num_queries} queries",
            "loss": describe_weights(weights),
        }

    def describe_size(self, config: HfViTConfig) -> str:
        """Says how large images are."""
        return describe_whole_images(config, self.augmentation.keep_aspect_ratio)
