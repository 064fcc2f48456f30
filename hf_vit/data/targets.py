"""From rows of a dataset to the targets of dense prediction. Shapes: H W pixels, M masks."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..image_targets_hf_vit import IGNORED_LABEL
from .class_list import ClassList
from .encoded import encoded_bytes
from .target_files import read_depth, read_mask, read_segment_ids
from .wording import listed


Row = Mapping[str, Any]


def semantic_target(row: Row, classes: ClassList) -> dict[str, Tensor]:
    """Reads the column `mask`.

    Returns:
        `segmentation_map` (H, W) int64, class numbers and 255 where there is none.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it has labels or colours of no class.
    """
    name = f"mask of {row['file']}"
    return {"segmentation_map": read_mask(encoded_bytes(row["mask"], name), classes, name)}


def region_target(row: Row, classes: ClassList, thing_ids: tuple[int, ...]) -> dict[str, Tensor]:
    """Reads the column `mask` as one mask for each class in it, and each connected region of a thing.

    Pieces that touch, even at a corner or by way of pixels of no class, are one thing. That is sensible for photos of
    one animal or part each, and not for crowds, which need masks of their instances.

    Returns:
        `masks` (M, H, W) bool and `class_labels` (M,) int64, by class.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it has labels or colours of no class.
    """
    labels = semantic_target(row, classes)["segmentation_map"].numpy()
    found: list[tuple[int, np.ndarray]] = []
    for number in np.unique(labels[labels != IGNORED_LABEL]).tolist():
        mask = labels == number
        found += [
            (number, part) for part in (_regions(mask, labels == IGNORED_LABEL) if number in thing_ids else [mask])
        ]
    return _stacked([mask for _, mask in found], [number for number, _ in found], labels.shape)


def _regions(mask: np.ndarray, bridge: np.ndarray) -> list[np.ndarray]:
    """Returns the connected regions of a mask, where what is connected by way of the bridge is one."""
    from scipy import ndimage  # here, as only training needs it

    numbers, _ = ndimage.label(mask | bridge, structure=np.ones((3, 3)))
    return [mask & (numbers == number) for number in np.unique(numbers[mask]).tolist()]


def panoptic_target(row: Row) -> dict[str, Tensor]:
    """Reads the column `panoptic`, an image in the format of COCO panoptic, with `segments`.

    Crowds are left out: their pixels are of no mask.

    Returns:
        `masks` (M, H, W) bool and `class_labels` (M,) int64, in the order of `segments`.

    Raises:
        OSError: if it cannot be read.
        ValueError: if the segments in the image are not those that are listed.
    """
    name = f"panoptic mask of {row['file']}"
    ids = read_segment_ids(encoded_bytes(row["panoptic"], name), name)
    segments = row["segments"]
    found, counts = np.unique(ids, return_counts=True)
    areas = dict(zip(found.tolist(), counts.tolist(), strict=True))
    if unlisted := sorted(areas.keys() - {0} - {segment["id"] for segment in segments}):
        raise ValueError(f"{name} has the segments {listed(unlisted)}, which are not in its segments_info.")
    if missing := [segment["id"] for segment in segments if segment["id"] not in areas]:
        raise ValueError(f"{name} has no pixel of the segments {listed(missing)} of its segments_info.")
    kept = [segment for segment in segments if not segment["iscrowd"]]
    return _stacked([ids == segment["id"] for segment in kept], [segment["label"] for segment in kept], ids.shape)


def instances_target(row: Row) -> dict[str, Tensor]:
    """Draws the column `objects`, polygons and run lengths in the format of COCO.

    Returns:
        `masks` (M, H, W) bool, which may overlap, and `class_labels` (M,) int64.

    Raises:
        ValueError: if a mask is of another size than the image shall have.
    """
    size = (row["height"], row["width"])
    objects = json.loads(row["objects"])
    masks = [_draw(segmentation, *size) for _, segmentation in objects]
    if wrong := [mask.shape for mask in masks if mask.shape != size]:
        raise ValueError(
            f"instances of {row['file']} have masks of {wrong[0][0]} x {wrong[0][1]} pixels, but their JSON gives "
            f"the image {size[0]} x {size[1]}."
        )
    return _stacked(masks, [label for label, _ in objects], size)


def _draw(segmentation: Any, height: int, width: int) -> np.ndarray:
    from pycocotools import mask  # here, as only training needs it

    if isinstance(segmentation, list):
        runs = mask.merge(mask.frPyObjects(segmentation, height, width))
    elif isinstance(segmentation["counts"], list):
        runs = mask.frPyObjects(segmentation, height, width)
    else:
        runs = segmentation
    return mask.decode(runs).astype(bool)


def depth_target(row: Row, depth_scale: float | None) -> dict[str, Tensor]:
    """Reads the column `depth`.

    Returns:
        `depth_map` (H, W) float32 in metres, 0 where there is none.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is no depth map.
    """
    name = f"depth map of {row['file']}"
    return {"depth_map": read_depth(encoded_bytes(row["depth"], name), depth_scale, name)}


def _stacked(masks: list[np.ndarray], labels: list[int], size: tuple[int, ...]) -> dict[str, Tensor]:
    stacked = np.stack(masks) if masks else np.zeros((0, *size), bool)  # (M, H, W)
    return {"masks": torch.from_numpy(stacked), "class_labels": torch.tensor(labels, dtype=torch.int64)}
