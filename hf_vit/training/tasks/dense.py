"""Training of models that predict something for every pixel."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from transformers import BaseImageProcessor

from ...data import DensePredictionCollator, dense_augmentation
from ...model.configuration_hf_vit import HfViTConfig, to_pair
from ..arguments import ImageDataArguments
from ..models import describe_whole_images, whole_image_processor
from .arguments import split_names
from .scored import ScoredTask


@dataclass
class SemanticImagesArguments(ImageDataArguments):
    """Which images and masks to score on."""

    dataset_name: str = field(
        default="",
        metadata={"help": "Folder of <split>/images and <split>/masks, parquet files, or a Hub name."},
    )
    mask_column_name: str | None = field(
        default=None, metadata={"help": "Column of the masks, where it is not clear by itself."}
    )
    class_names: str | None = field(
        default=None,
        metadata={"help": 'Names of the classes, "sky,road,car", where no file beside the data has them.'},
    )
    classes_file: str | None = field(
        default=None,
        metadata={"help": "File of class names (classes.txt, id2label.json) or colors (palette.txt), if elsewhere."},
    )
    reduce_labels: bool = field(
        default=False, metadata={"help": "The masks count classes from 1 and have 0 where there is none."}
    )

    def source_options(self) -> dict[str, Any]:
        """Returns the same, with what the masks mean."""
        return {
            **super().source_options(),
            "mask_column_name": self.mask_column_name,
            "class_names": split_names(self.class_names),
            "classes_file": self.classes_file,
            "reduce_labels": self.reduce_labels,
        }


@dataclass
class DenseAugmentationArguments:
    """How training images are changed at random, and their targets with them, in this order."""

    keep_aspect_ratio: bool = field(
        default=True,
        metadata={
            "help": "Images keep their proportions, their shorter side being that of image_size; false squeezes them "
            "into it."
        },
    )
    min_scale: float = field(
        default=0.5, metadata={"help": "Least scale; at 1 images are as large as in evaluations."}
    )
    max_scale: float = field(default=2.0, metadata={"help": "Largest scale."})
    max_class_share: float = field(
        default=0.75, metadata={"help": "Crops of class masks are drawn anew if one class has more; 1 takes any."}
    )
    horizontal_flip: float = field(default=0.5, metadata={"help": "Probability of a mirror image."})
    max_rotation: float = field(default=0.0, metadata={"help": "Largest angle of a random rotation in degrees."})
    photometric: float = field(
        default=0.5, metadata={"help": "Probability that brightness, contrast and colors change."}
    )

    def options(self) -> dict[str, Any]:
        """Returns them as `dense_augmentation` takes them."""
        options = asdict(self)
        scale_range = options.pop("min_scale"), options.pop("max_scale")
        return {**options, "scale_range": scale_range}


class DenseTask(ScoredTask):
    """Training of a model for segmentation or depth by a script; see `ScoredTask`."""

    collator_class = DensePredictionCollator

    augmentation: DenseAugmentationArguments

    def processor_options(self) -> dict[str, Any]:
        """Returns what this task's image processor shall know."""
        return {}

    def make_processor(self, processor: BaseImageProcessor, config: HfViTConfig) -> BaseImageProcessor:
        """Returns an image processor that leaves nothing of an image out."""
        return whole_image_processor(
            processor, config, self.augmentation.keep_aspect_ratio, **self.processor_options()
        )

    def make_transform(self, config: HfViTConfig) -> Callable[[Any], Any]:
        """Returns what changes images and targets at random."""
        return dense_augmentation(
            to_pair(config.image_size), num_channels=config.num_channels, **self.augmentation.options()
        )

    def describe_size(self, config: HfViTConfig) -> str:
        """Says how large images are."""
        return describe_whole_images(config, self.augmentation.keep_aspect_ratio)


def size_of(target: Any) -> tuple[int, int]:
    """Returns the height and width of a target: a map (H, W), or a dictionary with `masks` (M, H, W)."""
    height, width = (target["masks"] if isinstance(target, dict) else target).shape[-2:]
    return height, width
