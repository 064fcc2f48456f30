"""Training of models that say something about every pixel."""

from collections.abc import Callable
from typing import Any

from transformers import BaseImageProcessor

from ..configuration_hf_vit import HfViTConfig, to_pair
from ..data import DensePredictionCollator, dense_augmentation
from ..image_processing_hf_vit import HfViTImageProcessor
from .dense_arguments import DenseAugmentationArguments
from .scored_task import ScoredTask


class DenseTask(ScoredTask):
    """Training of a model for segmentation or depth by a script; see `ScoredTask`."""

    augmentation: DenseAugmentationArguments

    def processor_options(self) -> dict[str, Any]:
        """Returns what this task's image processor shall know."""
        return {}

    def make_processor(self, processor: BaseImageProcessor, config: HfViTConfig) -> BaseImageProcessor:
        """Returns an image processor that leaves nothing of an image out."""
        return dense_processor(processor, config, self.augmentation.keep_aspect_ratio, **self.processor_options())

    def make_transform(self, config: HfViTConfig) -> Callable[[Any], Any]:
        """Returns what changes images and targets at random."""
        return dense_augmentation(
            to_pair(config.image_size), num_channels=config.num_channels, **self.augmentation.options()
        )

    def make_collator(self, processor: BaseImageProcessor) -> DensePredictionCollator:
        """Returns what makes batches."""
        return DensePredictionCollator(processor)

    def describe_size(self, config: HfViTConfig) -> str:
        """Says how large images are for a model that sees them as `dense_processor` makes them."""
        height, width = to_pair(config.image_size)
        keeps = self.augmentation.keep_aspect_ratio
        whole = f"their shorter side {min(height, width)}" if keeps else f"{height} x {width}"
        return f"{height} x {width} pixels in training, in evaluations whole images, {whole}"


def size_of(target: Any) -> tuple[int, int]:
    """Returns the height and width of a target: a map (H, W), or a dictionary with `masks` (M, H, W)."""
    height, width = (target["masks"] if isinstance(target, dict) else target).shape[-2:]
    return height, width


def dense_processor(
    processor: BaseImageProcessor, config: HfViTConfig, keep_aspect_ratio: bool, **more: Any
) -> BaseImageProcessor:
    """Returns an image processor that leaves nothing of an image out.

    Args:
        processor: What belongs to the model; colours stay as they are there.
        config: Its image size is that of training.
        keep_aspect_ratio: Whether images keep their proportions and get that size along their shorter side, or else
            are squeezed into it.
        **more: Other options of the processor.
    """
    height, width = to_pair(config.image_size)
    patch = to_pair(config.patch_size)
    size = {"shortest_edge": min(height, width)} if keep_aspect_ratio else {"height": height, "width": width}
    options = {
        **processor.to_dict(),
        "size": size,
        "do_resize": True,
        "do_center_crop": False,
        "do_pad": keep_aspect_ratio,
        "ensure_multiple_of": patch[0] if patch[0] == patch[1] else patch,
        **more,
    }
    return HfViTImageProcessor.from_dict(options)
