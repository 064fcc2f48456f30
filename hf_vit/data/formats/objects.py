"""The objects of many images, their boxes and classes, the same from every source.

Shapes: I images, N objects.
"""

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar, get_args

import numpy as np
import pyarrow as pa
from datasets import Dataset, concatenate_datasets
from transformers.utils import logging

from .classes import NAME_FILES, names_beside
from .files import MAX_NAMED, image_headers, in_lines, listed, report
from .orientation import AnnotationOrientation, find_turns, reversed_axes, turn_points, upright_sizes
from .text import flag_of


logger = logging.get_logger(__name__)
Table = TypeVar("Table", bound=Sized)
BoxFormat = Literal["coco", "voc", "yolo"]
BoxErrors = Literal["raise", "clip", "drop"]
# Pixels by which tools go beyond an image when they round, or count pixels from 1.
ROUNDING = 1.0
WHOLE_IMAGE = (0.0, 0.0, 1.0, 1.0)  # a box in shares of its image
MIN_BOXES = 10  # fewer say little about how boxes are written


@dataclass(frozen=True)
class ObjectTable:
    """The images of a split, also those without any object, and their objects one after the other."""

    images: Dataset  # the column `image` (`datasets.Image`), I rows
    sizes: np.ndarray  # (I, 2) int64, width and height of each image in pixels; until `upright`, 0 if not given
    image_numbers: np.ndarray  # (N,) int64, the image of each object, ascending
    boxes: np.ndarray  # (N, 4) float64, x1, y1, x2, y2 in pixels, until `upright` as annotated
    is_share: np.ndarray  # (N,) bool, whether a box is in shares of its image rather than pixels, until `upright`
    labels: np.ndarray  # (N,) int64, numbers of classes
    is_crowd: np.ndarray  # (N,) bool, whether a box is around several objects, or one that need not be found
    areas: np.ndarray  # (N,) float64, square pixels; NaN where only the box says it
    ids: np.ndarray  # (N,) int64, what `describe` takes
    describe: Callable[[int], str]  # returns, for errors, which object in which file has an id

    def __len__(self) -> int:
        return len(self.boxes)

    def select(self, kept: np.ndarray) -> "ObjectTable":
        """Returns a table of some of the objects, by (N,) bool or their places, and of all images."""
        columns = ("image_numbers", "boxes", "is_share", "labels", "is_crowd", "areas", "ids")
        return replace(self, **{name: vars(self)[name][kept] for name in columns})

    def name_of(self, place: int) -> str:
        """Returns which object in which file stands at a place from 0, for errors."""
        return self.describe(int(self.ids[place]))


def table_of(
    images: Dataset,
    sizes: np.ndarray,
    image_numbers: np.ndarray,
    boxes: np.ndarray,
    describe: Callable[[int], str],
    *,
    is_share: np.ndarray | bool = False,
    labels: np.ndarray | None = None,
    is_crowd: Sequence[object] | None = None,
    areas: np.ndarray | None = None,
) -> ObjectTable:
    """Returns a table of objects in any order, which are sorted by image and otherwise stay in their order."""
    # By default boxes are in pixels, all labels are 0, there are no crowds and no areas are known, nor are those that
    # are not positive. `describe` takes the place from 0 that an object had before they were sorted.
    order = np.argsort(image_numbers, kind="stable")
    flags = [flag_of(value, f"The mark of {describe(place)} as a crowd") for place, value in enumerate(is_crowd or ())]
    areas = np.full(len(order), np.nan) if areas is None else np.asarray(areas, float)
    return ObjectTable(
        images,
        np.asarray(sizes, np.int64).reshape(-1, 2),
        np.asarray(image_numbers, np.int64)[order],
        np.asarray(boxes, float).reshape(-1, 4)[order],
        np.broadcast_to(is_share, len(order))[order],
        np.zeros(len(order), np.int64) if labels is None else np.asarray(labels, np.int64)[order],
        np.zeros(len(order), bool) if is_crowd is None else np.array(flags, bool)[order],
        np.where(areas > 0, areas, np.nan)[order],
        order,
        describe,
    )


def upright(
    table: ObjectTable, choice: AnnotationOrientation, split: str
) -> tuple[ObjectTable, np.ndarray, np.ndarray]:
    """Returns a table in pixels of upright images, and for each object by which turn (N,) of which size (N, 2)."""
    headers = image_headers(table.images, is_needed=(table.sizes <= 0).any(axis=1))
    turns, sizes = find_turns(headers, table.sizes, choice, split)
    own, of_objects = turns[table.image_numbers], sizes[table.image_numbers]
    boxes = np.where(table.is_share[:, None], table.boxes * np.tile(of_objects, 2), table.boxes)
    places = turn_points(boxes.reshape(-1, 2, 2), own, of_objects)
    # The first corner stays the first one.
    boxes = np.where(reversed_axes(own)[:, None], places[:, ::-1], places).reshape(-1, 4)
    is_share = np.zeros_like(table.is_share)
    return replace(table, sizes=upright_sizes(sizes, turns), boxes=boxes, is_share=is_share), own, of_objects


def corners(boxes: np.ndarray, box_format: BoxFormat, sizes: np.ndarray) -> np.ndarray:
    """Returns boxes (N, 4) as x1, y1, x2, y2 in pixels, of images of (N, 2) width and height."""
    # "coco" has x1, y1, width and height in pixels, "voc" x1, y1, x2, y2 in pixels, "yolo" center x, y, width and
    # height as shares of the image.
    if box_format == "voc":
        return boxes
    places, lengths = boxes[:, :2], boxes[:, 2:]
    if box_format == "yolo":
        places, lengths = (places - lengths / 2) * sizes, lengths * sizes
    return np.concatenate([places, places + lengths], axis=1)


def box_areas(boxes: np.ndarray) -> np.ndarray:
    """Returns (N,) square pixels of boxes (N, 4) x1, y1, x2, y2."""
    return (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)


def detection_rows(table: ObjectTable) -> Dataset:
    """Returns one row an image: `image`, `boxes`, `class_labels`, `is_crowd`, `areas`, `width` and `height`."""
    offsets = np.searchsorted(table.image_numbers, np.arange(len(table.sizes) + 1)).astype(np.int32)
    columns = {
        "boxes": list_of_four(table.boxes),
        "class_labels": pa.array(table.labels),
        "is_crowd": pa.array(table.is_crowd),
        "areas": pa.array(known_areas(table), pa.float32()),
    }
    lists = {name: pa.ListArray.from_arrays(offsets, values) for name, values in columns.items()}
    return beside(table.images, {**lists, "width": table.sizes[:, 0], "height": table.sizes[:, 1]})


def known_areas(table: ObjectTable) -> np.ndarray:
    """Returns (N,) areas, of the boxes where there are no others."""
    return np.where(np.isnan(table.areas), box_areas(table.boxes), table.areas)


def list_of_four(boxes: np.ndarray) -> pa.Array:
    """Returns (N, 4) as Arrow float32."""
    return pa.FixedSizeListArray.from_arrays(pa.array(boxes.ravel(), pa.float32()), 4)


def beside(images: Dataset, columns: dict[str, pa.Array | np.ndarray]) -> Dataset:
    """Puts columns beside those of a dataset, which stay where they are."""
    return concatenate_datasets([images, Dataset(pa.table(columns))], axis=1)


def checked_boxes(tables: Mapping[str, ObjectTable], box_errors: BoxErrors) -> dict[str, ObjectTable]:
    """Returns tables whose boxes lie within their images and have an area."""
    # What is outside by at most a pixel is cut off in any case. What is done about other boxes `box_errors` says:
    # "raise" lists them in an error, "clip" cuts off what is outside and leaves out boxes of which nothing is left,
    # and "drop" leaves them all out.
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


def without_repeats(tables: Mapping[str, ObjectTable]) -> tuple[dict[str, ObjectTable], tuple[str, ...]]:
    """Removes exact duplicates of boxes, of one image and class; also returns sentences for the model card."""
    kept = {}
    for split, table in tables.items():
        rows = np.column_stack([table.image_numbers, table.labels, table.is_crowd, table.boxes])
        kept[split] = table.select(np.sort(np.unique(rows, axis=0, return_index=True)[1]))
    count = sum(map(len, tables.values())) - sum(map(len, kept.values()))
    return kept, report(count, f"{count:,} exact duplicates of boxes, of one image and class, were removed")


def without_empty(tables: Mapping[str, Table], what: str, source: str) -> dict[str, Table]:
    """Leaves out splits without any object, or `what` they lack, as test sets are often published."""
    empty = [split for split, table in tables.items() if not len(table)]
    if "train" in empty or len(empty) == len(tables):
        raise ValueError(f"{source} has no {what} in {listed(empty)}. Add some.")
    if empty:
        logger.warning("Left out of %s, as they have no %s: %s.", source, what, listed(empty))
    return {split: table for split, table in tables.items() if split not in empty}


def object_sizes(table: ObjectTable) -> np.ndarray:
    """Returns (N, 2) width and height of each object's image."""
    return table.sizes[table.image_numbers]


def wrong_boxes(boxes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Returns (N,) bool: which boxes (N, 4) reach out of images of sizes (N, 2) by a pixel, or have no area there."""
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
    boxes = np.concatenate([table.boxes for table in tables.values()])
    num_wrong = sum(int(found.sum()) for found in wrong.values())
    num_tiny = int(((boxes[:, 2:] - boxes[:, :2]) <= 1).all(axis=1).sum())
    if len(boxes) >= MIN_BOXES and 2 * max(num_wrong, num_tiny) > len(boxes):
        faults = [_fault(table, place) for table in tables.values() for place in range(min(len(table), MAX_NAMED))]
        raise ValueError(
            f"Of {len(boxes)} boxes {num_wrong} have no area or reach out of their image, and {num_tiny} are no "
            "larger than a pixel: so they are written in another way. COCO has x, y, width, height in pixels, VOC x1, "
            "y1, x2, y2 in pixels, and YOLO center x, y, width, height as shares of the image. They were read so:"
            f"{in_lines(faults, MAX_NAMED)}"
        )


def _fault(table: ObjectTable, place: int) -> str:
    x1, y1, x2, y2 = table.boxes[place].round(2).tolist()
    width, height = table.sizes[table.image_numbers[place]].tolist()
    return f"{table.name_of(place)}: x {x1} to {x2} of {width}, y {y1} to {y2} of {height}"


def class_names_beside(folders: Sequence[Path], class_names: Sequence[str] | None) -> tuple[str, ...]:
    """Returns the names of classes that are numbers: those that are given, or of a file in one of the folders."""
    names = tuple(class_names or names_beside(folders))
    if not names:
        raise ValueError(
            "Classes are numbers, and their names are unknown. Give them as class_names, or in a file "
            f"{' or '.join(NAME_FILES)} beside the data."
        )
    return names


def without_class_names(class_names: Sequence[str] | None, source: object) -> None:
    """Raises `ValueError` if names of classes are given to data that name them."""
    if class_names:
        raise ValueError(f"{source} names its classes itself. Leave class_names={listed(class_names)} out.")


def check_numbers(numbers: np.ndarray, num_classes: int, describe: Callable[[int], str], source: object) -> None:
    """Raises `ValueError` if class numbers (N,) of objects from a source are not below `num_classes`."""
    wrong = np.flatnonzero((numbers < 0) | (numbers >= num_classes)).tolist()
    if wrong:
        faults = [f"{describe(place)}: class {numbers[place]}" for place in wrong]
        raise ValueError(
            f"{len(wrong)} of {len(numbers)} objects of {source} are of unknown classes; there are {num_classes}, "
            f"from 0:{in_lines(faults, MAX_NAMED)}"
        )


def numbered_words(
    words: Mapping[str, Sequence[str]], class_names: Sequence[str] | None
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Numbers classes that are words, those of each object by split; returns numbers (N,) by split, and the names."""
    # The names are those that are given, else the words of "train", or else of the first split, sorted.
    first = "class_names" if class_names else next(iter(words))
    names = tuple(class_names or sorted(set(words[first])))
    numbers = {name: number for number, name in enumerate(names)}
    for split, found in words.items():
        if unknown := sorted(set(found) - set(names)):
            raise ValueError(
                f"The split {split!r} has objects of classes that {first!r} has not: {listed(unknown)}. Spell them "
                f"as there ({listed(names)}), or give all classes as class_names."
            )
    return {split: np.array([numbers[word] for word in found], np.int64) for split, found in words.items()}, names
