"""The classes of segmentation masks: their names, and how a mask encodes them."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from ..image_targets_hf_vit import IGNORED_LABEL
from .wording import listed


# How palettes call the colour of pixels that are of no class.
IGNORED_NAMES = {"ignore", "ignored", "unlabeled", "unlabelled", "void"}
NAME_FILES = ("classes.txt", "id2label.json")
PALETTE_FILES = ("palette.txt", "label_colors.txt", "class_dict.csv")

Color = tuple[int, int, int]


@dataclass(frozen=True)
class ClassList:
    """The classes of segmentation masks.

    Args:
        names: Name of each class; its place is its number.
        colors: Pairs of a colour (R, G, B) in masks and the class number it stands for, or 255.
        reduce_labels: Whether indexed masks count classes from 1 and have 0 where there is none.

    Raises:
        ValueError: if there is no class, or more than 255, or a name is empty or there twice.
    """

    names: tuple[str, ...]
    colors: tuple[tuple[Color, int], ...] = ()
    reduce_labels: bool = False

    def __post_init__(self) -> None:
        """Checks the names."""
        if not 1 <= len(self.names) <= IGNORED_LABEL:
            raise ValueError(
                f"There are {len(self.names)} class names, but masks tell 1 to {IGNORED_LABEL} classes apart."
            )
        if "" in self.names or len(set(self.names)) < len(self.names):
            twice = [name for name, other in pairwise(sorted(self.names)) if name == other]
            raise ValueError(f"Class names must not be empty, nor be there twice as {listed(twice)}. Rename them.")

    @property
    def index_table(self) -> np.ndarray:
        """Label of each value of an indexed mask, plus one; 0 for values that mean nothing."""
        return _index_table(len(self.names), self.reduce_labels)

    @property
    def color_table(self) -> np.ndarray:
        """Label of each colour 65536 R + 256 G + B, plus one; 0 for colours that mean nothing."""
        return _color_table(self.colors)


@lru_cache(maxsize=8)
def _index_table(num_classes: int, reduce_labels: bool) -> np.ndarray:
    table = np.zeros(1 << 16, np.int16)
    first = int(reduce_labels)
    table[first : first + num_classes] = 1 + np.arange(num_classes)
    table[IGNORED_LABEL] = 1 + IGNORED_LABEL
    if reduce_labels:
        table[0] = 1 + IGNORED_LABEL
    return table


@lru_cache(maxsize=8)
def _color_table(colors: tuple[tuple[Color, int], ...]) -> np.ndarray:
    table = np.zeros(1 << 24, np.int16)  # the system gives memory only for what is written or read
    for (red, green, blue), label in colors:
        table[red << 16 | green << 8 | blue] = 1 + label
    return table


def choose_classes(
    folder: Path | None, class_names: Sequence[str] | None, classes_file: str | None, reduce_labels: bool
) -> ClassList:
    """Finds out the classes of masks.

    Args:
        folder: Where files of classes may lie: classes.txt or id2label.json, and palette.txt, label_colors.txt or
            class_dict.csv.
        class_names: The names, if not those of a file.
        classes_file: The file, if not one of `folder`.
        reduce_labels: As in `ClassList`.

    Raises:
        OSError: if `classes_file` cannot be read.
        ValueError: if there are no names, or a file is malformed.
    """
    names = list(class_names or [])
    palette: dict[Color, str] = {}
    for file in _files(folder, classes_file):
        found, colors = read_class_file(file)
        names, palette = names or found, palette or colors
    if not names:
        raise ValueError(
            f"The names of the classes are unknown. Give them as class_names, or in a file {' or '.join(NAME_FILES)} "
            "beside the splits, or as classes_file."
        )
    return ClassList(tuple(names), tuple(_numbered(palette, names).items()), reduce_labels)


def _files(folder: Path | None, classes_file: str | None) -> list[Path]:
    if classes_file is not None:
        return [Path(classes_file).expanduser()]
    return [folder / name for name in (*NAME_FILES, *PALETTE_FILES) if folder and (folder / name).is_file()]


def _numbered(palette: Mapping[Color, str], names: list[str]) -> dict[Color, int]:
    numbers = {name: number for number, name in enumerate(names)}
    is_ignored = {name: name.lower() in IGNORED_NAMES and name not in numbers for name in palette.values()}
    if unknown := sorted(name for name in set(palette.values()) if name not in numbers and not is_ignored[name]):
        raise ValueError(
            f"The palette has colours for {listed(unknown)}, but the classes are {listed(names)}. Spell them the "
            f"same, or call colours of no class {sorted(IGNORED_NAMES)[0]!r}."
        )
    return {color: numbers.get(name, IGNORED_LABEL) for color, name in palette.items()}


def read_class_file(file: Path) -> tuple[list[str], dict[Color, str]]:
    """Reads a file of classes: names line by line, `id2label` in JSON, or a palette of names and colours.

    Returns:
        The names in order, and those of a palette by colour (R, G, B). Several colours may have one name.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is malformed.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")  # spreadsheets put a mark in front
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no UTF-8 text: {error}. Save it as UTF-8.") from error
    if file.suffix.lower() == ".json":
        return _read_id2label(file, text), {}
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if file.suffix.lower() == ".csv":
        lines = lines[1:]  # the header
    colors = [_name_and_color(line) for line in lines]
    if not any(colors):
        return lines, {}
    if None in colors:
        raise ValueError(
            f"{file} has the line {lines[colors.index(None)]!r} among colours. A line of a palette reads "
            "'name 255 0 128' or '255 0 128 name'."
        )
    palette: dict[Color, str] = {}
    for name, color in filter(None, colors):
        if palette.setdefault(color, name) != name:
            raise ValueError(f"{file} gives the colour {color} to {palette[color]!r} and to {name!r}. Change one.")
    return list(dict.fromkeys(name for name in palette.values() if name.lower() not in IGNORED_NAMES)), palette


def _read_id2label(file: Path, text: str) -> list[str]:
    try:
        names = {int(number): str(name) for number, name in dict(json.loads(text)).items()}
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file} is no JSON object of class numbers and names: {error}.") from error
    names.pop(IGNORED_LABEL, None)
    if sorted(names) != list(range(len(names))):
        raise ValueError(
            f"{file} numbers its classes {listed(sorted(names))}, but {len(names)} classes go from 0 to "
            f"{len(names) - 1}. Where masks count from 1 and 0 is no class, number them from 0 and set reduce_labels."
        )
    return [names[number] for number in range(len(names))]


def _name_and_color(line: str) -> tuple[str, Color] | None:
    """Returns name and colour from "name 255 0 128", "255 0 128 name" or the same with commas; `None` from else."""
    words = [word for word in re.split(r"[\s,;]+", line) if word]
    for numbers, name in ((words[:3], words[3:]), (words[-3:], words[:-3])):
        if name and len(numbers) == 3 and all(word.isdecimal() and int(word) <= 255 for word in numbers):
            red, green, blue = map(int, numbers)
            return " ".join(name), (red, green, blue)
    return None
