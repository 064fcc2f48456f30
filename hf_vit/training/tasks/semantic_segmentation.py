"""Semantic segmentation: arguments, evaluator and card lines."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import BaseImageProcessor, PreTrainedModel

from ...data import load_semantic_segmentation
from ...evaluation.base import Batch, Evaluator, File, ImageResult, Images
from ...evaluation.segmentation import SemanticSegmentationMetric
from ...model.image_geometry import resize_nearest
from ...model.image_targets import IGNORED_LABEL
from ...model.task_semantic_segmentation import HfViTForSemanticSegmentation, segmentation_loss, window_of
from ...options.field import COUNT, POSITIVE, evaluation_option, model_option
from ...visualize.dense import draw_segmentation
from ..arguments import class_weights_option
from ..class_weights import choose_weights
from ..planning.defaults import SEGMENTATION
from ..publishing.model_card import Usage
from ..publishing.report import describe_weights
from .shared import BATCH_OF_16, SIMILAR_IMAGES, MaskArguments, SpatialTask, most_frequent_classes, size_of


MOST_COUNTED = 500  # masks by which classes are weighed


@dataclass(eq=False)
class SemanticEvaluator(Evaluator):
    """Predicts and scores the class of every pixel.

    Args:
        window: Side in pixels of windows that slide over an image; by default it is seen as a whole.
        scales: Sizes, relative to the image, of copies that are averaged.
        flip: Whether the mirror image of each copy counts too.
    """

    lack = (
        f"all pixels of all masks are of no class ({IGNORED_LABEL}). Check the masks and, where they count from "
        "1, --reduce_labels."
    )
    class_score = "IoU"
    metric: SemanticSegmentationMetric
    window: int | None = None
    scales: Sequence[float] = (1.0,)
    flip: bool = False

    def predict(self, model: PreTrainedModel, batch: Batch) -> list[ImageResult]:
        """Returns the map (H, W) and the loss of each image."""
        sizes = [size_of(target) for target in batch["targets"]]
        if (self.window, *self.scales, self.flip) != (None, 1.0, False):
            return [self._segment_one(model, batch, index, size) for index, size in enumerate(sizes)]
        mask = batch.get("patch_attention_mask")
        outputs = model(batch["pixel_values"], patch_attention_mask=mask)
        maps = self.processor.post_process_semantic_segmentation(outputs, sizes, patch_attention_mask=mask)
        losses = [
            float(segmentation_loss(logits[None], labels[None], model.options))
            for logits, labels in zip(outputs.logits, batch["labels"], strict=True)
        ]
        return [ImageResult(*pair) for pair in zip(maps, losses, strict=True)]

    def _segment_one(self, model: PreTrainedModel, batch: Batch, index: int, size: tuple[int, int]) -> ImageResult:
        pixels, labels = batch["pixel_values"][index : index + 1], batch["labels"][index : index + 1]
        if (mask := batch.get("patch_attention_mask")) is not None:  # the image is its part without padding
            rows, columns = (int(mask[index].any(dim=1 - side).sum()) for side in (0, 1))
            height, width = rows * pixels.shape[-2] // mask.shape[-2], columns * pixels.shape[-1] // mask.shape[-1]
            pixels, labels = pixels[..., :height, :width], labels[..., :height, :width]
        outputs = model.segment(pixels, self.window, scales=self.scales, flip=self.flip)
        (segmentation,) = self.processor.post_process_semantic_segmentation(outputs, [size])
        return ImageResult(segmentation, float(segmentation_loss(outputs.logits, labels, model.options)))

    def describe(self, prediction: Tensor, target: Any) -> dict[str, Any]:
        """Returns the share of each class in the pixels, the largest first."""
        numbers, counts = (values.tolist() for values in prediction.unique(return_counts=True))
        shares = [round(count / prediction.numel(), 6) for count in counts]
        found = [{"label": self.metric.names[k], "share": share} for k, share in zip(numbers, shares, strict=True)]
        return {"classes": sorted(found, key=lambda entry: -entry["share"])}

    def has_truth(self, target: Tensor) -> bool:
        """Whether any pixel has a class."""
        return bool((target != IGNORED_LABEL).any())

    def naive_baseline(self, targets: Iterable[Tensor]) -> tuple[str, Callable[[Tensor], Tensor]]:
        """Predicts the most frequent class at each place, whatever the size of the image."""
        classes = most_frequent_classes(targets, len(self.metric.names))
        return "most frequent class at each place", lambda target: resize_nearest(classes, *size_of(target))

    def draw(self, images: Images, predictions: list[Tensor], targets: list[Tensor], file: File) -> None:
        """Draws image, truth and prediction side by side."""
        draw_segmentation(images, predictions, targets, self.metric.names, file)

    def describe_evaluation(self) -> str:
        """Returns in which windows and copies images are seen, in words."""
        return (
            f"{'the whole image' if self.window is None else f'windows of {self.window} pixels'} at scale "
            f"{', '.join(map(str, self.scales))}{', and mirrored' if self.flip else ''}"
        )


def count_pixels(masks: Iterable[Tensor], num_classes: int) -> list[int]:
    """Returns the number of pixels of each class; labels from `num_classes` on are of none."""
    counts = torch.zeros(num_classes, dtype=torch.int64)
    for mask in masks:
        counts += mask.flatten().long().bincount(minlength=num_classes)[:num_classes]
    return counts.tolist()


@dataclass
class SemanticArguments(MaskArguments):
    """Which model to train for semantic segmentation, on which images, and how it is evaluated."""

    task_config = "segmentation_config"
    task_options = ("head",)

    head: str | None = model_option(
        None, "conv, linear, mask or simple; conv, or that of the saved model, by default.", essential=True
    )
    class_weights: str | None = class_weights_option()
    eval_window_size: int | None = evaluation_option(
        None,
        "Side in pixels of windows that slide over an image; without, it is seen as a whole.",
        COUNT,
        resume="free",
    )
    eval_scales: list[float] = evaluation_option(
        [1.0], "Sizes, relative to the image, of copies that are averaged.", POSITIVE, resume="free"
    )
    eval_flip: bool = evaluation_option(False, "Whether the mirror image of each copy counts too.", resume="free")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.class_weights is not None and "class_weights" in self.given_options():
            raise ValueError("--class_weights is given twice: leave it out of --config_overrides.")
        if not self.eval_scales:
            raise ValueError("eval_scales=[] holds no scale; 1.0 is the image itself.")


@dataclass
class SemanticSegmentation(SpatialTask):
    """Semantic segmentation, a class for every pixel."""

    model_class = HfViTForSemanticSegmentation
    load_source = staticmethod(load_semantic_segmentation)
    pipeline = "image-segmentation"
    usage = Usage(
        name="segment",
        stock="""for part in segment("image.png"):
    print(part["label"], part["mask"])  # white in the mask is where the image shows it""",
        own="""sizes = [(image.height, image.width)]
(classes,) = image_processor.post_process_semantic_segmentation(outputs, target_sizes=sizes)
print(classes.shape, [model.config.id2label[number] for number in classes.unique().tolist()])""",
    )
    defaults = SEGMENTATION
    limits = (
        "It knows {num_classes} classes and gives one of them to every pixel, whatever it is shown. " + SIMILAR_IMAGES
    )
    argument_defaults: ClassVar[dict[str, Any]] = {**BATCH_OF_16, "metric_for_best_model": "mean_iou"}

    options: SemanticArguments

    @property
    def num_needed_classes(self) -> int:
        """Every pixel has one of several classes."""
        return 2

    def options_of_fresh_head(self) -> dict[str, Any]:
        """Return a norm that is independent of other images, so that a batch may be split at will."""
        return {"norm": "layer"} if self.options.given_options().get("head") == "linear" else {}

    @cached_property
    def class_weights(self) -> list[float] | None:
        """How much the pixels of each class count in the loss, if not all the same; by masks from all over."""
        if (given := self.options.class_weights) is None:
            return None
        examples, names = self.loaded.examples("train"), self.loaded.names
        counted = examples.select(range(0, len(examples), -(-len(examples) // MOST_COUNTED)))
        return choose_weights(given, names, lambda: count_pixels(counted.read_targets(), len(names)))

    def options_of_head(self) -> dict[str, Any]:
        """Return the weight of each class in the loss, if they differ."""
        return {} if self.class_weights is None else {"class_weights": self.class_weights}

    def describe_model(self, model: PreTrainedModel, processor: Any) -> dict[str, str]:
        """Returns the card's lines on head and loss."""
        options = model.options
        weights = {
            "cross-entropy": options.cross_entropy_weight,
            "Dice": options.dice_weight,
            "focal": options.focal_weight,
            "auxiliary cross-entropy": options.auxiliary_loss_weight * options.use_auxiliary_head,
        }
        head = f"linear, {options.norm} norm" if options.head == "linear" else options.head
        of_classes = {"class weights": given} if (given := self.options.class_weights) is not None else {}
        return {"head": head, "loss": describe_weights(weights), **of_classes}

    def make_evaluator(self, model: PreTrainedModel, processor: BaseImageProcessor) -> SemanticEvaluator:
        """Returns the evaluator; raises `ValueError` for windows of no whole patches, or another ignored label."""
        if (ignored := model.options.semantic_loss_ignore_index) != IGNORED_LABEL:
            raise ValueError(
                f"semantic_loss_ignore_index={ignored} of segmentation_config must be {IGNORED_LABEL} here, which is "
                "what masks are read to where there is no class. Leave it out, and for masks whose 0 is no class set "
                "--reduce_labels."
            )
        if (window := self.options.eval_window_size) is not None:
            window_of(window, model.config.patch_size, "eval_window_size")
        metric = SemanticSegmentationMetric(self.loaded.names)
        return SemanticEvaluator(processor, metric, window, self.options.eval_scales, self.options.eval_flip)
