"""Keypoints in tables of paths with a column for each coordinate."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .columns import SourceOptions
from .files import SPLITS, images_at, listed, raise_faults
from .keypoints import KeypointNames
from .objects import WHOLE_IMAGE, ObjectTable, corners, table_of
from .tables import TableRow, check_exist, columns_of, find_tables, list_tables, read_rows


# "nose_x", "nose.y" and "nose v"; or "x1", "y_1" and "v1"
NAME_FIRST = re.compile(r"(.+)[ _.-]([xyv])", re.IGNORECASE)
NAME_LAST = re.compile(r"([xyv])[ _.-]?(\d+)", re.IGNORECASE)
CORNERS = (("x_min", "y_min", "x_max", "y_max"), ("xmin", "ymin", "xmax", "ymax"))
BOX = "bbox"
KeypointColumns = dict[str, dict[str, str]]  # those of x, y and maybe v, by keypoint


def find_landmarks(path: Path) -> dict[str, Path]:
    """Finds tables as `find_tables` does, or else the only one of a folder."""
    if tables := find_tables(path):
        return tables
    loose = list_tables(path) if path.is_dir() else []
    return {"train": loose[0]} if len(loose) == 1 else {}


def load_landmarks(tables: Mapping[str, Path], options: SourceOptions) -> tuple[list[ObjectTable], KeypointNames]:
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
        lambda place: rows[place][0].where,
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
    return list(corners(np.array([values]), "coco")[0])
