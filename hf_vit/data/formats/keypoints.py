"""Names of keypoints, the pairs of them that a mirror image swaps, and tables with a column for each coordinate."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers.utils import logging

from .columns import MISSING, SourceOptions, TableRow, columns_of, find_tables, list_tables, read_rows
from .files import SPLITS, check_exist, images_at, listed, raise_faults, split_names
from .objects import WHOLE_IMAGE, ObjectTable, table_of


logger = logging.get_logger(__name__)
Pairs = tuple[tuple[int, int], ...]
OTHER_SIDE = {"left": "right", "right": "left", "l": "r", "r": "l"}
SIDE = re.compile("^(left|right)|(left|right)$")
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


def oks_sigmas_of(names: Sequence[str]) -> tuple[float, ...] | None:
    """Return COCO's sigmas if the names are those of its 17 keypoints, in any order."""
    if sorted(names) != sorted(COCO_SIGMAS):
        return None
    return tuple(COCO_SIGMAS[name] for name in names)


def flip_pairs_of(names: Sequence[str], given: Sequence[str | Sequence[str]] | None = None) -> Pairs:
    """Find the pairs of keypoints that a mirror image swaps, numbers from 0, ascending."""
    # Pairs are given by names or numbers from 0, as "left_eye,right_eye" or "1,2", an empty list for none. Else names
    # say it: "left_eye" and "right_eye", "Left Eye", "leftear", "L_ear", "eyeR", ... The 68 points of iBUG on a face
    # are known, as their numbers on the one side run against those on the other.
    if given is not None:
        return _given_pairs(names, given)
    places = {_words(name): number for number, name in enumerate(names)}
    mirrored = {number: places.get(_mirrored(name)) for number, name in enumerate(names)}
    pairs = tuple((number, other) for number, other in mirrored.items() if other is not None and number < other)
    numbered = [pair for pair in pairs if names[pair[0]][-1].isdecimal()]
    if len(names) == NUM_FACE_POINTS and numbered == list(pairs):
        logger.warning(
            "68 keypoints are taken for those of iBUG on a face, mirrored accordingly. Else give flip_pairs."
        )
        runs = [tuple(run) for run in FACE_RUNS]
        opposite = {(*sorted(pair),) for run in runs for pair in zip(run, reversed(run), strict=True)}
        return tuple(sorted((start, end) for start, end in opposite if start < end))
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


def _words(name: str) -> tuple[str, ...]:
    return tuple(word.lower() for word in WORDS.findall(name))


def _mirrored(name: str) -> tuple[str, ...]:
    """Return the words of what is on the other side; none if the name says no side."""
    words = _words(name)
    swapped = tuple(OTHER_SIDE.get(word, word) for word in words)
    if swapped == words:
        swapped = tuple(SIDE.sub(lambda side: OTHER_SIDE[side[0]], word) for word in words)  # as in "leftear"
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
                f"flip_pairs has {text!r}, which is no pair as 'left_eye,right_eye' or '1,2' of the keypoints "
                f"{listed(names)}."
            )
        pairs.append(tuple(sorted(number for number in ends if number is not None)))
    paired = [number for pair in pairs for number in pair]
    if twice := sorted({names[number] for number in paired if paired.count(number) > 1}):
        raise ValueError(f"flip_pairs names {listed(twice)} more than once. A keypoint has one mirror image.")
    return tuple(sorted((first, second) for first, second in pairs))


# "nose_x", "nose.y" and "nose v"; or "x1", "y_1" and "v1"
NAME_FIRST = re.compile(r"(.+)[ _.-]([xyv])", re.IGNORECASE)
NAME_LAST = re.compile(r"([xyv])[ _.-]?(\d+)", re.IGNORECASE)
CORNERS = ("xmin", "ymin", "xmax", "ymax")  # also written as "x_min", ...
BOX = "bbox"
KeypointColumns = dict[str, dict[str, str]]  # those of x, y and maybe v, by keypoint


def find_landmarks(path: Path) -> dict[str, Path]:
    """Find tables as `find_tables` does, or else the only one of a folder."""
    if tables := find_tables(path):
        return tables
    loose = list_tables(path) if path.is_dir() else []
    return {"train": loose[0]} if len(loose) == 1 else {}


def load_landmarks(tables: Mapping[str, Path], options: SourceOptions) -> tuple[list[ObjectTable], KeypointNames]:
    """Read tables with a row for each object: the path of its image, see `read_rows`, and keypoints."""
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
            f"{table} has no keypoints, only the columns {listed(names)}. Call them nose_x, nose_y, ..., or x1, y1, "
            "..."
        )
    if lacking := [name for name, columns in found.items() if not {"x", "y"} <= columns.keys()]:
        raise ValueError(f"{table} has not both x and y of the keypoints {listed(lacking)}. Add the columns.")
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
        raise ValueError(f"only one of {columns['x']} and {columns['y']} is empty")
    if math.isnan(x):
        return 0.0, 0.0, 0.0
    visibility = _read_number(cells, columns["v"]) if "v" in columns else 2.0
    return x, y, 0.0 if math.isnan(visibility) else visibility


def _read_number(cells: Mapping[str, Any], column: str) -> float:
    """Return the number in a cell, NaN if it is empty."""
    value = cells.get(column)
    text = "" if value is None else str(value).strip()
    try:
        return float(text) if text else math.nan
    except ValueError:
        raise ValueError(f"{column} is {text!r}, which is no number") from None


def _read_box(cells: Mapping[str, Any]) -> list[float] | None:
    """Return x1, y1, x2, y2 in pixels, or `None` if there is no box."""
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
