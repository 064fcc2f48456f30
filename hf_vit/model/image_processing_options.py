"""Options of the image processors: those beyond the library's, one form for each, and what contradicts another."""

import math
from enum import Enum
from typing import Any

import torch
from transformers.image_utils import ChannelDimension, PILImageResampling, torch_pil_interpolation_mapping
from transformers.processing_utils import ImagesKwargs

from .image_geometry import CROP_ROUNDINGS, EXACT_KEYS, MULTIPLE_ROUNDINGS, to_size_dict
from .post_processing import CLASS_SCORES


CHOICES = {"class_scores": CLASS_SCORES, "crop_rounding": CROP_ROUNDINGS, "multiple_rounding": MULTIPLE_ROUNDINGS}


class HfViTImageProcessorKwargs(ImagesKwargs, total=False):  # type: ignore[call-arg]
    """Options beyond the library's, at construction and per call; see `HfViTImageProcessorBase`."""

    num_channels: int | None
    ensure_multiple_of: int | list[int] | tuple[int, ...] | None
    multiple_rounding: str | None
    keep_aspect_ratio: bool | None
    hide_padding: bool | None
    crop_rounding: str | None
    do_reduce_labels: bool | None
    label_ids_to_fuse: list[int] | tuple[int, ...] | None
    nms_threshold: float | int | None
    do_affine_crop: bool | None
    box_padding: float | int | None
    class_scores: str | None


def standard_options(
    size: Any = None,
    crop_size: Any = None,
    pad_size: Any = None,
    default_to_square: bool | None = None,
    image_mean: Any = None,
    image_std: Any = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Returns the options of an image processor in one form, by name; `ValueError` if they are wrong or contradict."""
    # Sizes have any form that `to_size_dict` takes; mean and deviation are one number or one for each channel.
    if type(kwargs["num_channels"]) is not int or kwargs["num_channels"] < 1:
        raise ValueError(f"num_channels={kwargs['num_channels']!r} must be a whole number of at least 1.")
    options = kwargs | {
        "size": to_size_dict(size, "size", default_to_square=default_to_square is not False),
        "crop_size": to_size_dict(crop_size, "crop_size", EXACT_KEYS),
        "pad_size": to_size_dict(pad_size, "pad_size", EXACT_KEYS),
        "image_mean": _per_channel(image_mean, "image_mean", kwargs["num_channels"]),
        "image_std": _per_channel(image_std, "image_std", kwargs["num_channels"]),
    }
    if options["do_pad"] and options["pad_size"] is not None and options["ensure_multiple_of"] is None:
        options["hide_padding"] = False  # there are no patches to hide
    for name in ("ensure_multiple_of", "label_ids_to_fuse"):
        if isinstance(options[name], list):
            options[name] = tuple(options[name])
    if options["resample"] is not None:
        # torchvision's own names cannot be written to JSON
        resample = torch_pil_interpolation_mapping.get(options["resample"], options["resample"])
        options["resample"] = _one_of(PILImageResampling, resample, "resample")
    if options["data_format"] is not None:
        options["data_format"] = _one_of(ChannelDimension, options["data_format"], "data_format").value
    if isinstance(options["device"], torch.device):
        options["device"] = str(options["device"])
    _check_together(options)
    return options


def channels_given(image_mean: Any = None, image_std: Any = None, **_: Any) -> dict[str, int]:
    """Returns as `num_channels` how many means and deviations a call gives, unless images are converted to as many."""
    if not (isinstance(image_mean, list | tuple) and isinstance(image_std, list | tuple)):
        return {}
    count = len(image_mean)
    return {"num_channels": count} if count == len(image_std) and count not in (0, 1, 3) else {}


def _one_of(kind: type[Enum], value: Any, name: str) -> Any:
    try:
        return kind(value)
    except ValueError as error:
        known = ", ".join(str(member.value) for member in kind)
        raise ValueError(f"{name}={value!r} is unknown. Choose one of {known}.") from error


def _per_channel(value: Any, name: str, num_channels: int) -> tuple[float, ...] | None:
    if value is None:
        return None
    try:
        values = (float(value),) * num_channels if isinstance(value, int | float) else tuple(map(float, value))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}={value!r} must be one number, or one for each channel.") from error
    if len(values) != num_channels:
        raise ValueError(
            f"{name} has {len(values)} values, {list(values)}, but num_channels={num_channels}. Give one number for "
            "all channels, or one for each."
        )
    if not all(map(math.isfinite, values)):
        raise ValueError(f"{name}={list(values)} must hold finite numbers.")
    return values


def _check_together(options: dict[str, Any]) -> None:
    multiple, pad_size = options["ensure_multiple_of"], options["pad_size"]
    factor = options["rescale_factor"]
    if options["do_affine_crop"]:
        _check_affine_crop(options)
    if options["do_rescale"] and factor is not None and not 0 < factor < math.inf:
        raise ValueError(f"rescale_factor={factor} must be positive; 1/255 brings pixels to [0, 1].")
    if options["image_std"] is not None and min(options["image_std"]) <= 0:
        raise ValueError(f"image_std={list(options['image_std'])} must be positive: pixels are divided by it.")
    for name, known in CHOICES.items():
        if options[name] not in known:
            raise ValueError(f"{name}={options[name]!r} must be one of {', '.join(map(str, known))}.")
    if options["do_convert_rgb"] and options["num_channels"] != 3:
        raise ValueError(
            f"do_convert_rgb=True makes 3 channels, but num_channels={options['num_channels']}. Leave do_convert_rgb "
            "out: images follow num_channels."
        )
    if multiple is not None:
        pair = (multiple, multiple) if isinstance(multiple, int) else multiple
        if len(pair) != 2 or not all(type(side) is int and side > 0 for side in pair):
            raise ValueError(f"ensure_multiple_of={multiple!r} must be one positive int or (height, width).")
        crop_size = options["crop_size"] if options["do_center_crop"] else None
        if crop_size is not None and (crop_size.height % pair[0] or crop_size.width % pair[1]):
            raise ValueError(f"crop_size={dict(crop_size)} must be a multiple of ensure_multiple_of={multiple}.")
        if options["do_pad"] and pad_size is not None and (pad_size.height % pair[0] or pad_size.width % pair[1]):
            raise ValueError(f"pad_size={dict(pad_size)} must be a multiple of ensure_multiple_of={multiple}.")
    elif options["do_pad"] and options["hide_padding"]:
        raise ValueError(
            "do_pad=True pads to whole patches, so it needs ensure_multiple_of. Set it to the patch size of the "
            "model, config.patch_size, or give a pad_size that all images are padded to."
        )
    if options["do_pad"] and not options["hide_padding"] and pad_size is None:
        raise ValueError("hide_padding=False pads every image to one size. Give it as pad_size={'height', 'width'}.")
    if options["keep_aspect_ratio"] and "height" not in dict(options["size"] or {}):
        raise ValueError(
            f"keep_aspect_ratio=True chooses between a height and a width, which size={dict(options['size'] or {})} "
            "has not. Leave keep_aspect_ratio out: this size keeps the ratio anyway."
        )


def _check_affine_crop(options: dict[str, Any]) -> None:
    size, padding = dict(options["size"] or {}), options["box_padding"]
    if {*size} != {"height", "width"} or min(size.values()) < 2:
        raise ValueError(
            f"do_affine_crop=True makes crops of one size, but size={size}. Give {{'height', 'width'}} of 2 pixels or "
            "more."
        )
    if options["do_center_crop"] or options["do_pad"]:
        raise ValueError(
            "do_affine_crop=True cuts out boxes and nothing else. Set do_center_crop and do_pad to False."
        )
    if padding is None or not 0 < padding < math.inf:
        raise ValueError(f"box_padding={padding} must be positive; 1.25 shows a quarter more than the box.")
