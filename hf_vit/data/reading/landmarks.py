"""Tables of keypoint coordinates, with one row per object."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .columns import MISSING, TableRow, columns_of
from .files import check_exist, images_at, joined, raise_faults
from .keypoints import KeypointNames
from .objects import WHOLE_IMAGE, ObjectData, ObjectTable, table_of
from .splits import order_splits


# Matches column names such as "nose_x", "nose.y" and "nose v", or "x1", "y_1" and "v1"
NAME_FIRST = re.compile(r"(.+)[ _.-]([xyv])", re.IGNORECASE)
NAME_LAST = re.compile(r"([xyv])[ _.-]?(\d+)", re.IGNORECASE)
CORNERS = ("xmin", "ymin", "xmax", "ymax")  # underscores in column names are ignored, as in "x_min"
BOX = "bbox"
KeypointColumns = dict[str, dict[str, str]]  # maps a keypoint to its columns of "x", "y" and optionally "v"


def load_landmarks(tables: Sequence[Sequence[TableRow]]) -> ObjectData:
    """Read tables with one row per object, which has an image path (see `read_rows`), keypoints, and a box.

    Keypoints are in the columns `nose_x`, `nose_y` and optionally `nose_v` (visibility), ..., or `x1`, `y1`, ... A
    keypoint is unlabeled if its cells are empty or its visibility is 0. Boxes are in `x_min`, `y_min`, `x_max`,
    `y_max`, or in `bbox` (x, y, width, height). Without a box, the whole image is used.
    """
    rows = defaultdict[str, list[tuple[TableRow, KeypointColumns]]](list)
    columns: dict[Path, KeypointColumns] = {}
    for found in tables:
        table = found[0].table
        columns[table] = _keypoint_columns(columns_of(found), table)
        for row in found:
            rows[row.split].append((row, columns[table]))
    first = next(iter(columns))
    for table, other in columns.items():
        if list(other) != list(columns[first]):
            raise ValueError(f"{first} and {table} have different keypoints. Use the same columns in both.")
    check_exist([row.image for own in rows.values() for row, _ in own], MISSING, "images")
    of_splits = [_as_table(own, split) for split, own in order_splits(rows).items()]
    return ObjectData(of_splits, first, keypoints=KeypointNames(tuple(columns[first])))


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
