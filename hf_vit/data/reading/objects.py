"""Table of the boxes, classes and keypoints of all splits. Data in any format are converted to this table.

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

from .classes import NAME_FILES, read_class_names
from .files import (
    MAX_NAMED,
    add_file_column,
    image_headers,
    images_at,
    in_lines,
    joined,
    parse_flag,
    raise_faults,
    report,
)
from .keypoints import KeypointNames
from .orientation import AnnotationOrientation, choose_orientations, flipped_axes, orient_points, upright_sizes


logger = logging.get_logger(__name__)
BoxFormat = Literal["coco", "voc", "yolo"]
BoxErrors = Literal["raise", "clip", "drop"]
# Tolerance in pixels for annotations outside the image, because of rounding or pixel coordinates that start at 1
ROUNDING = 1.0
WHOLE_IMAGE = (0.0, 0.0, 1.0, 1.0)
MIN_BOXES = 10  # minimum number of boxes to detect a wrong box format
COLUMNS = ("names", "image_numbers", "boxes", "is_share", "labels", "is_crowd", "areas", "keypoints", "masks")


@dataclass(frozen=True)
class ObjectTable:
    """Table with one row per object, sorted by image, and the images of all splits, also those without objects.

    The function `upright` completes image sizes, and converts boxes to pixels of the upright images.

    Args:
        images: Images by split, I in all, in the column `image` (`datasets.Image`).
        sizes: (I, 2) int64, width and height of each image in pixels; 0 if not given, before `upright`.
        names: (N,) strings, names of the objects in error messages.
        image_numbers: (N,) int64, index of the image of each object, ascending.
        boxes: (N, 4) float64, x1, y1, x2, y2 in pixels; before `upright`, values as annotated.
        is_share: (N,) bool, whether a box is in fractions of the image size; False after `upright`.
        labels: (N,) int64, class numbers; class names before `with_class_numbers` if the data contain names.
        is_crowd: (N,) bool, whether a box contains several objects or is marked as difficult.
        areas: (N,) float64, areas of objects in square pixels; NaN if not given.
        keypoints: (N, K, 3) float64, x, y in pixels and visibility: 0 (not labeled), 1 (hidden) or 2 (visible).
        masks: (N,) lists of polygons [x1, y1, x2, y2, ...] in pixels, or run lengths as in COCO, or `None`.
    """

    images: Mapping[str, Dataset]
    sizes: np.ndarray
    names: np.ndarray
    image_numbers: np.ndarray
    boxes: np.ndarray
    is_share: np.ndarray
    labels: np.ndarray
    is_crowd: np.ndarray
    areas: np.ndarray
    keypoints: np.ndarray
    masks: np.ndarray

    def __len__(self) -> int:
        return len(self.boxes)

    @property
    def object_sizes(self) -> np.ndarray:
        """Width and height (N, 2) of each object's image."""
        return self.sizes[self.image_numbers]

    @property
    def known_areas(self) -> np.ndarray:
        """Area (N,) of each object, or of its box if the area of the object is not given."""
        return np.where(np.isnan(self.areas), box_areas(self.boxes), self.areas)

    def select(self, kept: np.ndarray) -> "ObjectTable":
        """Return a table of the objects selected by a mask (N,) bool or by indices, and of all images."""
        return replace(self, **{name: vars(self)[name][kept] for name in COLUMNS})

    def box_fault(self, place: int) -> str:
        """Return the name, box and image size of an object, for error messages."""
        x1, y1, x2, y2 = self.boxes[place].round(2).tolist()
        width, height = self.sizes[self.image_numbers[place]].tolist()
        return f"{self.names[place]}: x {x1} to {x2} of {width}, y {y1} to {y2} of {height}"

    def keypoint_faults(self, is_wrong: np.ndarray) -> list[str]:
        """Return the name and values of each keypoint marked in `is_wrong` (N, K) bool, for error messages."""
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
    masks: Sequence[Any] | None = None,
) -> ObjectTable:
    """Return the table of one split from objects in any order, sorted by image with a stable sort.

    By default, boxes are in pixels, all labels are 0, and there are no crowds, areas, keypoints or masks. Areas that
    are not positive are replaced by NaN (unknown). `names` are the names of the objects in error messages.
    """
    count, order = len(image_numbers), np.argsort(image_numbers, kind="stable")
    flags = [parse_flag(value, f"The mark of {names[place]} as a crowd") for place, value in enumerate(is_crowd or ())]
    areas = np.full(count, np.nan) if areas is None else np.asarray(areas, float)
    columns: dict[str, Any] = {
        "names": np.array(names, object),
        "image_numbers": np.asarray(image_numbers, np.int64),
        "boxes": np.asarray(boxes, float).reshape(-1, 4),
        "is_share": np.broadcast_to(is_share, count),
        "labels": np.zeros(count, np.int64) if labels is None else labels,
        "is_crowd": np.zeros(count, bool) if is_crowd is None else np.array(flags, bool),
        "areas": np.where(areas > 0, areas, np.nan),
        "keypoints": np.zeros((count, 0, 3)) if keypoints is None else np.asarray(keypoints, float),
        "masks": np.empty(count, object),
    }
    if masks is not None:
        columns["masks"][:] = masks
    sizes = np.asarray(sizes, np.int64).reshape(-1, 2)
    return ObjectTable({split: images}, sizes, **{name: values[order] for name, values in columns.items()})


@dataclass(frozen=True)
class AnnotatedObject:
    """An object of an image, for formats that are read image by image.

    Args:
        label: Name of the class.
        box: x1, y1, x2, y2 in pixels.
        name: Name of the object in error messages.
        is_crowd: Mark of a crowd or a difficult object.
        mask: Polygons or run lengths as in `ObjectTable`, or `None`.
    """

    label: str
    box: tuple[float, ...]
    name: str
    is_crowd: object = None
    mask: Any = None


@dataclass(frozen=True)
class AnnotatedImage:
    """An image, its width and height in pixels (0 if not given), and its objects."""

    path: str
    size: tuple[int, int]
    objects: Sequence[AnnotatedObject]


def table_of_images(split: str, images: Sequence[AnnotatedImage]) -> ObjectTable:
    """Return the table of one split."""
    objects = [entry for image in images for entry in image.objects]
    return table_of(
        split,
        images_at((image.path for image in images), split),
        np.array([image.size for image in images]),
        np.repeat(np.arange(len(images)), [len(image.objects) for image in images]),
        np.array([entry.box for entry in objects]),
        [entry.name for entry in objects],
        labels=np.array([entry.label for entry in objects], object),
        is_crowd=[entry.is_crowd for entry in objects],
        masks=[entry.mask for entry in objects],
    )


@dataclass(frozen=True)
class ObjectData:
    """The objects of a data source, in the form that all formats return.

    Args:
        tables: Table of each split.
        source: Path of the data in error messages.
        names: Class names in the order of class numbers; empty if the data do not list them.
        folders: Folders that may contain a file of class names.
        keypoints: Names of the keypoints, if objects have keypoints.
    """

    tables: Sequence[ObjectTable]
    source: Path
    names: tuple[str, ...] = ()
    folders: tuple[Path, ...] = ()
    keypoints: KeypointNames = KeypointNames(())

    def with_class_numbers(self, class_names: Sequence[str] | None) -> tuple[ObjectTable, tuple[str, ...]]:
        """Return a table of all splits with class numbers, and the class names.

        Args:
            class_names: Class names in order, given by the user. Without them, class names in the data are used in
                the order of `names`, or sorted; class numbers need `names` or a file of class names.
        """
        is_named = any(table.labels.dtype == object for table in self.tables)
        if class_names and self.names and not is_named:
            raise ValueError(f"{self.source} already contains class names. Remove class_names={joined(class_names)}.")
        origin = "class_names" if class_names else "the list of classes" if self.names else "train"
        found = sorted(set(self.tables[0].labels.tolist())) if is_named else read_class_names(self.folders)
        names = tuple(class_names or self.names or found)
        if not names and not is_named:
            raise ValueError(
                "The classes are numbers without names. Give their names as class_names, or in a file "
                f"{' or '.join(NAME_FILES)} next to the data."
            )
        numbers = {name: number for number, name in enumerate(names)}
        tables = []
        for table in self.tables:
            (split,) = table.images
            if is_named and (unknown := sorted(set(table.labels.tolist()) - numbers.keys())):
                raise ValueError(
                    f"The split {split!r} has classes that are not in {origin!r}: {joined(unknown)}. Use the same "
                    f"spelling ({joined(names)}), or give all classes as class_names."
                )
            labels = np.array([numbers[word] for word in table.labels], np.int64) if is_named else table.labels
            wrong = np.flatnonzero((labels < 0) | (labels >= len(names))).tolist()
            raise_faults(
                [f"{table.names[place]}: class {labels[place]}" for place in wrong],
                f"of {len(table)} objects of {split} have unknown classes; class numbers must be in [0, {len(names)})",
            )
            tables.append(replace(table, labels=labels))
        return join_tables(tables), names


def join_tables(tables: Sequence[ObjectTable]) -> ObjectTable:
    """Concatenate the tables of several splits."""
    num_images, num_objects = [len(table.sizes) for table in tables], [len(table) for table in tables]
    columns = {name: np.concatenate([vars(table)[name] for table in tables]) for name in COLUMNS}
    columns["image_numbers"] += np.repeat(np.cumsum([0, *num_images[:-1]]), num_objects)
    images = {split: found for table in tables for split, found in table.images.items()}
    return ObjectTable(images, np.concatenate([table.sizes for table in tables]), **columns)


def upright(table: ObjectTable, choice: AnnotationOrientation) -> ObjectTable:
    """Convert all coordinates to pixels of the upright images, that is, with their EXIF orientation applied."""
    found, start = [], 0
    for split, images in table.images.items():
        given = table.sizes[start : start + len(images)]
        headers = image_headers(images, is_needed=(given <= 0).any(axis=1))
        found.append(choose_orientations(headers, given, choice, split))
        start += len(images)
    turns, frames = (np.concatenate(parts) for parts in zip(*found, strict=True))
    own, sizes = turns[table.image_numbers], frames[table.image_numbers]
    boxes = np.where(table.is_share[:, None], table.boxes * np.tile(sizes, 2), table.boxes)
    places = orient_points(boxes.reshape(-1, 2, 2), own, sizes)
    # If an axis is reversed, swap its coordinates, so that x1, y1 remains the top left corner.
    boxes = np.where(flipped_axes(own)[:, None], places[:, ::-1], places).reshape(-1, 4)
    keypoints, is_labeled = table.keypoints.copy(), table.keypoints[..., 2:] > 0
    keypoints[..., :2] = np.where(is_labeled, orient_points(keypoints[..., :2], own, sizes, last=1), 0)
    is_share = np.zeros_like(table.is_share)
    return replace(table, sizes=upright_sizes(frames, turns), boxes=boxes, keypoints=keypoints, is_share=is_share)


def corners(boxes: np.ndarray, box_format: BoxFormat, sizes: np.ndarray | float = 1.0) -> np.ndarray:
    """Convert boxes (N, 4) to x1, y1, x2, y2 in pixels, given the width and height (N, 2) of their images.

    The format "coco" is x1, y1, width, height in pixels, "voc" is x1, y1, x2, y2 in pixels, and "yolo" is center x, y,
    width, height as fractions of the image size.
    """
    if box_format == "voc":
        return boxes
    places, lengths = boxes[:, :2], boxes[:, 2:]
    if box_format == "yolo":
        places, lengths = (places - lengths / 2) * sizes, lengths * sizes
    return np.concatenate([places, places + lengths], axis=1)


def box_areas(boxes: np.ndarray) -> np.ndarray:
    """Return the areas (N,) of boxes (N, 4) given as x1, y1, x2, y2."""
    return (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)


def detection_rows(table: ObjectTable, box_errors: BoxErrors, source: str) -> tuple[DatasetDict, tuple[str, ...]]:
    """Convert the output of `upright` to datasets with one row per image; also return notes for the model card.

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
    images = add_file_column(DatasetDict(table.images))
    splits = {
        split: concatenate_datasets([images[split], rows.select(numbers)], axis=1)
        for split, (numbers, _) in _parts(table, "box", source).items()
    }
    return DatasetDict(splits), notes


def keypoint_rows(table: ObjectTable, box_errors: BoxErrors, source: str) -> DatasetDict:
    """Convert the output of `upright` to datasets with one row per object.

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
    rows, images = Dataset(pa.table(columns)), add_file_column(DatasetDict(table.images))
    found = DatasetDict()
    for split, (numbers, objects) in _parts(table, "object with a labeled keypoint", source).items():
        own = images[split].select(table.image_numbers[objects.start : objects.stop] - numbers.start)
        found[split] = concatenate_datasets([own, rows.select(objects)], axis=1)
    return found


def _list_of_four(boxes: np.ndarray) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(boxes.ravel(), pa.float32()), 4)


def _parts(table: ObjectTable, what: str, source: str) -> dict[str, tuple[range, range]]:
    """Return the index ranges of the images and objects of each split, omitting splits without objects."""
    stops = np.cumsum([0, *map(len, table.images.values())]).tolist()
    ends = np.searchsorted(table.image_numbers, stops).tolist()
    parts = {
        split: (range(*images), range(*objects))
        for split, images, objects in zip(table.images, pairwise(stops), pairwise(ends), strict=True)
    }
    empty = [split for split, (_, objects) in parts.items() if not objects]
    if "train" in empty or len(empty) == len(parts):
        raise ValueError(f"{source} has no {what} in {joined(empty)}. Add annotations.")
    if empty:  # only a warning, because test sets are often published without annotations
        logger.warning("Ignored splits of %s because they have no %s: %s.", source, what, joined(empty))
    return {split: part for split, part in parts.items() if split not in empty}


def _checked_boxes(table: ObjectTable, box_errors: BoxErrors) -> ObjectTable:
    """Check that boxes lie inside their images and have a positive area.

    Boxes that exceed the image by at most one pixel are clipped. For other invalid boxes, "raise" lists them in an
    error, "clip" clips them and removes those completely outside the image, and "drop" removes all of them.
    """
    if box_errors not in get_args(BoxErrors):
        raise ValueError(f"box_errors={box_errors!r} is unknown. Use {', '.join(map(repr, get_args(BoxErrors)))}.")
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
            f"of {len(table)} boxes have no area or exceed their image",
            "Repair them, or set box_errors to 'clip' to clip them to their image, or to 'drop' to remove them.",
        )
    boxes = _cut(table.boxes, table.object_sizes)
    is_cut = (boxes != table.boxes).any(axis=1)
    areas = np.where(is_cut, np.minimum(table.areas, box_areas(boxes)), table.areas)  # unknown areas stay NaN here
    is_kept = ~is_wrong if box_errors == "drop" else _has_area(boxes)
    if faults:
        num_dropped = int((~is_kept).sum())
        logger.warning(
            "%d boxes have no area or exceed their image: %d were clipped to the image, %d were removed:%s",
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
            f"The boxes seem to have another format: of {len(table)} boxes, {num_wrong} have no area or exceed their "
            f"image, and {num_tiny} are not larger than a pixel. COCO boxes are x, y, width, height in pixels, VOC "
            "boxes are x1, y1, x2, y2 in pixels, and YOLO boxes are center x, y, width, height as fractions of the "
            f"image size. The first boxes, as they were read:{in_lines(examples, MAX_NAMED)}"
        )


def wrong_boxes(boxes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return a mask (N,) of the boxes (N, 4) that exceed their image by over a pixel or have zero area inside it."""
    inside = _cut(boxes, sizes)
    return (np.abs(boxes - inside) > ROUNDING).any(axis=1) | ~_has_area(inside)


def _cut(boxes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    return boxes.clip(0, np.tile(sizes, 2))


def _has_area(boxes: np.ndarray) -> np.ndarray:
    return np.all(boxes[:, 2:] > boxes[:, :2], axis=1)


def _without_repeats(table: ObjectTable) -> tuple[ObjectTable, tuple[str, ...]]:
    """Remove boxes with the same image, class and coordinates as another. Also return notes for the model card."""
    rows = np.column_stack([table.image_numbers, table.labels, table.is_crowd, table.boxes])
    kept = table.select(np.sort(np.unique(rows, axis=0, return_index=True)[1]))
    count = len(table) - len(kept)
    return kept, report(count, f"{count:,} exact duplicates of boxes with the same image and class were removed")


def clean_keypoints(table: ObjectTable) -> tuple[ObjectTable, tuple[str, ...]]:
    """Set unlabeled keypoints to zero and check all other keypoints; also return notes for the model card."""
    places, visibility = table.keypoints[..., :2], table.keypoints[..., 2]
    is_missing = (places == -1).all(axis=2)
    is_labeled = (visibility > 0) & ~is_missing
    is_wrong = ~np.isin(visibility, (0, 1, 2)) | (is_labeled & ~np.isfinite(table.keypoints).all(axis=2))
    raise_faults(
        table.keypoint_faults(is_wrong),
        "keypoints are not finite numbers x, y and a visibility of 0 (not labeled), 1 (hidden) or 2 (visible)",
    )
    count = int((is_missing & (visibility > 0)).sum())
    notes = report(count, f"{count:,} keypoints at -1, -1 are treated as not labeled")
    return replace(table, keypoints=np.where(is_labeled[..., None], table.keypoints, 0)), notes


def _checked_keypoints(table: ObjectTable, box_errors: BoxErrors) -> ObjectTable:
    """Check that labeled keypoints lie inside their images, with a tolerance of one pixel, and check boxes.

    If `box_errors` is "raise", keypoints outside the image are listed in an error. Otherwise, they become unlabeled.
    Objects without any labeled keypoint are removed with a warning.
    """
    is_labeled = table.keypoints[..., 2] > 0
    labeled = table.keypoints[is_labeled, :2]
    num_tiny = int((np.abs(labeled) <= 1).all(axis=1).sum())
    if 2 * num_tiny > len(labeled):
        raise ValueError(
            f"{num_tiny} of {len(labeled)} labeled keypoints have x and y between 0 and 1, but keypoints must be in "
            "pixels. Multiply x by the width of the image and y by its height. Mark missing keypoints by visibility "
            "0, an empty cell, or x = y = -1."
        )
    places, sizes = table.keypoints[..., :2], table.object_sizes[:, None]
    # Integer coordinates are pixel centers, so an image extends from (-0.5, -0.5) to (width - 0.5, height - 0.5).
    is_outside = is_labeled & ((places < -0.5 - ROUNDING) | (places > sizes - 0.5 + ROUNDING)).any(axis=2)
    if box_errors == "raise":
        raise_faults(
            table.keypoint_faults(is_outside),
            "labeled keypoints lie outside their image",
            "Repair them, or set box_errors='clip' or box_errors='drop'; both treat these keypoints as not labeled.",
        )
    if is_outside.any():
        logger.warning("%d keypoints lie outside their image and are treated as not labeled.", is_outside.sum())
    keypoints = np.where(is_outside[..., None], 0, table.keypoints)
    is_kept = np.any(keypoints[..., 2] > 0, axis=1)
    if num_dropped := int((~is_kept).sum()):
        logger.warning("Removed %d of %d objects because they have no labeled keypoint.", num_dropped, len(table))
    return _checked_boxes(replace(table, keypoints=keypoints).select(is_kept), box_errors)
