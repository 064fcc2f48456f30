"""Layouts of published datasets and of exports of annotation tools, which are rows of layouts.yaml."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

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
        advice: Way to get data that are supported, if the layout is not read; empty if it is read.
    """

    name: str
    globs: tuple[str, ...]
    text: str = ""
    advice: str = ""


@cache
def layouts() -> tuple[Layout, ...]:
    """Return all rows of layouts.yaml."""
    rows = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return tuple(Layout(**row | {"globs": tuple(row["globs"])}) for row in rows)


def find_layout(path: Path) -> Layout | None:
    """Return the first layout that fits a folder or a file, or `None`."""
    return next((layout for layout in layouts() if _fits(layout, path)), None)


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
