"""The image processor of a checkpoint, for a model whose geometry may have been changed on the way in."""

from typing import Any

from transformers import BaseImageProcessor
from transformers.utils import logging

from ..configuration_hf_vit import HfViTConfig, to_pair
from ..image_processing_hf_vit import HfViTImageProcessor
from .image_processor import image_processor_options, original_image_processor_options, resize_image_processor
from .loading import Converted
from .source import Source


logger = logging.get_logger(__name__)


def load_image_processor(source: Source, converted: Converted, config: HfViTConfig) -> BaseImageProcessor:
    """Returns the image processor that belongs to a published checkpoint.

    Args:
        source: The checkpoint.
        converted: What it is, unchanged.
        config: The configuration of the model to process for; its image size and channels may be others.

    Raises:
        ValueError: if the checkpoint's own does what ours cannot, or its size follows the image and another size is
            asked for.
    """
    options = find_options(source, converted)
    size, channels = to_pair(config.image_size), config.num_channels
    resized = None if size == to_pair(converted.config.image_size) else size
    others = None if channels == converted.config.num_channels else channels
    return HfViTImageProcessor(**resize_image_processor(options, resized, others))


def find_options(source: Source, converted: Converted) -> dict[str, Any]:
    """Returns our options for the images of a checkpoint: its own, or else those of its family, with a warning."""
    native = converted.config.image_size
    if not source.config or "model_cfg" in source.config:
        return original_image_processor_options(converted.family.images, native)
    try:
        options, _ = HfViTImageProcessor.get_image_processor_dict(source.name, **source.hub)
    except OSError:
        logger.warning(
            f"{source.name!r} has no preprocessor_config.json. Its images are processed as its family's usually are, "
            f"at its native size of {native} pixels."
        )
        options = image_processor_options({}, model_type=source.config["model_type"])
        options = resize_image_processor(options, native, converted.config.num_channels)
    return options
