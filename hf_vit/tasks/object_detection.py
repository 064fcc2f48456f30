"""Object detection: options, evaluator, multi-scale batches and model card texts."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from transformers import BaseImageProcessor, PreTrainedModel
from transformers.utils import logging

from ..data import load_object_detection
from ..data.augmentation.joint import DetectionAugmentation
from ..data.collators import ObjectDetectionCollator, multi_scale_sizes
from ..data.datasets import TargetData
from ..evaluation.base import Batch, Evaluator, File, ImageResult, Images
from ..evaluation.calibration import fit_missed
from ..evaluation.detection import DetectionMetric
from ..evaluation.segmentation import DEFAULT_THRESHOLD
from ..model.calibration import HfViTCalibrationConfig
from ..model.configuration_hf_vit import HfViTConfig, to_pair
from ..model.deformable_decoder import DetectionPrediction
from ..model.pipeline_hf_vit import CORNERS
from ..model.task_object_detection import (
    HfViTForObjectDetection,
    class_loss_of,
    class_scores_of,
    loss_normalizers,
    prediction_losses,
)
from ..options.field import (
    CHANGES_IMAGES,
    POSITIVE,
    PROBABILITY,
    Names,
    augmentation_option,
    data_option,
    model_option,
    source_option,
)
from ..options.training_arguments import HfViTTrainingArguments
from ..visualize.objects import draw_detections
from ..visualize.plots import draw_precision_recall
from .common.card import Usage, describe_weights
from .common.defaults import DETECTION
from .shared import BATCH_OF_16, SIMILAR_IMAGES, ObjectArguments, SpatialTask


logger = logging.get_logger(__name__)
Target = dict[str, Tensor]
Prediction = dict[str, Tensor]


@dataclass(eq=False)
class DetectionEvaluator(Evaluator):
    """Predict and score boxes with classes."""

    lack = "no image has an object with a box. Check the annotations."
    class_score = "AP"
    has_offset = True
    completes_calibration = True
    metric: DetectionMetric
    num_queries: int

    def predict(self, model: PreTrainedModel, batch: Batch) -> list[ImageResult]:
        """Return the predicted boxes of each image, the sums of its losses, and the normalizers of these sums."""
        outputs = model(batch["pixel_values"], patch_attention_mask=batch.get("patch_attention_mask"))
        sizes = [tuple(target["size"].tolist()) for target in batch["targets"]]
        found = self.processor.post_process_object_detection(outputs, threshold=0.0, target_sizes=sizes)
        return [
            ImageResult(
                {"boxes": result["boxes"], "class_labels": result["labels"], "scores": result["scores"]},
                self._sums_of_losses(model, DetectionPrediction(logits[None], boxes[None]), label),
                tuple(loss_normalizers([label], model.options).tolist()),
            )
            for result, logits, boxes, label in zip(
                found, outputs.logits, outputs.pred_boxes, batch["labels"], strict=True
            )
        ]

    def _sums_of_losses(
        self, model: PreTrainedModel, prediction: DetectionPrediction, label: Target
    ) -> tuple[float, float]:
        """Return the sum of the class losses and the sum of the box losses."""
        classes, distances, overlaps = prediction_losses(*prediction, [label], model.options)
        boxes = model.options.bbox_weight * distances + model.options.giou_weight * overlaps
        return float(classes), float(boxes)

    def calibration_data(self) -> tuple[Tensor, Tensor]:
        """Return the logits (N,) of the scores of detections, and whether each is correct (N,)."""
        return self.metric.score_logits()

    def complete_calibration(self, calibration: HfViTCalibrationConfig) -> HfViTCalibrationConfig:
        """Return the calibration with the score thresholds for given shares of missed objects."""
        images = self.metric.all_matched(self.processor.nms_threshold or 1.0, bool(self.processor.class_agnostic_nms))
        missed: dict[str, Any] = fit_missed(images)
        return replace(calibration, **missed)

    def describe(self, prediction: Prediction, target: Any) -> dict[str, Any]:
        """Return label, score and box of each object with a score above the threshold."""
        kept = prediction["scores"] >= (DEFAULT_THRESHOLD if self.threshold is None else self.threshold)
        columns = (prediction[name][kept].tolist() for name in ("class_labels", "scores", "boxes"))
        return {
            "objects": [
                {"label": self.metric.names[label], "score": score, "box": dict(zip(CORNERS, box, strict=True))}
                for label, score, box in zip(*columns, strict=True)
            ]
        }

    def has_annotations(self, target: Target) -> bool:
        """Return whether there is an object that is not a crowd."""
        return bool((~target["is_crowd"]).any())

    def naive_baseline(self, targets: Iterable[Target]) -> tuple[str, Callable[[Target], Prediction]]:
        """Predict one object of each class in every image, at its mean position, with the class frequency as score."""
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

    def draw(self, images: Images, predictions: list[Prediction], targets: list[Target], file: File) -> None:
        """Draw labeled boxes next to predicted boxes with scores above the threshold."""
        chosen = {} if self.threshold is None else {"threshold": self.threshold}
        draw_detections(images, predictions, targets, self.metric.names, file, **chosen)

    def draw_scores(self, folder: Path, split: str) -> dict[str, str]:
        """Draw the precision-recall curve."""
        file = f"{split}_precision_recall.png"
        draw_precision_recall(self.metric.precision_recall(), folder / file)
        return {"Precision-recall curve at IoU 0.5": file}

    def describe_evaluation(self) -> str:
        """Return a description of the evaluation."""
        overlap = self.processor.nms_threshold
        surer = (
            "a box of any class with a higher score"
            if self.processor.class_agnostic_nms
            else "a box of the same class with a higher score"
        )
        repeats = "" if overlap is None else f" except those that overlap {surer} by an IoU above {overlap:g}"
        pairs = f"the {self.num_queries} most likely pairs of a box and a class{repeats}"
        return f"whole images, {pairs}; AP and AR as COCO's"


def corners_of(size: Tensor) -> Tensor:
    """Return factors (4,) that convert relative box corners to pixels, for an image of height and width (2,)."""
    return size.double().flip(0).repeat(2)  # width, height, width, height of the image


def warn_of_full_images(data: TargetData, num_queries: int) -> None:
    """Warn about images that contain more objects, not counting crowds, than the model has queries."""
    counts = [crowds.count(False) for rows in data.splits.values() for crowds in rows["is_crowd"][:]]
    if num_full := sum(count > num_queries for count in counts):
        logger.warning(
            "%d of %d images have more objects than num_queries=%d, up to %d. The model can learn and find only "
            "num_queries objects per image. Increase num_queries in detection_config.",
            num_full,
            len(counts),
            num_queries,
            max(counts),
        )


@dataclass
class DetectionArguments(ObjectArguments):
    """Options of object detection: model, images with boxes, and augmentation."""

    task_config = "detection_config"
    task_options = ("decoder",)
    loader_options = (*ObjectArguments.loader_options, "bbox_format", "class_names")

    dataset_name: str = source_option(
        "Folder or file in the format of COCO, Pascal VOC or YOLO, parquet files with a column of "
        "objects, or a Hub name."
    )
    bbox_format: Literal["coco", "voc", "yolo"] | None = data_option(
        None,
        "Box format of a column of objects: x, y, width, height (coco) or x1, y1, x2, y2 (voc) in pixels, or center, "
        "width and height relative to the image (yolo).",
    )
    class_names: Names | None = data_option(
        None, 'Class names, such as "cat,dog", if the data does not contain them.', essential=True
    )
    decoder: str | None = model_option(
        None, "Decoder: deformable or queries; by default deformable, or that of the saved model.", essential=True
    )
    keep_aspect_ratio: bool = augmentation_option(
        False,
        "Resize the shorter side to image_size and keep the aspect ratio; otherwise both sides are resized to "
        "image_size.",
    )
    iou_crop: float = augmentation_option(0.0, "Probability of a random crop around an object.", PROBABILITY)
    min_scale: float = augmentation_option(
        0.5, "Smallest scale of training images; at 1 they have the size of evaluation images.", POSITIVE
    )
    max_scale: float = augmentation_option(1.5, "Largest scale of training images.", POSITIVE)
    horizontal_flip: float = augmentation_option(0.5, "Probability of a horizontal flip.", PROBABILITY)
    photometric: float = augmentation_option(
        0.5, "Probability of a change of brightness, contrast and colors.", PROBABILITY
    )
    multi_scale: bool = augmentation_option(
        False,
        "Draw a random image size for every batch, from 0.75 to 1.25 times image_size.",
        conflicts=CHANGES_IMAGES,
    )


@dataclass(frozen=True)
class ObjectDetection(SpatialTask):
    """Object detection."""

    model_class = HfViTForObjectDetection
    load_source = staticmethod(load_object_detection)
    pipeline = "object-detection"
    usage = Usage(
        name="detect",
        stock="""for found in detect("image.png"):
    print(found["label"], found["score"], found["box"])""",
        own="""sizes = [(image.height, image.width)]
threshold = model.options.score_threshold or 0.5
(result,) = image_processor.post_process_object_detection(outputs, threshold, sizes)
for label, score, box in zip(result["labels"], result["scores"], result["boxes"]):
    print(model.config.id2label[int(label)], float(score), box.tolist())  # x1, y1, x2, y2
print(len(result["boxes"]), "objects")""",
    )
    packages = ("matplotlib", "scipy", "faster_coco_eval")
    has_scores = True
    limits = (
        "The model detects {num_classes} classes, and at most {model.options.num_queries} objects per image."
        + SIMILAR_IMAGES
    )
    chooses_threshold = True
    augment = staticmethod(DetectionAugmentation)
    defaults = DETECTION
    argument_defaults: ClassVar[dict[str, Any]] = {
        **BATCH_OF_16,
        "learning_rate": 2e-4,
        "weight_decay": 1e-4,
        "max_grad_norm": 0.1,  # detection needs small learning rates and clipped gradients
        "metric_for_best_model": "map",
    }

    options: DetectionArguments

    def options_of_processor(self, data: TargetData) -> dict[str, Any]:
        """Return image processor options without non-maximum suppression, chosen later on validation images."""
        return {"nms_threshold": None, "class_agnostic_nms": None}

    def open_model(self, data: TargetData, args: HfViTTrainingArguments) -> tuple[PreTrainedModel, Any]:
        """Return the model and its image processor, and warn if the model has too few queries."""
        model, processor = super().open_model(data, args)
        warn_of_full_images(data, model.options.num_queries)
        return model, processor

    def make_processor(self, processor: BaseImageProcessor, config: HfViTConfig, data: TargetData) -> Any:
        """Return an image processor that does not crop images and decodes the logits of the model."""
        whole = super().make_processor(processor, config, data)
        whole.class_scores = class_scores_of(config)
        return whole

    def augmentation_arguments(self, processor: Any, config: HfViTConfig, data: TargetData) -> dict[str, Any]:
        """Return the arguments of `augment`, without the option for multi-scale batches."""
        arguments = super().augmentation_arguments(processor, config, data)
        return {name: value for name, value in arguments.items() if name != "multi_scale"}

    def make_collator(self, processor: BaseImageProcessor, model: PreTrainedModel) -> ObjectDetectionCollator:
        """Return the collator, with multi-scale batches if requested."""
        config = model.config
        patch, window = to_pair(config.patch_size), to_pair(config.window_size or 1)
        steps = patch[0] * window[0], patch[1] * window[1]
        sizes = multi_scale_sizes(to_pair(config.image_size), steps) if self.options.multi_scale else None
        return ObjectDetectionCollator(processor, sizes)

    def make_evaluator(
        self, model: PreTrainedModel, processor: BaseImageProcessor, data: TargetData
    ) -> DetectionEvaluator:
        """Return the evaluator."""
        return DetectionEvaluator(processor, DetectionMetric(data.names), model.options.num_queries)

    def describe_model(
        self, model: PreTrainedModel, processor: Any, data: TargetData, args: HfViTTrainingArguments
    ) -> dict[str, str]:
        """Return the table rows of the model card about decoder and loss."""
        options, rows = model.options, super().describe_model(model, processor, data, args)
        classes = class_loss_of(options).replace("_", " ")
        weights = {f"{classes} of the class": 1.0, "L1": options.bbox_weight, "GIoU": options.giou_weight}
        return {
            "decoder": f"{options.decoder}, {options.num_queries} queries",
            "loss": describe_weights(weights),
            **rows,
        }
