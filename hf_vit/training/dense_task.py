"""Training of models that say something about every pixel."""

from collections.abc import Callable
from typing import Any

from transformers import BaseImageProcessor

from ..configuration_hf_vit import HfViTConfig, to_pair
from ..data import DensePredictionCollator, dense_augmentation
from .dense_arguments import DenseAugmentationArguments
from .processors import describe_whole_images, whole_image_processor
from .scored_task import ScoredTask


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
