"""What must hold of annotations in the JSON files of COCO."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .wording import MAX_NAMED, in_lines


Entry = Mapping[str, Any]


def check_entries(entries: Sequence[Any], keys: Iterable[str], what: str, file: Path) -> None:
    """Raises `ValueError` if some entries of a file lack keys, naming them by their `id` or else their place."""
    lacking = []
    for place, entry in enumerate(entries):
        if not isinstance(entry, dict):
            lacking.append(f"entry {place} is no object but {entry!r}")
        elif missing := [key for key in keys if key not in entry]:
            name = f"id {entry['id']}" if "id" in entry else f"entry {place}"
            lacking.append(f"{name} has no {', '.join(missing)}")
    if lacking:
        raise ValueError(f"{len(lacking)} of {len(entries)} {what} in {file} are incomplete:{in_lines(lacking)}")


def check_unique(entries: Sequence[Entry], what: str, file: Path) -> None:
    """Raises `ValueError` if several entries of a file have one `id`."""
    counts = Counter(entry["id"] for entry in entries if "id" in entry)
    if several := [f"id {name}: {count} times" for name, count in counts.items() if count > 1]:
        raise ValueError(
            f"{len(several)} ids of {what} in {file} occur more than once:{in_lines(several, MAX_NAMED)}\nNumber the "
            f"{what} anew."
        )


def check_instances(annotations: Sequence[Entry], images: Iterable[Entry], file: Path) -> None:
    """Raises `ValueError` if some annotations have no mask that can be drawn, naming them by their `id`."""
    sizes = {image["id"]: (image["height"], image["width"]) for image in images}
    found = (
        (annotation, _fault(annotation.get("segmentation"), *sizes[annotation["image_id"]]))
        for annotation in annotations
    )
    faults = [f"annotation {annotation.get('id', 'without id')} {fault}" for annotation, fault in found if fault]
    if faults:
        raise ValueError(
            f"{len(faults)} of {len(annotations)} annotations in {file} have no mask:{in_lines(faults)}\nRepair them, "
            "or leave them out."
        )


def _fault(segmentation: Any, height: int, width: int) -> str | None:
    """Returns what is wrong with a mask of an image of so many pixels, if anything that shows without drawing it."""
    if isinstance(segmentation, dict) and {"counts", "size"} <= segmentation.keys():
        return None
    if not isinstance(segmentation, list) or not segmentation:
        return "has no segmentation (polygons or run lengths): boxes alone make no masks"
    if not all(isinstance(points, list) and len(points) >= 6 and len(points) % 2 == 0 for points in segmentation):
        return "has no polygons of at least three points x, y"
    values = np.array([value for points in segmentation for value in points])
    if values.dtype.kind not in "iuf" or not np.isfinite(values).all():
        return "has a polygon with something else than numbers"
    places = values.reshape(-1, 2)  # x and y
    # What is far out is a slip, and drawing it would take more memory than there is.
    if (abs(places) > 2 * max(height, width)).any():
        return f"has a polygon far outside the image of {height} x {width} pixels"
    polygons = np.split(places, np.cumsum([len(points) // 2 for points in segmentation])[:-1])
    size = (width, height)
    if not any((polygon.max(axis=0) > 0).all() and (polygon.min(axis=0) < size).all() for polygon in polygons):
        return f"lies wholly outside the image of {height} x {width} pixels"
    return None
