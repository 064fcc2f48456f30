"""Semantic segmentation: options, evaluator and model card texts."""

import copy
import math
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import BaseImageProcessor, PreTrainedModel

from ..data import load_semantic_segmentation
from ..data.datasets import TargetData
from ..evaluation.base import CHOOSING, Batch, Evaluator, File, ImageResult, Images
from ..evaluation.segmentation import SemanticSegmentationMetric
from ..model.configuration_hf_vit import to_pair
from ..model.image_geometry import compute_resized_size, resize_nearest
from ..model.image_targets import IGNORED_LABEL
from ..model.large_images import window_starts
from ..model.task_semantic_segmentation import (
    HfViTForSemanticSegmentation,
    overlapping_stride,
    resize_logits,
    segmentation_loss,
    window_of,
)
from ..options.field import COUNT, POSITIVE, evaluation_option, model_option
from ..options.training_arguments import HfViTTrainingArguments
from ..visualize.dense import draw_segmentation
from .base import Choice
from .common.arguments import class_weights_option
from .common.card import Usage, describe_weights
from .common.class_weights import choose_weights
from .common.defaults import SEGMENTATION
from .shared import BATCH_OF_16, SIMILAR_IMAGES, MaskArguments, SpatialTask, most_frequent_classes, size_of


NUM_PIXELS = 200  # number of pixels per image for fitting the temperature
MOST_COUNTED = 500  # maximum number of masks for computing class weights
SCALES, LEAST_SCALE = (1.5, 2.0, 3.0), 1.2  # candidate scales of images for sliding windows
MARGIN, NUM_ERRORS = 0.005, 1.5  # minimum gain of a larger scale: in mean IoU and in standard errors
MOST_TRIED, LEAST_TRIED = 64, 8  # maximum and minimum number of images for choosing the scale
COST_OF_CHOICE = (
    3 * 0.05
)  # windows evaluated per training image to choose the scale: 5% of the training cost of about 3 forward passes


@dataclass(eq=False)
class SemanticEvaluator(Evaluator):
    """Predict and score the class of every pixel.

    Args:
        window: Side in pixels of sliding windows; by default, the whole image is used.
        scales: Relative sizes of resized copies of the image. The predictions for the copies are averaged. Without
            `window` and `scales`, the `window_scale` of the processor is used.
        flip: Whether predictions for the mirrored image of each copy are included in the average.
    """

    lack = (
        f"no pixel of any mask has a class (all are {IGNORED_LABEL}). Check the masks; if their class numbers "
        "start at 1, set --reduce_labels."
    )
    class_score = "IoU"
    metric: SemanticSegmentationMetric
    window: int | None = None
    scales: Sequence[float] | None = None
    flip: bool = False
    pixels: list[tuple[Tensor, Tensor]] = field(init=False, default_factory=list)  # logits and labels of an image

    def prepare(self, trainer: Any) -> None:
        """Discard the pixels of the previous evaluation."""
        self.pixels = []

    def calibration_data(self) -> tuple[Tensor, Tensor] | None:
        """Return the logits (N, K) and the classes (N,) of some pixels of each image, identical on all processes."""
        if not self.pixels:
            return None
        logits, labels = zip(*self.pixels, strict=True)
        return torch.cat(logits), torch.cat(labels)

    def compute(self, model: PreTrainedModel) -> dict[str, float]:
        """Return the scores of all images, and gather the pixels of all processes."""
        self.pixels = gather_object(self.pixels)
        return super().compute(model)

    def collect_pixels(self, logits: Tensor, labels: Tensor) -> None:
        """Store logits and labels of some labeled pixels, given the logits (K, h, w) and labels (H, W) of an image."""
        places = torch.linspace(0, labels.numel() - 1, NUM_PIXELS, device=labels.device).long()
        places = places[labels.flatten()[places] != IGNORED_LABEL]
        resized = resize_logits(logits[None], labels.shape)[0].flatten(1)  # (K, H·W)
        self.pixels.append((resized[:, places].T.cpu(), labels.flatten()[places].cpu()))

    @property
    def has_windows(self) -> bool:
        """Whether sliding windows are used, at the `window_scale` of the image processor."""
        return self.window is None and self.scales is None and self.processor.window_scale is not None

    def adapt_collator(self, collator: Any) -> Any:
        """Return a collator that resizes images to the scale of the sliding windows."""
        return replace(collator, image_processor=self.processor.at_window_scale()) if self.has_windows else collator

    def predict(self, model: PreTrainedModel, batch: Batch) -> list[ImageResult]:
        """Return the predicted class map (H, W) and the loss of each image."""
        sizes = [size_of(target) for target in batch["targets"]]
        if self.has_windows or (self.window, *(self.scales or [1.0]), self.flip) != (None, 1.0, False):
            return [self._segment_one(model, batch, index, size) for index, size in enumerate(sizes)]
        mask = batch.get("patch_attention_mask")
        outputs = model(batch["pixel_values"], patch_attention_mask=mask)
        maps = self.processor.post_process_semantic_segmentation(outputs, sizes, patch_attention_mask=mask)
        losses = [
            float(segmentation_loss(logits[None], labels[None], model.options))
            for logits, labels in zip(outputs.logits, batch["labels"], strict=True)
        ]
        for pair in zip(outputs.logits, batch["labels"], strict=True):
            self.collect_pixels(*pair)
        return [ImageResult(*pair) for pair in zip(maps, losses, strict=True)]

    def _segment_one(self, model: PreTrainedModel, batch: Batch, index: int, size: tuple[int, int]) -> ImageResult:
        pixels, labels = batch["pixel_values"][index : index + 1], batch["labels"][index : index + 1]
        if (mask := batch.get("patch_attention_mask")) is not None:  # remove padding
            rows, columns = (int(mask[index].any(dim=1 - side).sum()) for side in (0, 1))
            height, width = rows * pixels.shape[-2] // mask.shape[-2], columns * pixels.shape[-1] // mask.shape[-1]
            pixels, labels = pixels[..., :height, :width], labels[..., :height, :width]
        window = self.processor.window_size if self.has_windows else self.window
        outputs = model.segment(pixels, window, scales=self.scales or [1.0], flip=self.flip)
        self.collect_pixels(outputs.logits[0], labels[0])
        (segmentation,) = self.processor.post_process_semantic_segmentation(outputs, [size])
        return ImageResult(segmentation, float(segmentation_loss(outputs.logits, labels, model.options)))

    def describe(self, prediction: Tensor, target: Any) -> dict[str, Any]:
        """Return the pixel share of each class in descending order."""
        numbers, counts = (values.tolist() for values in prediction.unique(return_counts=True))
        shares = [round(count / prediction.numel(), 6) for count in counts]
        found = [{"label": self.metric.names[k], "share": share} for k, share in zip(numbers, shares, strict=True)]
        return {"classes": sorted(found, key=lambda entry: -entry["share"])}

    def has_annotations(self, target: Tensor) -> bool:
        """Return whether any pixel has a class."""
        return bool((target != IGNORED_LABEL).any())

    def naive_baseline(self, targets: Iterable[Tensor]) -> tuple[str, Callable[[Tensor], Tensor]]:
        """Return a baseline that predicts the most frequent class at each position, for images of any size."""
        classes = most_frequent_classes(targets, len(self.metric.names))
        return "most frequent class of each pixel", lambda target: resize_nearest(classes, *size_of(target))

    def draw(self, images: Images, predictions: list[Tensor], targets: list[Tensor], file: File) -> None:
        """Draw image, target and prediction side by side."""
        draw_segmentation(images, predictions, targets, self.metric.names, file)

    def describe_evaluation(self) -> str:
        """Return a description of windows, scales and flips."""
        if self.has_windows:
            height, width = self.processor.window_size
            seen = f"windows of {height} x {width} pixels in images enlarged {self.processor.window_scale:g} times"
        else:
            seen = "the whole image" if self.window is None else f"windows of {self.window} pixels"
            seen += f" at scale {', '.join(map(str, self.scales or [1.0]))}"
        return seen + (", and mirrored" if self.flip else "")


def count_pixels(masks: Iterable[Tensor], num_classes: int) -> list[int]:
    """Return the number of pixels of each class. Labels of `num_classes` or higher are ignored."""
    counts = torch.zeros(num_classes, dtype=torch.int64)
    for mask in masks:
        counts += mask.flatten().long().bincount(minlength=num_classes)[:num_classes]
    return counts.tolist()


def spread(examples: Sized, count: int) -> list[int]:
    """Return the indices of at most `count` examples, spread evenly."""
    return np.linspace(0, len(examples) - 1, min(count, len(examples))).round().astype(int).tolist()


def scales_to_try(processor: BaseImageProcessor, sizes: Sequence[tuple[int, int]]) -> tuple[list[float], int]:
    """Return candidate scales for images of given sizes (height, width) in pixels, and the cost of trying them.

    No scale enlarges the median image beyond its original size. The cost is the number of windows per image, including
    the whole image.
    """
    ratios, windows, trial = [], 0, copy.copy(processor)
    window, patch = processor.window_size, to_pair(processor.ensure_multiple_of)
    stride = overlapping_stride(window, patch)

    def sides(size: tuple[int, int]) -> tuple[int, int]:
        return compute_resized_size(*size, **trial.at_window_scale().call_options())

    for size in sizes:
        ratios.append(min(native / seen for native, seen in zip(size, sides(size), strict=True)))
    native = float(f"{np.median(ratios):.3g}")
    tried = sorted(scale for scale in {min(scale, native) for scale in SCALES} if scale >= LEAST_SCALE)
    whole = [math.prod(sides(size)) / math.prod(window) for size in sizes]
    for trial.window_scale in tried:
        counts = [
            math.prod(len(window_starts(*places)) for places in zip(sides(size), window, stride, strict=True))
            for size in sizes
        ]
        windows += math.ceil(np.mean(counts))
    return tried, math.ceil(np.mean(whole)) + windows


def mean_iou(metric: SemanticSegmentationMetric, records: Sequence[Any]) -> float:
    """Return the mean IoU computed from the records of some images."""
    metric.reset()
    metric.update(records)
    return metric.compute()["mean_iou"]


def is_better(metric: SemanticSegmentationMetric, records: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether `records` have a mean IoU that is significantly higher than that of `others`.

    The standard error of the difference is estimated with the jackknife.
    """
    pairs = list(zip(records, others, strict=True))
    gain = mean_iou(metric, records) - mean_iou(metric, others)
    gains = [
        mean_iou(metric, own) - mean_iou(metric, other)
        for own, other in (zip(*pairs[:number], *pairs[number + 1 :], strict=True) for number in range(len(pairs)))
    ]
    error = math.sqrt(max(len(pairs) - 1, 0) * np.var(gains))
    return gain > max(MARGIN, NUM_ERRORS * error)


@dataclass
class SemanticArguments(MaskArguments):
    """Options of semantic segmentation: model, images with masks, and evaluation."""

    task_config = "segmentation_config"
    task_options = ("head",)

    head: str | None = model_option(
        None, "Head: conv, linear, mask or simple; by default conv, or the head of the saved model.", essential=True
    )
    class_weights: str | None = class_weights_option()
    eval_window_size: int | None = evaluation_option(
        None,
        "Side in pixels of windows that slide over an image; by default, the whole image is used. If neither "
        "this nor eval_scales is given, the scale is chosen on validation images after training.",
        COUNT,
        resume="free",
    )
    eval_scales: list[float] | None = evaluation_option(
        None, "Scales to which copies of an image are resized; predictions are averaged.", POSITIVE, resume="free"
    )
    eval_flip: bool = evaluation_option(
        False, "Average the predictions for each copy of an image and its mirror image.", resume="free"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.class_weights is not None and "class_weights" in self.given_options():
            raise ValueError("--class_weights is given twice. Remove it from --config_overrides.")
        if self.eval_scales == []:
            raise ValueError("eval_scales=[] is empty. Give at least one scale, such as 1.0 for the original image.")


@dataclass(frozen=True)
class SemanticSegmentation(SpatialTask):
    """Semantic segmentation: prediction of a class for every pixel."""

    model_class = HfViTForSemanticSegmentation
    load_source = staticmethod(load_semantic_segmentation)
    pipeline = "image-segmentation"
    usage = Usage(
        name="segment",
        stock="""for part in segment("image.png"):
    print(part["label"], part["mask"])  # the mask is white where the image shows it""",
        own="""sizes = [(image.height, image.width)]
(classes,) = image_processor.post_process_semantic_segmentation(outputs, target_sizes=sizes)
print(classes.shape, [model.config.id2label[number] for number in classes.unique().tolist()])""",
    )
    defaults = SEGMENTATION
    has_scores = True
    limits = "The model assigns one of {num_classes} classes to every pixel." + SIMILAR_IMAGES
    argument_defaults: ClassVar[dict[str, Any]] = {**BATCH_OF_16, "metric_for_best_model": "mean_iou"}

    options: SemanticArguments

    def held_out_for(self, args: HfViTTrainingArguments) -> str:
        """Verb phrase for the choice of the scale; empty if the scale is given or the run is too short."""
        is_open = self.options.eval_scales is None and self.options.eval_window_size is None
        num_trained = args.max_steps * args.images_per_step
        is_long = not 0 < COST_OF_CHOICE * num_trained < LEAST_TRIED
        return "choose the scale" if is_open and is_long else ""

    def count_choosing_images(self, data: TargetData, args: HfViTTrainingArguments, num_trained: int) -> int:
        """Return the maximum number of evaluated windows for choosing the scale."""
        is_choosing = self.held_out_for(args) and "validation" in data.splits
        return int(COST_OF_CHOICE * num_trained) if is_choosing else 0

    def choose(self, trainer: Any, data: TargetData) -> Choice:
        """Choose on validation images whether to use the whole image or sliding windows, and at which scale.

        A scale is a candidate if its mean IoU exceeds that of the whole image by more than `MARGIN` and `NUM_ERRORS`
        standard errors of the difference. The smallest candidate within `MARGIN` of the best is chosen. Scales beyond
        the image size are not tried. The search stops at the first scale that is worse than the best so far.
        """
        examples, processor, args = trainer.eval_dataset, trainer.processing_class, trainer.args
        if examples is None or not self.held_out_for(args):
            return Choice()
        tried, cost = scales_to_try(processor, [examples[index]["image"].size[::-1] for index in spread(examples, 9)])
        num_trained = trainer.state.global_step * args.images_per_step
        count = min(MOST_TRIED, self.count_choosing_images(data, args, num_trained) // cost)
        if not tried or count < min(LEAST_TRIED, len(examples)):
            return Choice()
        images = examples.select(spread(examples, count))
        whole, scores, better = list[Any](), dict[float, float](), dict[float, float]()  # mean IoU by scale
        for scale in (1.0, *tried):
            processor.window_scale = None if scale == 1 else scale
            with trainer.evaluating_with(trainer.evaluator):
                trainer.predict(images, metric_key_prefix=CHOOSING)
            metric = trainer.evaluator.metric
            assert isinstance(metric, SemanticSegmentationMetric)
            records = metric.records
            scores[scale] = score = mean_iou(metric, records)
            if scale == 1:
                whole = records
            elif is_better(metric, records, whole):
                better[scale] = score
            if score < max(scores.values()):
                break
        chosen = min(
            (scale for scale, score in better.items() if score >= max(better.values()) - MARGIN), default=None
        )
        processor.window_scale = chosen
        tries = ", ".join(f"{scale:g}: {score:.3f}" for scale, score in scores.items())
        place = "1, the whole image" if chosen is None else f"{chosen:g}, in windows"
        return Choice(rows={"scale of images": f"{place}, by the mean IoU on validation images ({tries})"})

    def count_needed_classes(self, data: TargetData) -> int:
        """Return the minimum number of classes."""
        return 2

    def head_options(self, data: TargetData, args: HfViTTrainingArguments) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the class weights, unless they are equal, and for a new linear head a norm without batch statistics.

        With this norm, results do not depend on the batch size.
        """
        weights, is_linear = self.class_weights(data), self.options.given_options().get("head") == "linear"
        return {} if weights is None else {"class_weights": weights}, {"norm": "layer"} if is_linear else {}

    def class_weights(self, data: TargetData) -> list[float] | None:
        """Return the class weights of the loss, computed from training masks, or None for equal weights."""
        if (given := self.options.class_weights) is None:
            return None
        examples, names = data.examples("train"), data.names
        counted = examples.select(range(0, len(examples), -(-len(examples) // MOST_COUNTED)))
        return choose_weights(given, names, lambda: count_pixels(counted.read_targets(), len(names)))

    def describe_model(
        self, model: PreTrainedModel, processor: Any, data: TargetData, args: HfViTTrainingArguments
    ) -> dict[str, str]:
        """Return the table rows of the model card about head and loss."""
        options = model.options
        weights = {
            "cross-entropy": options.cross_entropy_weight,
            "Dice": options.dice_weight,
            "focal": options.focal_weight,
            "auxiliary cross-entropy": options.auxiliary_loss_weight * options.use_auxiliary_head,
        }
        head = f"linear, {options.norm} norm" if options.head == "linear" else options.head
        of_classes = {"class weights": given} if (given := self.options.class_weights) is not None else {}
        rows = super().describe_model(model, processor, data, args)
        return {"head": head, "loss": describe_weights(weights), **of_classes, **rows}

    def make_evaluator(
        self, model: PreTrainedModel, processor: BaseImageProcessor, data: TargetData
    ) -> SemanticEvaluator:
        """Return the evaluator; raise `ValueError` if windows are invalid or the model ignores another label."""
        if (ignored := model.options.semantic_loss_ignore_index) != IGNORED_LABEL:
            raise ValueError(
                f"semantic_loss_ignore_index={ignored} of segmentation_config must be {IGNORED_LABEL}, the label "
                "of pixels without a class. Remove it; if pixels without a class are 0 in the masks, set "
                "--reduce_labels."
            )
        if (window := self.options.eval_window_size) is not None:
            window_of(window, model.config.patch_size, "eval_window_size")
        metric = SemanticSegmentationMetric(data.names)
        return SemanticEvaluator(processor, metric, window, self.options.eval_scales, self.options.eval_flip)
