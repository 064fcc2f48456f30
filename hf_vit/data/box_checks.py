"""Boxes that reach out of their image or have no area: found before a training starts. Shapes: N objects."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, get_args

import numpy as np
from transformers.utils import logging

from .object_table import ObjectTable, box_areas
from .wording import MAX_NAMED, in_lines


logger = logging.get_logger(__name__)

BoxErrors = Literal["raise", "clip", "drop"]
# Pixels by which tools go beyond an image when they round, or count pixels from 1.
ROUNDING = 1.0
MIN_BOXES = 10  # fewer say little about how boxes are written


def checked_boxes(tables: Mapping[str, ObjectTable], box_errors: BoxErrors) -> dict[str, ObjectTable]:
    """Returns tables whose boxes lie within their images and have an area.

    What is outside by at most a pixel is cut off in any case.

    Args:
        tables: Objects by split.
        box_errors: What is done about other boxes: "raise" names them in an error, "clip" cuts off what is outside and
            leaves out boxes of which nothing is left, and "drop" leaves them all out.

    Raises:
        ValueError: if `box_errors` is unknown, a box is not finite, some are wrong and `box_errors` is "raise", or
            most of all, or smaller than a pixel.
    """
    if box_errors not in get_args(BoxErrors):
        raise ValueError(f"box_errors={box_errors!r} is unknown. Choose {', '.join(map(repr, get_args(BoxErrors)))}.")
    _check_finite(tables)
    wrong = {split: wrong_boxes(table.boxes, object_sizes(table)) for split, table in tables.items()}
    _check_plausible(tables, wrong)
    faults = [_fault(tables[split], place) for split in tables for place in np.flatnonzero(wrong[split]).tolist()]
    if faults and box_errors == "raise":
        total = sum(map(len, tables.values()))
        raise ValueError(
            f"{len(faults)} of {total} boxes have no area, or reach out of their image:{in_lines(faults, MAX_NAMED)}\n"
            "Repair them, or set box_errors: 'clip' cuts off what is outside, 'drop' leaves these boxes out."
        )
    clipped = {split: _clipped(table) for split, table in tables.items()}
    kept = {
        split: ~wrong[split] if box_errors == "drop" else _has_area(table.boxes) for split, table in clipped.items()
    }
    num_dropped = sum(int((~mask).sum()) for mask in kept.values())
    if faults:
        logger.warning(
            "%d boxes have no area, or reach out of their image: %d were cut off at its border, %d left out:%s",
            len(faults),
            len(faults) - num_dropped,
            num_dropped,
            in_lines(faults, MAX_NAMED),
        )
    return {split: table.select(kept[split]) for split, table in clipped.items()}


def object_sizes(table: ObjectTable) -> np.ndarray:
    """Returns (N, 2) width and height of each object's image."""
    return table.sizes[table.image_numbers]


def wrong_boxes(boxes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Returns (N,) bool: which boxes have no area in the image, or reach out of it by more than a pixel.

    Args:
        boxes: (N, 4) x1, y1, x2, y2.
        sizes: (N, 2) width and height of each box's image.
    """
    inside = _cut(boxes, sizes)
    return (np.abs(boxes - inside) > ROUNDING).any(axis=1) | ~_has_area(inside)


def _cut(boxes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    return boxes.clip(0, np.tile(sizes, 2))


def _has_area(boxes: np.ndarray) -> np.ndarray:
    return np.all(boxes[:, 2:] > boxes[:, :2], axis=1)


def _clipped(table: ObjectTable) -> ObjectTable:
    boxes = _cut(table.boxes, object_sizes(table))
    is_cut = (boxes != table.boxes).any(axis=1)
    areas = np.where(is_cut, np.minimum(table.areas, box_areas(boxes)), table.areas)  # NaN stays NaN
    return replace(table, boxes=boxes, areas=areas)


def _check_finite(tables: Mapping[str, ObjectTable]) -> None:
    faults = [
        f"{table.name_of(place)}: {table.boxes[place].tolist()}"
        for table in tables.values()
        for place in np.flatnonzero(~np.isfinite(table.boxes).all(axis=1)).tolist()
    ]
    if faults:
        raise ValueError(f"{len(faults)} boxes are not finite:{in_lines(faults, MAX_NAMED)}\nRepair or remove them.")


def _check_plausible(tables: Mapping[str, ObjectTable], wrong: Mapping[str, np.ndarray]) -> None:
    """Raises `ValueError` if boxes are written in another way than they were read."""
    boxes = np.concatenate([table.boxes for table in tables.values()])
    num_wrong = sum(int(found.sum()) for found in wrong.values())
    num_tiny = int(((boxes[:, 2:] - boxes[:, :2]) <= 1).all(axis=1).sum())
    if len(boxes) >= MIN_BOXES and 2 * max(num_wrong, num_tiny) > len(boxes):
        faults = [_fault(table, place) for table in tables.values() for place in range(min(len(table), MAX_NAMED))]
        raise ValueError(
            f"Of {len(boxes)} boxes {num_wrong} have no area or reach out of their image, and {num_tiny} are no "
            "larger than a pixel: so they are written in another way. COCO has x, y, width, height in pixels, VOC x1, "
            "y1, x2, y2 in pixels, and YOLO centre x, y, width, height as shares of the image. They were read so:"
            f"{in_lines(faults, MAX_NAMED)}"
        )


def _fault(table: ObjectTable, place: int) -> str:
    x1, y1, x2, y2 = table.boxes[place].round(2).tolist()
    width, height = table.sizes[table.image_numbers[place]].tolist()
    return f"{table.name_of(place)}: x {x1} to {x2} of {width}, y {y1} to {y2} of {height}"
