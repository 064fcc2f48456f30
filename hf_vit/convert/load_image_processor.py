"""The image processor that belongs to a checkpoint, for a model whose geometry may be changed on the way in."""

import os
from pathlib import Path
from typing import Any

from transformers import BaseImageProcessor
from transformers.utils import logging

from ..configuration_hf_vit import HfViTConfig
from ..image_processing_hf_vit import HfViTImageProcessor
from .image_processor import image_processor_options, original_image_processor_options, resize_image_processor
from .loading import describe
from .source import Source, open_source


logger = logging.get_logger(__name__)


def load_image_processor(
    name_or_path: str | os.PathLike[str],
    image_size: int | list[int] | tuple[int, int] | None = None,
    num_channels: int | None = None,
    **hub: Any,
) -> BaseImageProcessor:
    """Returns the image processor that belongs to a checkpoint, ours or published.

    Args:
        name_or_path: Folder, file of weights, or name on the Hub. Where it has no image processor, what its family
            usually does with images takes its place.
        image_size: Height and width in pixels of the model's input; None leaves them as they are.
        num_channels: Number of image channels of the model; None leaves it as it is.
        **hub: Where on the Hub it is: `HUB_ARGUMENTS`.

    Raises:
        OSError: if there is no such checkpoint, or one of ours lacks its image processor.
        ValueError: if the checkpoint's image processor does what ours cannot.
    """
    path = Path(name_or_path)
    try:
        place = path.parent if path.is_file() else name_or_path
        options, _ = HfViTImageProcessor.get_image_processor_dict(place, **hub)
    except OSError:
        source = open_source(name_or_path, **hub)
        if source.config.get("model_type") == HfViTConfig.model_type:
            raise
        options = usual_options(source)
    return HfViTImageProcessor(**resize_image_processor(options, image_size, num_channels))


def usual_options(source: Source) -> dict[str, Any]:
    """Returns how the images of a checkpoint that does not say so are usually processed, at its native size."""
    family, native = describe(source)
    if family.images:
        return original_image_processor_options(family.images, native.image_size)
    logger.warning(
        f"{source.name!r} has no preprocessor_config.json. Its images are processed as its family's usually are, at "
        f"its native size of {native.image_size} pixels."
    )
    options = image_processor_options({}, model_type=source.config["model_type"])
    return resize_image_processor(options, native.image_size, native.num_channels)
