"""Keypoints in tables: a column for each coordinate. Shapes: N objects, K keypoints."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..messages import MAX_NAMED, in_lines, listed
from .columns import choose_column
from .files import image_sizes, images_at
from .objects import KeypointNames, KeypointTable, corners, table_of, whole_images
from .splits import SPLITS
from .tables import check_exist, find_tables, list_tables, read_table, split_of


Row = Mapping[str, Any]
Place = tuple[Path, int]
# "nose_x", "nose.y" and "nose v"; or "x1", "y_1" and "v1"
NAME_FIRST = re.compile(r"(.+)[ _.-]([xyv])", re.IGNORECASE)
NAME_LAST = re.compile(r"([xyv])[ _.-]?(\d+)", re.IGNORECASE)
CORNERS = (("x_min", "y_min", "x_max", "y_max"), ("xmin", "ymin", "xmax", "ymax"))
BOX = "bbox"


def find_landmarks(path: Path) -> dict[str, Path]:
    """Finds tables as `find_tables` does, or else the only one of a folder."""
    if tables := find_tables(path):
        return tables
    loose = list_tables(path) if path.is_dir() else []
    return {"train": loose[0]} if len(loose) == 1 else {}


def load_landmarks(
    tables: Mapping[str, Path], image_column: str | None
) -> tuple[dict[str, KeypointTable], KeypointNames]:
    """Reads tables with a row for each object: the path of its image, relative to the table's folder, and keypoints.

    Columns are `nose_x`, `nose_y` and maybe `nose_v`, ..., or `x1`, `y1`, ... An empty cell, or visibility 0, says
    that a keypoint is not labeled. The box is in `x_min`, `y_min`, `x_max`, `y_max`, or in `bbox` (x, y, width,
    height), else it is the image. A column `split` overrides the split that a table's name says.

    Args:
        tables: Tables by split.
        image_column: The column of paths, where its name is not a usual one.

    Returns:
        Objects with keypoints by split, and the names of these.

    Raises:
        OSError: if an image cannot be opened.
        ValueError: if a table is malformed, a column is missing, an image does not exist, or tables differ in their
            keypoints.
    """
    rows: dict[str, list[tuple[Place, str, Row]]] = {}
    columns: dict[Path, dict[str, dict[str, str]]] = {}
    for table_split, table in tables.items():
        found = read_table(table)
        names = list(dict.fromkeys(column for row in found for column in row))
        columns[table] = _keypoint_columns(names, table)
        image = choose_column("image_column_name", image_column, names, str(table))
        for number, row in enumerate(found, start=1):
            path = str(table.parent.absolute() / str(row.get(image) or ""))  # outlives the working directory
            split = split_of(row, table_split, f"{table}, row {number},")
            rows.setdefault(split, []).append(((table, number), path, row))
    first = next(iter(columns))
    for table, other in columns.items():
        if list(other) != list(columns[first]):
            raise ValueError(f"{first} and {table} differ in their keypoints. Make them the same.")
    check_exist([path for found in rows.values() for _, path, _ in found])
    return {split: _table(rows[split], split, columns) for split in SPLITS if split in rows}, KeypointNames(
        tuple(columns[first])
    )


def _keypoint_columns(names: Sequence[str], table: Path) -> dict[str, dict[str, str]]:
    """Returns the columns of x, y and maybe v, by the names of keypoints."""
    found: dict[str, dict[str, str]] = {}
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


def _table(
    rows: list[tuple[Place, str, Row]], split: str, columns: Mapping[Path, dict[str, dict[str, str]]]
) -> KeypointTable:
    faults: list[str] = []
    keypoints, boxes = [], []
    for (table, number), _, row in rows:
        try:
            keypoints.append([_read_keypoint(row, names) for names in columns[table].values()])
            boxes.append(_read_box(row))
        except ValueError as error:
            faults.append(f"{table}, row {number}: {error}")
    if faults:
        raise ValueError(f"{len(faults)} of {len(rows)} rows are malformed:{in_lines(faults, MAX_NAMED)}")
    paths = list(dict.fromkeys(path for _, path, _ in rows))
    images, numbers = images_at(paths, split), {path: number for number, path in enumerate(paths)}
    sizes, image_numbers = image_sizes(images), np.array([numbers[path] for _, path, _ in rows])
    whole = whole_images(sizes[image_numbers])
    given = np.array([whole[place] if box is None else box for place, box in enumerate(boxes)])
    describe = partial(_describe, [place for place, _, _ in rows])
    return KeypointTable.of(table_of(images, sizes, image_numbers, given, describe), np.array(keypoints, float))


def _describe(places: Sequence[Place], place: int) -> str:
    table, number = places[place]
    return f"{table}, row {number}"


def _read_keypoint(row: Row, columns: Mapping[str, str]) -> tuple[float, float, float]:
    x, y = (_read_number(row, columns[axis]) for axis in "xy")
    if math.isnan(x) != math.isnan(y):
        raise ValueError(f"only one of {columns['x']} and {columns['y']} is empty")
    if math.isnan(x):
        return 0.0, 0.0, 0.0
    visibility = _read_number(row, columns["v"]) if "v" in columns else 2.0
    return x, y, 0.0 if math.isnan(visibility) else visibility


def _read_number(row: Row, column: str) -> float:
    """Returns the number in a cell, NaN if it is empty."""
    value = row.get(column)
    text = "" if value is None else str(value).strip()
    try:
        return float(text) if text else math.nan
    except ValueError:
        raise ValueError(f"{column} is {text!r}, which is no number") from None


def _read_box(row: Row) -> list[float] | None:
    """Returns x1, y1, x2, y2 in pixels, or `None` if there is no box."""
    names = {column.strip().lower(): column for column in row}
    for corner_names in CORNERS:
        if set(corner_names) <= names.keys():
            values = [_read_number(row, names[name]) for name in corner_names]
            return None if all(map(math.isnan, values)) else values
    if BOX not in names or not (text := str(row[names[BOX]] or "").strip()):
        return None
    try:
        values = [float(value) for value in (json.loads(text) if text.startswith("[") else re.split(r"[\s,;]+", text))]
    except (TypeError, ValueError):
        values = []
    if len(values) != 4:
        raise ValueError(f"{names[BOX]} is {text!r}, which is not x, y, width and height")
    return list(corners(np.array([values]), "coco", np.ones((1, 2)))[0])
