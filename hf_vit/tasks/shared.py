"""Code shared by several tasks: option groups, supervised and spatial tasks, baselines of dense predictions."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from transformers import BaseImageProcessor, PreTrainedModel

from ..convert import whole_image_processor
from ..data import load_image_text
from ..data.augmentation.joint import DenseAugmentation
from ..data.collators import DensePredictionCollator
from ..data.datasets import TargetData
from ..data.reading.orientation import AnnotationOrientation
from ..model.configuration_hf_vit import HfViTConfig, to_pair
from ..model.image_geometry import resize_nearest
from ..model.processing_hf_vit import HfViTProcessor
from ..options.field import (
    COUNT,
    POSITIVE,
    PROBABILITY,
    SHARE,
    Names,
    Range,
    augmentation_option,
    data_option,
    model_option,
    source_option,
)
from ..options.resolve import values_of
from ..options.training_arguments import HfViTTrainingArguments
from .base import Task
from .common.arguments import TaskArguments
from .common.distillation_arguments import DistillationArguments
from .common.models import describe_whole_images


PLACES = 64  # rows and columns of the class map that the baseline of dense tasks predicts
SIMILAR_IMAGES = " It was trained on one dataset. Its scores may be much lower on other images."
BATCH_OF_16 = {"per_device_train_batch_size": 16, "per_device_eval_batch_size": 16}


ORIENTATION_HELP = (
    "Orientation of annotations if images have an EXIF orientation: that of the stored or of the displayed image; "
    "auto compares the sizes of image and annotations, which can be inconclusive."
)
HAS_VOCABULARY = {"text_model_name_or_path": "the text encoder has its own vocabulary and size"}
ANNOTATED = (*TaskArguments.loader_options, "annotation_orientation")


@dataclass
class DenseArguments(TaskArguments):
    """Options of dense prediction: model, annotated images and their augmentation."""

    loader_options = ANNOTATED

    annotation_orientation: AnnotationOrientation = data_option("auto", ORIENTATION_HELP)
    keep_aspect_ratio: bool = augmentation_option(
        True,
        "Resize the shorter side to image_size and keep the aspect ratio; false resizes both sides to image_size.",
    )
    min_scale: float = augmentation_option(
        0.5, "Smallest scale of training images; at 1 they have the size of evaluation images.", POSITIVE
    )
    max_scale: float = augmentation_option(2.0, "Largest scale of training images.", POSITIVE)
    max_class_share: float = augmentation_option(
        0.75,
        "Largest share of a crop that one class may cover; other crops are drawn again. 1 accepts any crop.",
        SHARE,
    )
    horizontal_flip: float = augmentation_option(0.5, "Probability of a horizontal flip.", PROBABILITY)
    max_rotation: float = augmentation_option(0.0, "Largest angle of a random rotation in degrees.", Range(0, 180))
    photometric: float = augmentation_option(
        0.5, "Probability of a change of brightness, contrast and colors.", PROBABILITY
    )


@dataclass
class MaskArguments(DenseArguments):
    """Options of images with class masks."""

    loader_options = (
        *DenseArguments.loader_options,
        *("mask_column_name", "classes_file", "reduce_labels", "binary_masks"),
    )

    dataset_name: str = source_option("Folder of <split>/images and <split>/masks, parquet files, or a Hub name.")
    mask_column_name: str | None = data_option(None, "Column of the masks, if it is not detected.")
    class_names: Names | None = data_option(
        None, 'Class names, such as "sky,road,car", if no file of the dataset contains them.', essential=True
    )
    classes_file: str | None = data_option(
        None,
        "File of class names (classes.txt, id2label.json) or colors (palette.txt), if not in the dataset folder.",
    )
    reduce_labels: bool = data_option(
        False, "Whether the masks number classes from 1 and use 0 for pixels without a class."
    )
    binary_masks: bool = data_option(
        False, "Whether the masks have 0 for the first of two classes and 255 for the second."
    )

    def source_options(self) -> dict[str, Any]:
        """Return the data source options, with the class names."""
        return {**super().source_options(), "class_names": self.class_names or []}


@dataclass
class ObjectArguments(TaskArguments):
    """Options of images with boxes or keypoints."""

    loader_options = (*ANNOTATED, "objects_column_name", "box_errors")

    annotation_orientation: AnnotationOrientation = data_option("auto", ORIENTATION_HELP)
    objects_column_name: str | None = data_option(None, "Column of the objects, if it is not detected.")
    box_errors: Literal["raise", "clip", "drop"] = data_option(
        "raise",
        "Handling of boxes that exceed their image or have no area: list them and stop (raise), cut them (clip), "
        "or remove them (drop).",
    )


@dataclass
class CaptionArguments(TaskArguments):
    """Options of images with captions."""

    loader_options = (*TaskArguments.loader_options, "caption_column_name")

    vocab_size: int | None = model_option(
        None,
        "Maximum number of tokens of a trained tokenizer; 8192 by default.",
        COUNT,
        conflicts={**HAS_VOCABULARY, "tokenizer_name": "the tokenizer has its own vocabulary"},
    )
    max_text_length: int | None = model_option(
        None,
        "Maximum number of tokens of a text; longer texts are truncated. By default 64, or the value of "
        "the saved model.",
        COUNT,
    )
    dataset_name: str = source_option(
        "Folder with metadata.jsonl, table of paths and captions, parquet files with a column of "
        "captions, or a Hub name."
    )
    caption_column_name: str | None = data_option(
        None, "Column with a caption or a list of captions per image, if it is not detected."
    )
    min_crop_scale: float = augmentation_option(
        0.5, "Smallest share of the image area in a random resized crop; 1 keeps the whole image.", SHARE
    )
    horizontal_flip: float = augmentation_option(
        0.5, "Probability of a horizontal flip; 0 if captions mention left and right.", PROBABILITY
    )

    def refuse_beside(self, source: str, *options: str) -> None:
        """Raise `ValueError` if one of `options` is given although the tokenizer `source` determines it."""
        given = [f"--{name} {vars(self)[name]}" for name in options if vars(self)[name] is not None]
        if vars(self)[source] is not None and given:
            raise ValueError(
                f"--{source} {vars(self)[source]} has its own vocabulary and size. Remove {', '.join(given)}."
            )


@dataclass(frozen=True)
class SupervisedTask(Task):
    """Task with a target per example, optionally trained with a teacher."""

    distillation: DistillationArguments = field(default_factory=DistillationArguments)


@dataclass(frozen=True)
class CaptionedTask(Task):
    """Task with images and captions, whose processor has a tokenizer."""

    load_source = staticmethod(load_image_text)
    has_texts = True

    def augmentation_arguments(
        self, processor: HfViTProcessor, config: HfViTConfig, data: TargetData
    ) -> dict[str, Any]:
        """Return the arguments of `augment`, with the size of the image processor."""
        return super().augmentation_arguments(processor.image_processor, config, data)


@dataclass(frozen=True)
class SpatialTask(SupervisedTask):
    """Task with targets that have positions in the image, such as boxes or masks."""

    collator_class: ClassVar[type[Any]] = DensePredictionCollator
    augment: ClassVar[Callable[..., Callable[[Any], Any]]] = staticmethod(DenseAugmentation)

    def augmentation_arguments(self, processor: Any, config: HfViTConfig, data: TargetData) -> dict[str, Any]:
        """Return the arguments of `augment`, with the size that the model is configured for and a range of scales."""
        options = values_of(self.options, "Augmentation")
        scale_range = options.pop("min_scale"), options.pop("max_scale")
        size = {"size": to_pair(config.image_size), "num_channels": config.num_channels}
        return {**size, **options, "scale_range": scale_range}

    def options_of_processor(self, data: TargetData) -> dict[str, Any]:
        """Return the image processor options of this task."""
        return {}

    def make_processor(self, processor: BaseImageProcessor, config: HfViTConfig, data: TargetData) -> Any:
        """Return an image processor that does not crop images, given the image processor of the initial model."""
        keeps_aspect_ratio = self.options.keep_aspect_ratio
        return whole_image_processor(processor, config, keeps_aspect_ratio, **self.options_of_processor(data))

    def describe_model(
        self, model: PreTrainedModel, processor: Any, data: TargetData, args: HfViTTrainingArguments
    ) -> dict[str, str]:
        """Return the table row of the model card about the image size."""
        return {"input size": describe_whole_images(model.config, self.options.keep_aspect_ratio)}


def size_of(target: Any) -> tuple[int, int]:
    """Return the height and width of a target: a map (H, W), or a dictionary with `masks` (M, H, W)."""
    height, width = (target["masks"] if isinstance(target, dict) else target).shape[-2:]
    return height, width


def most_frequent_classes(maps: Iterable[Tensor], num_classes: int) -> Tensor:
    """Return the most frequent class at each position (R, R) of `maps` (H, W), resized to R x R.

    Labels of `num_classes` or higher are ignored. Positions without labels get the most frequent class overall.
    """
    classes = torch.arange(num_classes)[:, None, None]
    counts = torch.zeros(num_classes, PLACES, PLACES, dtype=torch.int64)
    for labels in maps:
        counts += resize_nearest(labels, PLACES, PLACES) == classes
    return torch.where(counts.any(dim=0), counts.argmax(dim=0), counts.sum(dim=(1, 2)).argmax())
