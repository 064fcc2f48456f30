"""Boxes of objects: from whatever a user gives to labels of detection, under the geometry of the image, and back.

Given boxes are left, top, right and bottom in pixels, whose zero is the outer corner of the image. Labels are relative
to what the model sees of the image. Shapes: N objects; H W pixels of an image.
"""

from collections.abc import Iterable, Mapping
from operator import index as index_of
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.image_utils import SizeDict

from .configuration_hf_vit import to_pair
from .image_sizes_hf_vit import both_ends, output_size
from .image_targets_hf_vit import check_count, read_classes


Box = tuple[float, float, float, float]  # left, top, right, bottom


def read_boxes(boxes: Any, name: str, corners: str = "left, top, right, bottom") -> Tensor:
    """Returns boxes as a tensor.

    Args:
        boxes: (N, 4) left, top, right and bottom: an array, a tensor, or nested lists, empty where there is none.
        name: What to call them in errors.
        corners: What to call the four numbers in errors.

    Returns:
        (N, 4) float32.

    Raises:
        ValueError: if they have another shape, hold anything but finite numbers, or end before they begin.
    """
    try:
        values = torch.as_tensor(np.asarray(boxes, dtype=np.float32) if isinstance(boxes, list | tuple) else boxes)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}={boxes!r} must be rows of four numbers each, ({corners}).") from error
    values = values.detach().float()
    values = values.reshape(0, 4) if values.numel() == 0 else values
    if values.ndim != 2 or values.shape[1] != 4:
        raise ValueError(
            f"{name} has the shape {tuple(values.shape)}, but must be (N, 4): for each of N objects ({corners}) in "
            "pixels."
        )
    wrong = ~values.isfinite().all(dim=1) | (values[:, 2:] < values[:, :2]).any(dim=1)  # (N,)
    if wrong.any():
        index = int(wrong.nonzero()[0])
        raise ValueError(
            f"{name}[{index}] is {values[index].tolist()}, but must be finite ({corners}) with right >= left and "
            "bottom >= top."
        )
    return values


def read_objects(targets: Mapping[str, Any], sizes: list[tuple[int, int]]) -> list[tuple[Tensor, Tensor]]:
    """Returns boxes (N, 4) float32, as given, and class numbers (N,) int64 of each image.

    Args:
        targets: By the names of `HfViTImageProcessor.preprocess`: "annotations", or "boxes" with "class_labels".
        sizes: Height and width of each image, in pixels.

    Raises:
        TypeError: if class numbers are no whole numbers.
        ValueError: if there are not as many as images, or what they hold is no box or no class.
    """
    if "annotations" in targets:
        given = targets["annotations"]
        images = [given] if isinstance(given, Mapping) else given
        check_count(images, "annotations", sizes)
        return [_read_annotations(image, f"annotations[{index}]") for index, image in enumerate(images)]
    check_count(targets["boxes"], "boxes", sizes)
    check_count(targets["class_labels"], "class_labels", sizes)
    boxes = [read_boxes(own, f"boxes[{index}]") for index, own in enumerate(targets["boxes"])]
    classes = [
        read_classes(own, len(boxes[index]), f"class_labels[{index}]", f"boxes[{index}]")
        for index, own in enumerate(targets["class_labels"])
    ]
    return list(zip(boxes, classes, strict=True))


def _read_annotations(image: Any, name: str) -> tuple[Tensor, Tensor]:
    """Returns boxes and classes of an image in the form of COCO, without crowds."""
    if not isinstance(image, Mapping) or "annotations" not in image:
        raise ValueError(f"{name} is {image!r}, but must be a dictionary with a list of 'annotations', as in COCO.")
    boxes, classes = [], []
    for index, entry in enumerate(image["annotations"]):
        place = f"{name}['annotations'][{index}]"
        for key in ("bbox", "category_id"):
            if key not in entry:
                raise ValueError(f"{place} has no {key!r}, but only {', '.join(entry)}. Add it.")
        if entry.get("iscrowd"):
            continue
        if len(entry["bbox"]) != 4:
            raise ValueError(
                f"{place} has the bbox {entry['bbox']}, but must be [left, top, width, height] in pixels."
            )
        left, top, width, height = entry["bbox"]
        if width < 0 or height < 0:
            raise ValueError(
                f"{place} has the bbox {entry['bbox']} of negative size. It must be [left, top, width, height]."
            )
        boxes.append([left, top, left + width, top + height])
        try:
            classes.append(index_of(entry["category_id"]))
        except TypeError as error:
            raise TypeError(
                f"{place} has the category_id {entry['category_id']!r}, but class numbers are whole. Give an integer."
            ) from error
    return read_boxes(boxes, f"{name}['annotations']"), read_classes(
        classes, len(boxes), f"The category_id of {name}", name
    )


def seen_window(
    height: int,
    width: int,
    *,
    do_resize: bool | None,
    size: SizeDict | dict[str, int],
    ensure_multiple_of: Any,
    keep_aspect_ratio: bool | None,
    do_center_crop: bool | None,
    crop_size: SizeDict | dict[str, int] | None,
    crop_rounding: str,
    do_pad: bool | None,
    hide_padding: bool | None,
    pad_size: SizeDict | dict[str, int] | None,
    **_: Any,
) -> Box:
    """Returns what a model sees of an image, under the options of the image processor, in units of the image.

    (0, 0, 1, 1) is all of it. A centre crop is less, or more where it is larger than the image. Padding does not count
    unless the model sees it; whole patches, of which the image fills the last ones in part, do.

    Args:
        height: Of the image in pixels.
        width: Of the image in pixels.
        do_resize: This and the rest are the options of the image processor.
        size: See there.
        ensure_multiple_of: See there.
        keep_aspect_ratio: See there.
        do_center_crop: See there.
        crop_size: See there.
        crop_rounding: See there.
        do_pad: See there.
        hide_padding: See there.
        pad_size: See there.

    Returns:
        Left, top, right and bottom.
    """
    patch = None if ensure_multiple_of is None else to_pair(ensure_multiple_of)
    if do_resize:
        height, width = output_size(height, width, dict(size), patch, "the image", keep_aspect_ratio)
    left, top, right, bottom = 0, 0, width, height
    if do_center_crop and crop_size is not None:
        before, after = both_ends(crop_size["width"] - width, crop_rounding)
        left, right = -before, width + after
        before, after = both_ends(crop_size["height"] - height, crop_rounding)
        top, bottom = -before, height + after
    if do_pad and hide_padding and patch is not None:
        right, bottom = left - (left - right) // patch[1] * patch[1], top - (top - bottom) // patch[0] * patch[0]
    elif do_pad and pad_size is not None:
        right, bottom = left + pad_size["width"], top + pad_size["height"]
    return left / width, top / height, right / width, bottom / height


def encode_boxes(boxes: Tensor, size: tuple[int, int], window: Box) -> tuple[Tensor, Tensor]:
    """Returns boxes as a model is trained on them.

    Args:
        boxes: (N, 4) left, top, right and bottom in pixels.
        size: Height and width of the image in pixels.
        window: What the model sees of it, as `seen_window` says.

    Returns:
        Centre x, centre y, width and height (M, 4) of what is left of the boxes in image and window, in units of the
        window; and which have something left (N,) bool, M of them.
    """
    relative = boxes / boxes.new_tensor([size[1], size[0]]).repeat(2)  # (N, 4)
    origin, extent = _origin_and_extent(window, boxes)
    corners = ((relative.clamp(0, 1) - origin) / extent).clamp(0, 1)  # (N, 4)
    low, high = corners[:, :2], corners[:, 2:]
    is_left = (high > low).all(dim=1)  # (N,)
    return torch.cat(((low + high) / 2, high - low), dim=1)[is_left], is_left


def decode_boxes(boxes: Tensor, size: tuple[int, int], window: Box) -> Tensor:
    """Returns boxes in pixels: the inverse of `encode_boxes`, except for what that cuts away.

    Args:
        boxes: (..., 4) centre x, centre y, width and height in units of the window.
        size: Height and width of the image in pixels.
        window: What the model saw of it, as `seen_window` says.

    Returns:
        (..., 4) left, top, right and bottom.
    """
    centre, half = boxes[..., :2], boxes[..., 2:] / 2
    origin, extent = _origin_and_extent(window, boxes)
    relative = torch.cat((centre - half, centre + half), dim=-1) * extent + origin  # (..., 4)
    return relative * boxes.new_tensor([size[1], size[0]]).repeat(2)


def _origin_and_extent(window: Box, like: Tensor) -> tuple[Tensor, Tensor]:
    """Returns where a window begins and how far it goes, x, y, x, y each."""
    left, top, right, bottom = window
    return like.new_tensor([left, top]).repeat(2), like.new_tensor([right - left, bottom - top]).repeat(2)


def encode_objects(
    objects: Iterable[tuple[Tensor, Tensor]], sizes: list[tuple[int, int]], **options: Any
) -> list[tuple[Tensor, Tensor]]:
    """Returns the labels of each image: classes (M,) and boxes (M, 4), without objects of which nothing is left.

    Args:
        objects: Boxes and classes of each image, as `read_objects` returns them.
        sizes: Height and width of each image, in pixels.
        **options: Of the image processor.
    """
    labels = []
    for (boxes, classes), size in zip(objects, sizes, strict=True):
        encoded, is_left = encode_boxes(boxes, size, seen_window(*size, **options))
        labels.append((classes.to(boxes.device)[is_left], encoded))
    return labels
