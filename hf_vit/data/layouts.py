"""Layouts of published datasets and of exports of annotation tools, which are rows of layouts.yaml."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import yaml


START = 4096  # number of bytes at the start of a file that are searched for the text of a layout
NUM_FILES = 3  # number of files that are searched


@dataclass(frozen=True)
class Layout:
    """A published dataset or an export of an annotation tool.

    Args:
        name: Name of the dataset, or of the tool and its export.
        globs: Patterns of paths relative to the folder of the data. Each must match a file or folder.
        text: Regular expression that occurs in the first `START` bytes of a file of the first pattern.
        advice: Way to get data that are supported, if the layout is not read.
        files: Path pattern of each column ("image", "mask", "depth"), with names in braces, see `formats/layout.py`.
        lists: Path pattern of lists of the values of `{key}`, one file per `{split}`.
        class_names: Names of the classes of masks.
        class_values: Mask value of each class, if these are not 0, 1, 2, ...; other values are unlabeled pixels.
        reduce_labels: Whether class numbers in masks start at 1, with 0 for unlabeled pixels.
        depth_scale: Units per meter of depth maps.
    """

    name: str
    globs: tuple[str, ...]
    text: str = ""
    advice: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    lists: str = ""
    class_names: tuple[str, ...] = ()
    class_values: tuple[int, ...] = ()
    reduce_labels: bool = False
    depth_scale: float | None = None


@cache
def layouts() -> tuple[Layout, ...]:
    """Return all rows of layouts.yaml."""
    rows = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    lists: list[dict[str, Any]] = [
        {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()} for row in rows
    ]
    return tuple(Layout(**row) for row in lists)


def find_layout(path: Path, column: str = "") -> Layout | None:
    """Return the first layout that fits a folder or file and has files of a column or, without a column, advice."""
    candidates = (layout for layout in layouts() if (column in layout.files if column else layout.advice))
    return next((layout for layout in candidates if _fits(layout, path)), None)


def _fits(layout: Layout, path: Path) -> bool:
    if path.is_file():
        return len(layout.globs) == 1 and path.match(layout.globs[0]) and (not layout.text or _has_text(layout, path))
    if not all(any(path.glob(glob)) for glob in layout.globs):
        return False
    return not layout.text or any(_has_text(layout, file) for file in _first_files(layout, path))


def _first_files(layout: Layout, folder: Path) -> Iterator[Path]:
    return islice((file for file in folder.glob(layout.globs[0]) if file.is_file()), NUM_FILES)


def _has_text(layout: Layout, file: Path) -> bool:
    with file.open("rb") as stream:
        return re.search(layout.text, stream.read(START).decode("utf-8", "replace")) is not None
