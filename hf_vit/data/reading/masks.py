"""Instance masks of objects, encoded as polygons or runs as in COCO.

Shapes: P points.
"""

import json
from itertools import pairwise
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict, concatenate_datasets

from .files import add_file_column
from .objects import ObjectTable


def instance_rows(table: ObjectTable) -> DatasetDict:
    """Convert objects with masks to datasets with one row per image, without decoding images and masks.

    The columns are `image`, `file`, `objects` (lists of `name`, `label`, `iscrowd` and `segmentation`, as JSON),
    `height` and `width`.
    """
    offsets = np.searchsorted(table.image_numbers, np.arange(len(table.sizes) + 1)).tolist()
    columns = (table.names, table.labels.tolist(), table.is_crowd.tolist(), table.masks)
    entries = [
        {"name": name.split(" of ")[0], "label": label, "iscrowd": is_crowd, "segmentation": mask}
        for name, label, is_crowd, mask in zip(*columns, strict=True)
    ]
    objects = [json.dumps(entries[start:stop]) for start, stop in pairwise(offsets)]
    found, start = DatasetDict(), 0
    for split, images in add_file_column(DatasetDict(table.images)).items():
        stop = start + len(images)
        sizes = table.sizes[start:stop]
        cells = {"objects": objects[start:stop], "height": sizes[:, 1], "width": sizes[:, 0]}
        found[split] = concatenate_datasets([images, Dataset.from_dict(cells)], axis=1)
        start = stop
    return found


def mask_fault(segmentation: Any, height: int, width: int) -> str | None:
    """Return the error in an encoded mask of an image of a given size in pixels, or `None` if none is found.

    Args:
        segmentation: List of polygons [x1, y1, x2, y2, ...], or a dictionary of run lengths; it is not decoded.
        height: Height of the image in pixels.
        width: Width of the image in pixels.
    """
    if isinstance(segmentation, dict) and {"counts", "size"} <= segmentation.keys():
        return None
    if not isinstance(segmentation, list) or not segmentation:
        return "has no segmentation (polygons or run-length encoding), which masks require in addition to boxes"
    if not all(isinstance(points, list) and len(points) >= 6 and len(points) % 2 == 0 for points in segmentation):
        return "has no polygons of at least three points x, y"
    values = np.array([value for points in segmentation for value in points])
    if values.dtype.kind not in "iuf" or not np.isfinite(values).all():
        return "has a polygon with values that are not finite numbers"
    places = values.reshape(-1, 2)  # x and y of all polygon points
    # Points far outside the image are errors, and drawing them could exhaust the memory.
    if (abs(places) > 2 * max(height, width)).any():
        return f"has a polygon far outside the image of {height} x {width} pixels"
    counts = [len(points) // 2 for points in segmentation]
    polygons = np.split(places, np.cumsum(counts)[:-1]) if len(counts) > 1 else [places]
    size = (width, height)
    if all(polygon_area(polygon) == 0 for polygon in polygons):
        return "has a polygon without area"
    if not any((polygon.max(axis=0) > 0).all() and (polygon.min(axis=0) < size).all() for polygon in polygons):
        return f"lies completely outside the image of {height} x {width} pixels"
    return None


def polygon_area(points: np.ndarray) -> float:
    """Return the area of a polygon (P, 2) in square pixels."""
    x, y = np.concatenate([points, points[:1]]).T
    return abs(float(x[:-1] @ y[1:] - y[:-1] @ x[1:])) / 2
