"""Keypoint names, pairs of keypoints that a horizontal flip swaps, and a reader of tables of keypoint coordinates."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers.utils import logging

from .columns import MISSING, SourceOptions, TableRow, columns_of, find_tables, list_tables, read_rows
from .files import SPLITS, check_exist, images_at, joined, raise_faults, split_names
from .objects import WHOLE_IMAGE, ObjectTable, table_of


logger = logging.get_logger(__name__)
Pairs = tuple[tuple[int, int], ...]
OTHER_SIDE = {"left": "right", "right": "left", "l": "r", "r": "l"}
SIDE = re.compile("^(left|right)|(left|right)$")
# Matches the words of a keypoint name, including those in "LeftEye" and "REar"
WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
# OKS sigmas of the COCO person keypoints (https://cocodataset.org/#keypoints-eval)
PERSON_PARTS = ("eye", "ear", "shoulder", "elbow", "wrist", "hip", "knee", "ankle")
PART_SIGMAS = (0.025, 0.035, 0.079, 0.072, 0.062, 0.107, 0.087, 0.089)
COCO_SIGMAS = {"nose": 0.026} | {
    f"{side}_{part}": sigma
    for part, sigma in zip(PERSON_PARTS, PART_SIGMAS, strict=True)
    for side in ("left", "right")
}
# Indices of the 68 iBUG face landmarks (https://ibug.doc.ic.ac.uk/resources/facial-point-annotations/). A horizontal
# flip reverses each group; the point in the middle of a group of odd length is its own mirror image.
NUM_FACE_POINTS = 68
FACE_RUNS = (
    range(0, 17), range(17, 27), range(31, 36), (36, 37, 38, 39, 42, 43, 44, 45), (41, 40, 47, 46), range(48, 55),
    range(55, 60), range(60, 65), range(65, 68)
)  # fmt: skip


@dataclass(frozen=True)
class KeypointNames:
    """The names of K keypoints, and pairs of keypoint indices that are connected by a line in visualizations."""

    names: tuple[str, ...]
    skeleton: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if twice := sorted({name for name in self.names if self.names.count(name) > 1}):
            raise ValueError(f"Several keypoints are named {', '.join(map(repr, twice))}. Rename them.")
        if wrong := [pair for pair in self.skeleton if not all(0 <= end < len(self.names) for end in pair)]:
            start, end = wrong[0]
            raise ValueError(
                f"The skeleton connects the keypoints {start + 1} and {end + 1}, but keypoint numbers are 1 to "
                f"{len(self.names)}. Correct the skeleton."
            )


def oks_sigmas_of(names: Sequence[str]) -> tuple[float, ...] | None:
    """Return the OKS sigmas of COCO if the names are its 17 person keypoints in any order, otherwise `None`."""
    if sorted(names) != sorted(COCO_SIGMAS):
        return None
    return tuple(COCO_SIGMAS[name] for name in names)


def flip_pairs_of(names: Sequence[str], given: Sequence[str | Sequence[str]] | None = None) -> Pairs:
    """Return the sorted pairs of keypoint indices that a horizontal flip swaps.

    Args:
        names: Names of the keypoints. By default, pairs are found by names such as "left_eye" and "right_eye",
            "Left Eye", "leftear", "L_ear", or "eyeR". The 68 iBUG face landmarks have predefined pairs.
        given: Pairs of names or indices, such as "left_eye,right_eye" or "1,2"; an empty list for no pairs.
    """
    if given is not None:
        return _given_pairs(names, given)
    places = {_words(name): number for number, name in enumerate(names)}
    mirrored = {number: places.get(_mirrored(name)) for number, name in enumerate(names)}
    pairs = tuple((number, other) for number, other in mirrored.items() if other is not None and number < other)
    numbered = [pair for pair in pairs if names[pair[0]][-1].isdecimal()]
    if len(names) == NUM_FACE_POINTS and numbered == list(pairs):
        logger.warning(
            "The 68 keypoints are assumed to be iBUG face landmarks when flipping images. If this is wrong, set "
            "flip_pairs."
        )
        runs = [tuple(run) for run in FACE_RUNS]
        opposite = {(*sorted(pair),) for run in runs for pair in zip(run, reversed(run), strict=True)}
        return tuple(sorted((start, end) for start, end in opposite if start < end))
    alone = [
        name for number, name in enumerate(names) if _mirrored(name) and not any(number in pair for pair in pairs)
    ]
    if alone:
        logger.warning(
            "No keypoint is the left or right counterpart of %s. Set flip_pairs, or disable flips.", joined(alone)
        )
    if numbered:
        examples = joined([f"{names[start]},{names[end]}" for start, end in numbered])
        logger.warning(
            "A horizontal flip swaps keypoints of equal numbers: %s. If this is wrong, set flip_pairs.", examples
        )
    if not pairs:
        logger.warning(
            "No keypoint name contains left or right, so horizontal flips swap no keypoints. If this is wrong, set "
            "flip_pairs."
        )
    return pairs


def _words(name: str) -> tuple[str, ...]:
    return tuple(word.lower() for word in WORDS.findall(name))


def _mirrored(name: str) -> tuple[str, ...]:
    """Return the words of a keypoint name with left and right swapped; empty if the name contains neither."""
    words = _words(name)
    swapped = tuple(OTHER_SIDE.get(word, word) for word in words)
    if swapped == words:
        # The side may be part of a word, as in "leftear".
        swapped = tuple(SIDE.sub(lambda side: OTHER_SIDE[side[0]], word) for word in words)
    return swapped if swapped != words else ()


def _given_pairs(names: Sequence[str], given: Sequence[str | Sequence[str]]) -> Pairs:
    numbers = {name: number for number, name in enumerate(names)}
    numbers |= {str(number): number for number in range(len(names)) if str(number) not in numbers}
    pairs = []
    for pair in given:
        ends = [numbers.get(word) for word in (split_names(pair) if isinstance(pair, str) else pair)]
        if len(ends) != 2 or None in ends or ends[0] == ends[1]:
            text = pair if isinstance(pair, str) else ",".join(pair)
            raise ValueError(
                f"flip_pairs contains {text!r}, which is not a pair of keypoints such as 'left_eye,right_eye' or "
                f"'1,2'. The keypoints are {joined(names)}."
            )
        pairs.append(tuple(sorted(number for number in ends if number is not None)))
    paired = [number for pair in pairs for number in pair]
    if twice := sorted({names[number] for number in paired if paired.count(number) > 1}):
        raise ValueError(f"flip_pairs contains {joined(twice)} more than once. Put each keypoint into one pair only.")
    return tuple(sorted((first, second) for first, second in pairs))


# Matches column names such as "nose_x", "nose.y" and "nose v", or "x1", "y_1" and "v1"
NAME_FIRST = re.compile(r"(.+)[ _.-]([xyv])", re.IGNORECASE)
NAME_LAST = re.compile(r"([xyv])[ _.-]?(\d+)", re.IGNORECASE)
CORNERS = ("xmin", "ymin", "xmax", "ymax")  # underscores in column names are ignored, as in "x_min"
BOX = "bbox"
KeypointColumns = dict[str, dict[str, str]]  # maps a keypoint to its columns of "x", "y" and optionally "v"


def find_landmarks(path: Path) -> dict[str, Path]:
    """Find tables by split as in `find_tables`. If there are none, use the only table in a folder as "train"."""
    if tables := find_tables(path):
        return tables
    loose = list_tables(path) if path.is_dir() else []
    return {"train": loose[0]} if len(loose) == 1 else {}


def load_landmarks(tables: Mapping[str, Path], options: SourceOptions) -> tuple[list[ObjectTable], KeypointNames]:
    """Read tables with one row per object, which has an image path (see `read_rows`), keypoints, and a box.

    Keypoints are in the columns `nose_x`, `nose_y` and optionally `nose_v` (visibility), ..., or `x1`, `y1`, ... A
    keypoint is unlabeled if its cells are empty or its visibility is 0. Boxes are in `x_min`, `y_min`, `x_max`,
    `y_max`, or in `bbox` (x, y, width, height). Without a box, the whole image is used.
    """
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
            raise ValueError(f"{first} and {table} have different keypoints. Use the same columns in both.")
    check_exist([row.image for of_split in rows.values() for row, _ in of_split], MISSING, "images")
    return [_as_table(rows[split], split) for split in SPLITS if split in rows], KeypointNames(tuple(columns[first]))


def _keypoint_columns(names: Sequence[str], table: Path) -> KeypointColumns:
    found: KeypointColumns = {}
    for column in names:
        if match := NAME_FIRST.fullmatch(column.strip()):
            found.setdefault(match[1], {})[match[2].lower()] = column
        elif match := NAME_LAST.fullmatch(column.strip()):
            found.setdefault(match[2], {})[match[1].lower()] = column
    if not found:
        raise ValueError(
            f"{table} has no keypoint columns, only {joined(names)}. Name these columns nose_x, nose_y, ..., or x1, "
            "y1, ..."
        )
    if lacking := [name for name, columns in found.items() if not {"x", "y"} <= columns.keys()]:
        raise ValueError(f"{table} has no x or no y column for the keypoints {joined(lacking)}. Add the columns.")
    return found


def _as_table(rows: Sequence[tuple[TableRow, KeypointColumns]], split: str) -> ObjectTable:
    faults: list[str] = []
    keypoints, boxes = [], []
    for row, columns in rows:
        try:
            keypoints.append([_read_keypoint(row.cells, names) for names in columns.values()])
            boxes.append(_read_box(row.cells))
        except ValueError as error:
            faults.append(f"{row.where}: {error}")
    raise_faults(faults, f"of {len(rows)} rows are malformed")
    numbers = {path: number for number, path in enumerate(dict.fromkeys(row.image for row, _ in rows))}
    return table_of(
        split,
        images_at(numbers, split),
        np.zeros((len(numbers), 2)),
        np.array([numbers[row.image] for row, _ in rows]),
        np.array([WHOLE_IMAGE if box is None else box for box in boxes]),
        [row.where for row, _ in rows],
        is_share=np.array([box is None for box in boxes]),
        keypoints=np.array(keypoints, float),
    )


def _read_keypoint(cells: Mapping[str, Any], columns: Mapping[str, str]) -> tuple[float, float, float]:
    x, y = (_read_number(cells, columns[axis]) for axis in "xy")
    if math.isnan(x) != math.isnan(y):
        raise ValueError(f"only one of {columns['x']} and {columns['y']} is empty. Fill in or clear both")
    if math.isnan(x):
        return 0.0, 0.0, 0.0
    visibility = _read_number(cells, columns["v"]) if "v" in columns else 2.0
    return x, y, 0.0 if math.isnan(visibility) else visibility


def _read_number(cells: Mapping[str, Any], column: str) -> float:
    """Return the number in a cell, or NaN if the cell is empty."""
    value = cells.get(column)
    text = "" if value is None else str(value).strip()
    try:
        return float(text) if text else math.nan
    except ValueError:
        raise ValueError(f"{column} is {text!r}, which is not a number") from None


def _read_box(cells: Mapping[str, Any]) -> list[float] | None:
    """Return the box of a row as x1, y1, x2, y2 in pixels, or `None` if it has no box."""
    names = {column.strip().lower(): column for column in cells}
    corner_columns = {name.replace("_", ""): column for name, column in names.items()}
    if set(CORNERS) <= corner_columns.keys():
        values = [_read_number(cells, corner_columns[name]) for name in CORNERS]
        return None if all(map(math.isnan, values)) else values
    if BOX not in names or not (text := str(cells[names[BOX]] or "").strip()):
        return None
    try:
        x, y, width, height = map(float, re.split(r"[\s,;]+", text.strip("[] ")))
    except ValueError as error:
        raise ValueError(f"{names[BOX]} is {text!r}, which is not x, y, width and height") from error
    return [x, y, x + width, y + height]
