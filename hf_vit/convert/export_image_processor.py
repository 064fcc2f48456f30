"""Our image processors as those of other libraries."""

from typing import Any

from transformers import BaseImageProcessor
from transformers.image_utils import PILImageResampling

from .image_processor import SHARED, read_image_processor_file


def export_image_processor(image_processor: BaseImageProcessor, layout: str) -> dict[str, Any]:
    """Returns what a library's own file of options says of the same image processing.

    Args:
        image_processor: One of ours.
        layout: "timm" for its `pretrained_cfg`, else preprocessor_config.json of transformers.

    Raises:
        ValueError: if that library cannot do the same.
    """
    options = image_processor.to_dict()
    exported = timm_options(options) if layout == "timm" else transformers_options(options)
    content = {"pretrained_cfg": exported} if layout == "timm" else exported
    back = type(image_processor)(**read_image_processor_file(content)).to_dict()
    ignored = {"crop_rounding", "do_convert_rgb", "image_processor_type", "auto_map"}
    lost = sorted(name for name in options.keys() - ignored if options[name] != back.get(name))
    if lost:
        described = ", ".join(f"{name}={options[name]!r} (there {back.get(name)!r})" for name in lost)
        raise ValueError(
            f"The image processor does not fit the layout {layout!r}: {described}. Export the model without it."
        )
    return exported


def transformers_options(options: dict[str, Any]) -> dict[str, Any]:
    """preprocessor_config.json: ViT's resizes, DINOv2's (BiT) crops too."""
    kind = "BitImageProcessor" if options.get("do_center_crop") else "ViTImageProcessor"
    shared = {name: options[name] for name in SHARED if options.get(name) is not None}
    return {"image_processor_type": kind, **shared}


def timm_options(options: dict[str, Any]) -> dict[str, Any]:
    """`pretrained_cfg`: what is cropped out of the image in the middle, and how large that is beforehand."""
    size = options["size"]
    crop = options["crop_size"] if options.get("do_center_crop") else size
    edge = crop.get("height", size.get("shortest_edge"))
    larger = size.get("shortest_edge", size.get("height"))
    return {
        "input_size": [options["num_channels"], edge, crop.get("width", edge)],
        "interpolation": PILImageResampling(options["resample"]).name.lower(),
        "crop_pct": edge / larger,
        "crop_mode": "center" if "shortest_edge" in size else "squash",
        "mean": list(options["image_mean"]),
        "std": list(options["image_std"]),
    }
