"""One table for the objects of all splits, the same from every format: boxes, classes and keypoints.

Shapes: I images, N objects, K keypoints.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
from datasets import Dataset, DatasetDict, concatenate_datasets
from transformers.utils import logging

from .classes import NAME_FILES, names_beside
from .files import MAX_NAMED, flag_of, image_headers, in_lines, listed, raise_faults, report, with_files
from .orientation import AnnotationOrientation, find_turns, reversed_axes, turn_points, upright_sizes


logger = logging.get_logger(__name__)
BoxFormat = Literal["coco", "voc", "yolo"]
BoxErrors = Literal["raise", "clip", "drop"]
# Pixels by which tools go beyond an image when they round, or count pixels from 1.
ROUNDING = 1.0
WHOLE_IMAGE = (0.0, 0.0, 1.0, 1.0)  # a box in shares of its image
MIN_BOXES = 10  # fewer say little about how boxes are written
COLUMNS = ("names", "image_numbers", "boxes", "is_share", "labels", "is_crowd", "areas", "keypoints")


@dataclass(frozen=True)
class ObjectTable:
    """The images of the splits, including those without objects, and one row per object, sorted by image."""

    images: Mapping[str, Dataset]  # by split: the column `image` (`datasets.Image`), I rows in all
    sizes: np.ndarray  # (I, 2) int64, width and height of each image in pixels; until `upright`, 0 if not given
    names: np.ndarray  # (N,) str objects, what error messages call the objects
    image_numbers: np.ndarray  # (N,) int64, the image of each object, ascending
    boxes: np.ndarray  # (N, 4) float64, x1, y1, x2, y2 in pixels; until `upright`, as annotated
    is_share: np.ndarray  # (N,) bool, whether a box is in shares of its image; until `upright`
    labels: np.ndarray  # (N,) int64, class numbers
    is_crowd: np.ndarray  # (N,) bool, whether a box contains several objects, or is optional to find
    areas: np.ndarray  # (N,) float64, square pixels; NaN if only the box says it
    keypoints: np.ndarray  # (N, K, 3) float64, x, y in pixels and visibility: 0 (not labeled), 1 (hidden) or 2

    def __len__(self) -> int:
        return len(self.boxes)

    @property
    def object_sizes(self) -> np.ndarray:
        """(N, 2) width and height of each object's image."""
        return self.sizes[self.image_numbers]

    @property
    def known_areas(self) -> np.ndarray:
        """(N,) areas, those of the boxes if no others are known."""
        return np.where(np.isnan(self.areas), box_areas(self.boxes), self.areas)

    def select(self, kept: np.ndarray) -> "ObjectTable":
        """Return a table of some objects, by (N,) bool or their places, and of all images."""
        return replace(self, **{name: vars(self)[name][kept] for name in COLUMNS})

    def box_fault(self, place: int) -> str:
        """Return the name, box and image size of an object, for error messages."""
        x1, y1, x2, y2 = self.boxes[place].round(2).tolist()
        width, height = self.sizes[self.image_numbers[place]].tolist()
        return f"{self.names[place]}: x {x1} to {x2} of {width}, y {y1} to {y2} of {height}"

    def keypoint_faults(self, is_wrong: np.ndarray) -> list[str]:
        """Return the name and values of each keypoint that is wrong, (N, K) bool, for error messages."""
        return [
            f"keypoint {number + 1} of {self.names[place]}: {self.keypoints[place, number].tolist()}"
            for place, number in np.argwhere(is_wrong).tolist()
        ]


def table_of(
    split: str,
    images: Dataset,
    sizes: np.ndarray,
    image_numbers: np.ndarray,
    boxes: np.ndarray,
    names: Sequence[str],
    *,
    is_share: np.ndarray | bool = False,
    labels: np.ndarray | None = None,
    is_crowd: Sequence[object] | None = None,
    areas: np.ndarray | None = None,
    keypoints: np.ndarray | None = None,
) -> ObjectTable:
    """Return the table of one split from objects in any order; it keeps the order within an image."""
    # By default boxes are in pixels, all labels are 0, and there are no crowds, areas and keypoints. Areas that are
    # not positive are unknown. `names` are what error messages call the objects.
    count, order = len(image_numbers), np.argsort(image_numbers, kind="stable")
    flags = [flag_of(value, f"The mark of {names[place]} as a crowd") for place, value in enumerate(is_crowd or ())]
    areas = np.full(count, np.nan) if areas is None else np.asarray(areas, float)
    columns: dict[str, Any] = {
        "names": np.array(names, object),
        "image_numbers": np.asarray(image_numbers, np.int64),
        "boxes": np.asarray(boxes, float).reshape(-1, 4),
        "is_share": np.broadcast_to(is_share, count),
        "labels": np.zeros(count, np.int64) if labels is None else np.asarray(labels, np.int64),
        "is_crowd": np.zeros(count, bool) if is_crowd is None else np.array(flags, bool),
        "areas": np.where(areas > 0, areas, np.nan),
        "keypoints": np.zeros((count, 0, 3)) if keypoints is None else np.asarray(keypoints, float),
    }
    sizes = np.asarray(sizes, np.int64).reshape(-1, 2)
    return ObjectTable({split: images}, sizes, **{name: values[order] for name, values in columns.items()})


def join_tables(tables: Sequence[ObjectTable]) -> ObjectTable:
    """Return the table of several splits from one table per split."""
    num_images, num_objects = [len(table.sizes) for table in tables], [len(table) for table in tables]
    columns = {name: np.concatenate([vars(table)[name] for table in tables]) for name in COLUMNS}
    columns["image_numbers"] += np.repeat(np.cumsum([0, *num_images[:-1]]), num_objects)
    images = {split: found for table in tables for split, found in table.images.items()}
    return ObjectTable(images, np.concatenate([table.sizes for table in tables]), **columns)


def upright(table: ObjectTable, choice: AnnotationOrientation) -> ObjectTable:
    """Return a table in pixels of upright images."""
    found, start = [], 0
    for split, images in table.images.items():
        given = table.sizes[start : start + len(images)]
        headers = image_headers(images, is_needed=(given <= 0).any(axis=1))
        found.append(find_turns(headers, given, choice, split))
        start += len(images)
    turns, frames = (np.concatenate(parts) for parts in zip(*found, strict=True))
    own, sizes = turns[table.image_numbers], frames[table.image_numbers]
    boxes = np.where(table.is_share[:, None], table.boxes * np.tile(sizes, 2), table.boxes)
    places = turn_points(boxes.reshape(-1, 2, 2), own, sizes)
    # The first corner stays the first one.
    boxes = np.where(reversed_axes(own)[:, None], places[:, ::-1], places).reshape(-1, 4)
    keypoints, is_labeled = table.keypoints.copy(), table.keypoints[..., 2:] > 0
    keypoints[..., :2] = np.where(is_labeled, turn_points(keypoints[..., :2], own, sizes, last=1), 0)
    is_share = np.zeros_like(table.is_share)
    return replace(table, sizes=upright_sizes(frames, turns), boxes=boxes, keypoints=keypoints, is_share=is_share)


def corners(boxes: np.ndarray, box_format: BoxFormat, sizes: np.ndarray | float = 1.0) -> np.ndarray:
    """Return boxes (N, 4) as x1, y1, x2, y2, in pixels of images of (N, 2) width and height."""
    # "coco" has x1, y1, width and height in pixels, "voc" x1, y1, x2, y2 in pixels, "yolo" center x, y, width and
    # height as shares of the image.
    if box_format == "voc":
        return boxes
    places, lengths = boxes[:, :2], boxes[:, 2:]
    if box_format == "yolo":
        places, lengths = (places - lengths / 2) * sizes, lengths * sizes
    return np.concatenate([places, places + lengths], axis=1)


def box_areas(boxes: np.ndarray) -> np.ndarray:
    """Return (N,) square pixels of boxes (N, 4) x1, y1, x2, y2."""
    return (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)


def detection_rows(table: ObjectTable, box_errors: BoxErrors, source: str) -> tuple[DatasetDict, tuple[str, ...]]:
    """Return one row per image of an upright table, and sentences for the model card.

    The columns are `image`, `file`, `boxes`, `class_labels`, `is_crowd`, `areas`, `width`, and `height`.
    """
    table, notes = _without_repeats(_checked_boxes(table, box_errors))
    offsets = np.searchsorted(table.image_numbers, np.arange(len(table.sizes) + 1)).astype(np.int32)
    columns = {
        "boxes": _list_of_four(table.boxes),
        "class_labels": pa.array(table.labels),
        "is_crowd": pa.array(table.is_crowd),
        "areas": pa.array(table.known_areas, pa.float32()),
    }
    lists = {name: pa.ListArray.from_arrays(offsets, values) for name, values in columns.items()}
    rows = Dataset(pa.table({**lists, "width": table.sizes[:, 0], "height": table.sizes[:, 1]}))
    images = with_files(DatasetDict(table.images))
    splits = {
        split: concatenate_datasets([images[split], rows.select(numbers)], axis=1)
        for split, (numbers, _) in _parts(table, "box", source).items()
    }
    return DatasetDict(splits), notes


def keypoint_rows(table: ObjectTable, box_errors: BoxErrors, source: str) -> DatasetDict:
    """Return one row per object of an upright table.

    The columns are `image`, `file`, `keypoints`, `box`, `area`, `image_id`, `width`, and `height`.
    """
    table = _checked_keypoints(table, box_errors)
    num_keypoints, sizes = table.keypoints.shape[1], table.object_sizes
    triples = pa.FixedSizeListArray.from_arrays(pa.array(table.keypoints.ravel(), pa.float32()), 3)
    offsets = np.arange(0, (len(table) + 1) * num_keypoints, num_keypoints, dtype=np.int32)
    columns = {
        "keypoints": pa.ListArray.from_arrays(offsets, triples),
        "box": _list_of_four(table.boxes),
        "area": pa.array(table.known_areas, pa.float32()),
        "image_id": table.image_numbers,
        "width": sizes[:, 0],
        "height": sizes[:, 1],
    }
    rows, images = Dataset(pa.table(columns)), with_files(DatasetDict(table.images))
    found = DatasetDict()
    for split, (numbers, objects) in _parts(table, "object with a labeled keypoint", source).items():
        own = images[split].select(table.image_numbers[objects.start : objects.stop] - numbers.start)
        found[split] = concatenate_datasets([own, rows.select(objects)], axis=1)
    return found


def _list_of_four(boxes: np.ndarray) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(boxes.ravel(), pa.float32()), 4)


def _parts(table: ObjectTable, what: str, source: str) -> dict[str, tuple[range, range]]:
    """Return the image numbers and the places of the objects of each split; leave out splits without any object."""
    stops = np.cumsum([0, *map(len, table.images.values())]).tolist()
    ends = np.searchsorted(table.image_numbers, stops).tolist()
    parts = {
        split: (range(*images), range(*objects))
        for split, images, objects in zip(table.images, pairwise(stops), pairwise(ends), strict=True)
    }
    empty = [split for split, (_, objects) in parts.items() if not objects]
    if "train" in empty or len(empty) == len(parts):
        raise ValueError(f"{source} has no {what} in {listed(empty)}. Add some.")
    if empty:  # test sets are often published without annotations
        logger.warning("Left out of %s, as they have no %s: %s.", source, what, listed(empty))
    return {split: part for split, part in parts.items() if split not in empty}


def _checked_boxes(table: ObjectTable, box_errors: BoxErrors) -> ObjectTable:
    """Return a table whose boxes lie within their images and have an area."""
    # At most one pixel outside is cut off in any case. For other boxes, "raise" lists them in an error, "clip" cuts
    # off the part outside and leaves out boxes without a part inside, and "drop" leaves them all out.
    if box_errors not in get_args(BoxErrors):
        raise ValueError(f"box_errors={box_errors!r} is unknown. Choose {', '.join(map(repr, get_args(BoxErrors)))}.")
    is_infinite = ~np.isfinite(table.boxes).all(axis=1)
    raise_faults(
        [f"{table.names[place]}: {table.boxes[place].tolist()}" for place in np.flatnonzero(is_infinite).tolist()],
        "boxes are not finite",
        "Repair or remove them.",
    )
    is_wrong = wrong_boxes(table.boxes, table.object_sizes)
    _check_plausible(table, int(is_wrong.sum()))
    faults = [table.box_fault(place) for place in np.flatnonzero(is_wrong).tolist()]
    if box_errors == "raise":
        raise_faults(
            faults,
            f"of {len(table)} boxes have no area, or reach out of their image",
            "Repair them, or set box_errors: 'clip' cuts off the part outside, 'drop' leaves these boxes out.",
        )
    boxes = _cut(table.boxes, table.object_sizes)
    is_cut = (boxes != table.boxes).any(axis=1)
    areas = np.where(is_cut, np.minimum(table.areas, box_areas(boxes)), table.areas)  # NaN stays NaN
    is_kept = ~is_wrong if box_errors == "drop" else _has_area(boxes)
    if faults:
        num_dropped = int((~is_kept).sum())
        logger.warning(
            "%d boxes have no area, or reach out of their image: %d were cut off at its border, %d left out:%s",
            len(faults),
            len(faults) - num_dropped,
            num_dropped,
            in_lines(faults, MAX_NAMED),
        )
    return replace(table, boxes=boxes, areas=areas).select(is_kept)


def _check_plausible(table: ObjectTable, num_wrong: int) -> None:
    num_tiny = int(((table.boxes[:, 2:] - table.boxes[:, :2]) <= 1).all(axis=1).sum())
    if len(table) >= MIN_BOXES and 2 * max(num_wrong, num_tiny) > len(table):
        examples = [table.box_fault(place) for place in range(MAX_NAMED)]
        raise ValueError(
            f"Of {len(table)} boxes {num_wrong} have no area or reach out of their image, and {num_tiny} are no "
            "larger than a pixel: so they are written in another way. COCO has x, y, width, height in pixels, VOC x1, "
            "y1, x2, y2 in pixels, and YOLO center x, y, width, height as shares of the image. They were read so:"
            f"{in_lines(examples, MAX_NAMED)}"
        )


def wrong_boxes(boxes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return (N,) bool: which boxes (N, 4) reach out of images of sizes (N, 2) by a pixel, or have no area there."""
    inside = _cut(boxes, sizes)
    return (np.abs(boxes - inside) > ROUNDING).any(axis=1) | ~_has_area(inside)


def _cut(boxes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    return boxes.clip(0, np.tile(sizes, 2))


def _has_area(boxes: np.ndarray) -> np.ndarray:
    return np.all(boxes[:, 2:] > boxes[:, :2], axis=1)


def _without_repeats(table: ObjectTable) -> tuple[ObjectTable, tuple[str, ...]]:
    """Remove exact duplicates of boxes, of one image and class; also return sentences for the model card."""
    rows = np.column_stack([table.image_numbers, table.labels, table.is_crowd, table.boxes])
    kept = table.select(np.sort(np.unique(rows, axis=0, return_index=True)[1]))
    count = len(table) - len(kept)
    return kept, report(count, f"{count:,} exact duplicates of boxes, of one image and class, were removed")


def clean_keypoints(table: ObjectTable) -> tuple[ObjectTable, tuple[str, ...]]:
    """Return a table in which keypoints that are not labeled are zeros, and sentences for the model card."""
    places, visibility = table.keypoints[..., :2], table.keypoints[..., 2]
    is_missing = (places == -1).all(axis=2)
    is_labeled = (visibility > 0) & ~is_missing
    is_wrong = ~np.isin(visibility, (0, 1, 2)) | (is_labeled & ~np.isfinite(table.keypoints).all(axis=2))
    raise_faults(
        table.keypoint_faults(is_wrong),
        "keypoints are no numbers x, y and visibility 0 (not labeled), 1 (hidden) or 2",
    )
    count = int((is_missing & (visibility > 0)).sum())
    notes = report(count, f"{count:,} keypoints at -1, -1 count as not labeled")
    return replace(table, keypoints=np.where(is_labeled[..., None], table.keypoints, 0)), notes


def _checked_keypoints(table: ObjectTable, box_errors: BoxErrors) -> ObjectTable:
    """Return a table whose labeled keypoints lie within their images but for a pixel, boxes as `_checked_boxes`."""
    # With `box_errors` "raise", an error lists keypoints outside, else they count as not labeled. Objects without any
    # labeled keypoint are left out, with a warning.
    is_labeled = table.keypoints[..., 2] > 0
    labeled = table.keypoints[is_labeled, :2]
    num_tiny = int((np.abs(labeled) <= 1).all(axis=1).sum())
    if 2 * num_tiny > len(labeled):
        raise ValueError(
            f"{num_tiny} of {len(labeled)} labeled keypoints have x and y between 0 and 1, but are read as pixels. "
            "Multiply x by the width of the image and y by its height. A missing keypoint has visibility 0, an empty "
            "cell, or x and y of -1."
        )
    places, sizes = table.keypoints[..., :2], table.object_sizes[:, None]
    # A pixel's center is at its number, so an image goes from -0.5 to its length - 0.5.
    is_outside = is_labeled & ((places < -0.5 - ROUNDING) | (places > sizes - 0.5 + ROUNDING)).any(axis=2)
    if box_errors == "raise":
        raise_faults(
            table.keypoint_faults(is_outside),
            "labeled keypoints lie outside of their image",
            "Repair them, or set box_errors to 'clip' or 'drop', with which they count as not labeled.",
        )
    if is_outside.any():
        logger.warning("%d keypoints lie outside of their image and count as not labeled.", is_outside.sum())
    keypoints = np.where(is_outside[..., None], 0, table.keypoints)
    is_kept = np.any(keypoints[..., 2] > 0, axis=1)
    if num_dropped := int((~is_kept).sum()):
        logger.warning("%d of %d objects have no labeled keypoint; they are left out.", num_dropped, len(table))
    return _checked_boxes(replace(table, keypoints=keypoints).select(is_kept), box_errors)


def class_names_beside(folders: Sequence[Path], class_names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of classes that are numbers: those that are given, or of a file in one of the folders."""
    names = tuple(class_names or names_beside(folders))
    if not names:
        raise ValueError(
            "Classes are numbers, and their names are unknown. Give them as class_names, or in a file "
            f"{' or '.join(NAME_FILES)} beside the data."
        )
    return names


def without_class_names(class_names: Sequence[str] | None, source: object) -> None:
    """Raise `ValueError` if names of classes are given to data that name them."""
    if class_names:
        raise ValueError(f"{source} names its classes itself. Leave class_names={listed(class_names)} out.")


def check_numbers(numbers: np.ndarray, num_classes: int, names: Sequence[str], source: object) -> None:
    """Raise `ValueError` if class numbers (N,) of the objects with these names are not below `num_classes`."""
    wrong = np.flatnonzero((numbers < 0) | (numbers >= num_classes)).tolist()
    raise_faults(
        [f"{names[place]}: class {numbers[place]}" for place in wrong],
        f"of {len(numbers)} objects of {source} are of unknown classes; there are {num_classes}, from 0",
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
