"""Keypoints of objects: their names, the same tables from every source, and readers of a column for each coordinate.

Shapes: N objects, K keypoints.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset
from transformers.utils import logging

from .columns import SourceOptions
from .files import MAX_NAMED, SPLITS, images_at, in_lines, listed, split_names
from .objects import (
    ROUNDING,
    WHOLE_IMAGE,
    BoxErrors,
    ObjectTable,
    beside,
    checked_boxes,
    corners,
    known_areas,
    list_of_four,
    object_sizes,
    table_of,
    upright,
)
from .orientation import AnnotationOrientation, turn_points
from .tables import TableRow, check_exist, columns_of, find_tables, list_tables, read_rows


logger = logging.get_logger(__name__)
Pairs = tuple[tuple[int, int], ...]
OTHER_SIDE = {"left": "right", "right": "left", "l": "r", "r": "l"}
WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")  # also of "LeftEye" and "REar"
# Of the keypoints of COCO's persons (https://cocodataset.org/#keypoints-eval)
PERSON_PARTS = ("eye", "ear", "shoulder", "elbow", "wrist", "hip", "knee", "ankle")
PART_SIGMAS = (0.025, 0.035, 0.079, 0.072, 0.062, 0.107, 0.087, 0.089)
COCO_SIGMAS = {"nose": 0.026} | {
    f"{side}_{part}": sigma
    for part, sigma in zip(PERSON_PARTS, PART_SIGMAS, strict=True)
    for side in ("left", "right")
}
# The 68 points of a face as iBUG numbers them, from 0 (https://ibug.doc.ic.ac.uk/resources/facial-point-annotations/):
# runs of points whose mirror images run the other way. Those that are their own are in the middle.
NUM_FACE_POINTS = 68
FACE_RUNS = (
    range(0, 17), range(17, 27), range(31, 36), (36, 37, 38, 39, 42, 43, 44, 45), (41, 40, 47, 46), range(48, 55),
    range(55, 60), range(60, 65), range(65, 68)
)  # fmt: skip
# "nose_x", "nose.y" and "nose v"; or "x1", "y_1" and "v1"
NAME_FIRST = re.compile(r"(.+)[ _.-]([xyv])", re.IGNORECASE)
NAME_LAST = re.compile(r"([xyv])[ _.-]?(\d+)", re.IGNORECASE)
CORNERS = (("x_min", "y_min", "x_max", "y_max"), ("xmin", "ymin", "xmax", "ymax"))
BOX = "bbox"
KeypointColumns = dict[str, dict[str, str]]  # those of x, y and maybe v, by keypoint


@dataclass(frozen=True)
class KeypointNames:
    """The names of K keypoints, and pairs of numbers from 0 that a line joins in pictures."""

    names: tuple[str, ...]
    skeleton: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if twice := sorted({name for name in self.names if self.names.count(name) > 1}):
            raise ValueError(f"Several keypoints are called {', '.join(map(repr, twice))}. Rename them.")
        if wrong := [pair for pair in self.skeleton if not all(0 <= end < len(self.names) for end in pair)]:
            start, end = wrong[0]
            raise ValueError(
                f"The skeleton joins the keypoints {start + 1} and {end + 1}, but they go from 1 to {len(self.names)}."
            )


@dataclass(frozen=True)
class KeypointTable:
    """The images of a split, and its objects with keypoints one after the other."""

    objects: ObjectTable  # their images, boxes and areas
    # (N, K, 3) float64, x, y in pixels and visibility: 0 (not labeled; x and y are 0), 1 (hidden) or 2
    keypoints: np.ndarray
    num_missing: int = 0  # of those at -1, -1, which says that they are not labeled

    def __len__(self) -> int:
        return len(self.keypoints)

    @classmethod
    def of(cls, objects: ObjectTable, keypoints: np.ndarray) -> "KeypointTable":
        """Returns a table from keypoints (N, K, 3) in the order that objects had before they were sorted."""
        keypoints = keypoints[objects.ids]
        visibility = keypoints[..., 2]
        is_missing = (keypoints[..., :2] == -1).all(axis=2)
        is_labeled = (visibility > 0) & ~is_missing
        wrong = ~np.isin(visibility, (0, 1, 2)) | (is_labeled & ~np.isfinite(keypoints).all(axis=2))
        if faults := _faults(objects, keypoints, wrong):
            raise ValueError(
                f"{len(faults)} keypoints are no numbers x, y and visibility 0 (not labeled), 1 (hidden) or 2:"
                f"{in_lines(faults, MAX_NAMED)}"
            )
        num_missing = int((is_missing & (visibility > 0)).sum())
        return cls(objects, np.where(is_labeled[..., None], keypoints, 0), num_missing)

    def upright(self, choice: AnnotationOrientation, split: str) -> "KeypointTable":
        """Returns a table in pixels of upright images, see `upright`."""
        objects, turns, sizes = upright(self.objects, choice, split)
        keypoints = self.keypoints.copy()
        keypoints[..., :2] = turn_points(keypoints[..., :2], turns, sizes, last=1)
        return KeypointTable(objects, np.where(keypoints[..., 2:] > 0, keypoints, 0))


def _faults(objects: ObjectTable, keypoints: np.ndarray, wrong: np.ndarray) -> list[str]:
    return [
        f"keypoint {number + 1} of {objects.name_of(place)}: {keypoints[place, number].tolist()}"
        for place, number in np.argwhere(wrong).tolist()
    ]


def checked_keypoints(tables: Mapping[str, KeypointTable], box_errors: BoxErrors) -> dict[str, KeypointTable]:
    """Returns tables whose labeled keypoints lie within their images but for a pixel, boxes as `checked_boxes`."""
    # With `box_errors` "raise", an error lists keypoints outside, else they count as not labeled. Objects without any
    # labeled keypoint are left out, with a warning.
    places = np.concatenate([table.keypoints[table.keypoints[..., 2] > 0, :2] for table in tables.values()])
    num_tiny = int((np.abs(places) <= 1).all(axis=1).sum())
    if 2 * num_tiny > len(places):
        raise ValueError(
            f"{num_tiny} of {len(places)} labeled keypoints have x and y between 0 and 1, but are read as pixels. "
            "Multiply x by the width of the image and y by its height. A missing keypoint has visibility 0, an empty "
            "cell, or x and y of -1."
        )
    outside = {split: _outside(table) for split, table in tables.items()}
    faults = [
        fault for split, table in tables.items() for fault in _faults(table.objects, table.keypoints, outside[split])
    ]
    if faults and box_errors == "raise":
        raise ValueError(
            f"{len(faults)} labeled keypoints lie outside of their image:{in_lines(faults, MAX_NAMED)}\nRepair them, "
            "or set box_errors to 'clip' or 'drop', with which they count as not labeled."
        )
    if faults:
        logger.warning("%d keypoints lie outside of their image and count as not labeled.", len(faults))
    inside = {split: np.where(outside[split][..., None], 0, table.keypoints) for split, table in tables.items()}
    is_labeled = {split: np.any(keypoints[..., 2] > 0, axis=1) for split, keypoints in inside.items()}
    if num_dropped := sum(int((~mask).sum()) for mask in is_labeled.values()):
        total = sum(map(len, is_labeled.values()))
        logger.warning("%d of %d objects have no labeled keypoint; they are left out.", num_dropped, total)
    objects = {split: table.objects.select(is_labeled[split]) for split, table in tables.items()}
    checked = checked_boxes(objects, box_errors)
    return {
        split: KeypointTable(
            checked[split], inside[split][is_labeled[split]][np.isin(objects[split].ids, checked[split].ids)]
        )
        for split in tables
    }


def _outside(table: KeypointTable) -> np.ndarray:
    places, sizes = table.keypoints[..., :2], object_sizes(table.objects)[:, None]
    # A pixel's center is at its number, so an image goes from -0.5 to its length - 0.5.
    is_outside = ((places < -0.5 - ROUNDING) | (places > sizes - 0.5 + ROUNDING)).any(axis=2)
    return is_outside & (table.keypoints[..., 2] > 0)


def keypoint_rows(table: KeypointTable, images: Dataset) -> Dataset:
    """Returns one row an object: its image, `keypoints`, `box`, `area`, `image_id`, `width` and `height`."""
    objects, num_keypoints = table.objects, table.keypoints.shape[1]
    triples = pa.FixedSizeListArray.from_arrays(pa.array(table.keypoints.ravel(), pa.float32()), 3)
    offsets = np.arange(0, (len(objects) + 1) * num_keypoints, num_keypoints, dtype=np.int32)
    sizes = object_sizes(objects)
    return beside(
        _repeated(images, objects.image_numbers),
        {
            "keypoints": pa.ListArray.from_arrays(offsets, triples),
            "box": list_of_four(objects.boxes),
            "area": pa.array(known_areas(objects), pa.float32()),
            "image_id": objects.image_numbers,
            "width": sizes[:, 0],
            "height": sizes[:, 1],
        },
    )


def _repeated(images: Dataset, numbers: np.ndarray) -> Dataset:
    """Returns the rows of these numbers, of which some may be there several times."""
    encoded = images.select_columns("image").with_format("arrow")[:].flatten()["image.bytes"]
    if encoded.null_count < len(encoded):
        return images.select(numbers)  # what lies on disk stays there
    return Dataset(images.with_format("arrow")[:].take(numbers), info=images.info)


def oks_sigmas_of(names: Sequence[str]) -> tuple[float, ...] | None:
    """Returns COCO's sigmas if the names are those of its 17 keypoints, in any order."""
    if sorted(names) != sorted(COCO_SIGMAS):
        return None
    return tuple(COCO_SIGMAS[name] for name in names)


def flip_pairs_of(names: Sequence[str], given: Sequence[str] | None = None) -> Pairs:
    """Finds the pairs of keypoints that a mirror image swaps, numbers from 0, ascending."""
    # Pairs are given by names or numbers from 0, as "left_eye,right_eye" or "1,2", an empty list for none. Else names
    # say it: "left_eye" and "right_eye", "Left Eye", "leftear", "L_ear", "eyeR", ... The 68 points of iBUG on a face
    # are known, as their numbers on the one side run against those on the other.
    if given is not None:
        return _given_pairs(names, given)
    pairs = _pairs_by_name(names)
    numbered = [pair for pair in pairs if names[pair[0]][-1].isdecimal()]
    if len(names) == NUM_FACE_POINTS and numbered == list(pairs):
        logger.warning(
            "68 keypoints are taken for those of iBUG on a face, mirrored accordingly. Else give flip_pairs."
        )
        runs = [tuple(run) for run in FACE_RUNS]
        mirrored = {(*sorted(pair),) for run in runs for pair in zip(run, reversed(run), strict=True)}
        return tuple(sorted((start, end) for start, end in mirrored if start < end))
    alone = [
        name for number, name in enumerate(names) if _mirrored(name) and not any(number in pair for pair in pairs)
    ]
    if alone:
        logger.warning("No keypoint is the other side of %s. Give flip_pairs, or train without flips.", listed(alone))
    if numbered:
        examples = listed([f"{names[start]},{names[end]}" for start, end in numbered])
        logger.warning("Taken for mirror images by their numbers: %s. Give flip_pairs if they are not.", examples)
    if not pairs:
        logger.warning(
            "No keypoints are called left and right: a mirror image swaps none. Give flip_pairs if it does."
        )
    return pairs


def _pairs_by_name(names: Sequence[str]) -> Pairs:
    places = {_words(name): number for number, name in enumerate(names)}
    mirrored = {number: places.get(_mirrored(name)) for number, name in enumerate(names)}
    return tuple((number, other) for number, other in mirrored.items() if other is not None and number < other)


def _words(name: str) -> tuple[str, ...]:
    return tuple(word.lower() for word in WORDS.findall(name))


def _mirrored(name: str) -> tuple[str, ...]:
    """Returns the words of what is on the other side; none if the name says no side."""
    words = _words(name)
    swapped = tuple(OTHER_SIDE.get(word, word) for word in words)
    if swapped == words:
        swapped = tuple(_with_other_side(word) for word in words)
    return swapped if swapped != words else ()


def _with_other_side(word: str) -> str:
    """Swaps the side that a word begins or ends with, as "leftear"."""
    for side, other in (("left", "right"), ("right", "left")):
        if word.startswith(side):
            return other + word.removeprefix(side)
        if word.endswith(side):
            return word.removesuffix(side) + other
    return word


def _given_pairs(names: Sequence[str], given: Sequence[str]) -> Pairs:
    numbers = {name: number for number, name in enumerate(names)}
    numbers |= {str(number): number for number in range(len(names)) if str(number) not in numbers}
    pairs = []
    for text in given:
        ends = [numbers.get(word) for word in split_names(text)]
        if len(ends) != 2 or None in ends or ends[0] == ends[1]:
            raise ValueError(
                f"flip_pairs has {text!r}, which is no pair as 'left_eye,right_eye' or '1,2' of the keypoints "
                f"{listed(names)}."
            )
        pairs.append(tuple(sorted(number for number in ends if number is not None)))
    paired = [number for pair in pairs for number in pair]
    if twice := sorted({names[number] for number in paired if paired.count(number) > 1}):
        raise ValueError(f"flip_pairs names {listed(twice)} more than once. A keypoint has one mirror image.")
    return tuple(sorted((first, second) for first, second in pairs))


def find_landmarks(path: Path) -> dict[str, Path]:
    """Finds tables as `find_tables` does, or else the only one of a folder."""
    if tables := find_tables(path):
        return tables
    loose = list_tables(path) if path.is_dir() else []
    return {"train": loose[0]} if len(loose) == 1 else {}


def load_landmarks(
    tables: Mapping[str, Path], options: SourceOptions
) -> tuple[dict[str, KeypointTable], KeypointNames]:
    """Reads tables with a row for each object: the path of its image, see `read_rows`, and keypoints."""
    # Columns are `nose_x`, `nose_y` and maybe `nose_v`, ..., or `x1`, `y1`, ... An empty cell, or visibility 0, says
    # that a keypoint is not labeled. The box is in `x_min`, `y_min`, `x_max`, `y_max`, or in `bbox` (x, y, width,
    # height), else it is the image.
    rows: dict[str, list[tuple[TableRow, KeypointColumns]]] = {}
    columns: dict[Path, KeypointColumns] = {}
    for table_split, table in tables.items():
        found = read_rows(table, table_split, options)
        columns[table] = _keypoint_columns(columns_of(found), table)
        for row in found:
            rows.setdefault(row.split, []).append((row, columns[table]))
    first = next(iter(columns))
    for table, other in columns.items():
        if list(other) != list(columns[first]):
            raise ValueError(f"{first} and {table} differ in their keypoints. Make them the same.")
    check_exist([row.image for of_split in rows.values() for row, _ in of_split])
    found_tables = {split: _as_table(rows[split], split) for split in SPLITS if split in rows}
    return found_tables, KeypointNames(tuple(columns[first]))


def _keypoint_columns(names: Sequence[str], table: Path) -> KeypointColumns:
    found: KeypointColumns = {}
    for column in names:
        if match := NAME_FIRST.fullmatch(column.strip()):
            found.setdefault(match[1], {})[match[2].lower()] = column
        elif match := NAME_LAST.fullmatch(column.strip()):
            found.setdefault(match[2], {})[match[1].lower()] = column
    if not found:
        raise ValueError(
            f"{table} has no keypoints, only the columns {listed(names)}. Call them nose_x, nose_y, ..., or x1, y1, "
            "..."
        )
    if lacking := [name for name, columns in found.items() if not {"x", "y"} <= columns.keys()]:
        raise ValueError(f"{table} has not both x and y of the keypoints {listed(lacking)}. Add the columns.")
    return found


def _as_table(rows: Sequence[tuple[TableRow, KeypointColumns]], split: str) -> KeypointTable:
    faults: list[str] = []
    keypoints, boxes = [], []
    for row, columns in rows:
        try:
            keypoints.append([_read_keypoint(row.cells, names) for names in columns.values()])
            boxes.append(_read_box(row.cells))
        except ValueError as error:
            faults.append(f"{row.where}: {error}")
    if faults:
        raise ValueError(f"{len(faults)} of {len(rows)} rows are malformed:{in_lines(faults, MAX_NAMED)}")
    paths = list(dict.fromkeys(row.image for row, _ in rows))
    images, numbers = images_at(paths, split), {path: number for number, path in enumerate(paths)}
    sizes, image_numbers = np.zeros((len(images), 2)), np.array([numbers[row.image] for row, _ in rows])
    given = np.array([WHOLE_IMAGE if box is None else box for box in boxes])
    is_whole, names = np.array([box is None for box in boxes]), [row.where for row, _ in rows]
    objects = table_of(images, sizes, image_numbers, given, names.__getitem__, is_share=is_whole)
    return KeypointTable.of(objects, np.array(keypoints, float))


def _read_keypoint(cells: Mapping[str, Any], columns: Mapping[str, str]) -> tuple[float, float, float]:
    x, y = (_read_number(cells, columns[axis]) for axis in "xy")
    if math.isnan(x) != math.isnan(y):
        raise ValueError(f"only one of {columns['x']} and {columns['y']} is empty")
    if math.isnan(x):
        return 0.0, 0.0, 0.0
    visibility = _read_number(cells, columns["v"]) if "v" in columns else 2.0
    return x, y, 0.0 if math.isnan(visibility) else visibility


def _read_number(cells: Mapping[str, Any], column: str) -> float:
    """Returns the number in a cell, NaN if it is empty."""
    value = cells.get(column)
    text = "" if value is None else str(value).strip()
    try:
        return float(text) if text else math.nan
    except ValueError:
        raise ValueError(f"{column} is {text!r}, which is no number") from None


def _read_box(cells: Mapping[str, Any]) -> list[float] | None:
    """Returns x1, y1, x2, y2 in pixels, or `None` if there is no box."""
    names = {column.strip().lower(): column for column in cells}
    for corner_names in CORNERS:
        if set(corner_names) <= names.keys():
            values = [_read_number(cells, names[name]) for name in corner_names]
            return None if all(map(math.isnan, values)) else values
    if BOX not in names or not (text := str(cells[names[BOX]] or "").strip()):
        return None
    try:
        values = [float(value) for value in (json.loads(text) if text.startswith("[") else re.split(r"[\s,;]+", text))]
    except (TypeError, ValueError):
        values = []
    if len(values) != 4:
        raise ValueError(f"{names[BOX]} is {text!r}, which is not x, y, width and height")
    return list(corners(np.array([values]), "coco", np.ones((1, 2)))[0])
