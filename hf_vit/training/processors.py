"""The image processor of a trained model, which sees whole images at the size of training."""

from typing import Any

from transformers import BaseImageProcessor

from ..configuration_hf_vit import HfViTConfig, to_pair
from ..image_processing_hf_vit import HfViTImageProcessor


def whole_image_processor(
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
        "keep_aspect_ratio": False,  # that of DPT, which goes with a height and a width
        "do_resize": True,
        "do_center_crop": False,
        "do_affine_crop": False,
        "do_pad": keep_aspect_ratio,
        "pad_size": None,
        "hide_padding": True,
        "ensure_multiple_of": patch[0] if patch[0] == patch[1] else patch,
        **more,
    }
    return HfViTImageProcessor.from_dict(options)


def describe_whole_images(config: HfViTConfig, keep_aspect_ratio: bool) -> str:
    """Says how large images are for a model that sees them through `whole_image_processor`."""
    height, width = to_pair(config.image_size)
    whole = f"their shorter side {min(height, width)}" if keep_aspect_ratio else f"{height} x {width}"
    return f"{height} x {width} pixels in training, in evaluations whole images, {whole}"
