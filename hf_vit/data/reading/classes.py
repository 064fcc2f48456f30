"""Classes of a dataset: their names, their numbers, and their encoding in masks."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Value
from transformers.utils import logging

from ...model.image_targets import IGNORED_LABEL
from ..layouts import Layout
from .files import joined, parse_json, read_text, report


logger = logging.get_logger(__name__)
# Values that mark examples without a label: -1 in datasets on the Hub, an empty cell in tables
UNLABELED = (None, "", -1, "-1")
INTEGERS = [Value(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
LABEL_TYPES = [*INTEGERS, Value("string"), Value("large_string"), Value("bool")]
# Names that palettes use for unlabeled pixels
IGNORED_NAMES = {"ignore", "ignored", "unlabeled", "void"}
NAME_FILES = ("classes.txt", "id2label.json")
NUMBERED = re.compile(r"(\d+)(?:\s*[:;,=.)-]\s*|\s+)(.+)")  # matches lines such as "0 cat" and "0: cat"
PALETTE_FILES = ("palette.txt", "label_colors.txt", "class_dict.csv", "labelmap.txt")
CVAT_LINE = re.compile(r"(.+?):(\d+),(\d+),(\d+):[^:]*:[^:]*")  # matches lines such as "cat:250,50,83::"
Color = tuple[int, int, int]


@dataclass(frozen=True)
class ClassList:
    """The classes of segmentation masks.

    Args:
        names: Name of each class, in the order of class numbers.
        colors: Pairs of a mask color (R, G, B) and its class number, or 255 for unlabeled pixels.
        reduce_labels: Whether class numbers in masks start at 1, with 0 for unlabeled pixels.
        binary_masks: Whether masks contain 0 for the first of two classes and 255 for the second.
        values: Mask value of each class, if these are not 0, 1, 2, ...; other values are unlabeled pixels.

    Raises:
        ValueError: if there are no or more than 255 classes, if names are empty or duplicate, or if `binary_masks`
            is combined with `reduce_labels`, colors or a number of classes other than two.
    """

    names: tuple[str, ...]
    colors: tuple[tuple[Color, int], ...] = ()
    reduce_labels: bool = False
    binary_masks: bool = False
    values: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= len(self.names) <= IGNORED_LABEL:
            raise ValueError(
                f"There are {len(self.names)} class names, but masks support 1 to {IGNORED_LABEL} classes."
            )
        if "" in self.names or len(set(self.names)) < len(self.names):
            twice = [name for name, other in pairwise(sorted(self.names)) if name == other]
            found = f"but {joined(twice)} occurs twice" if twice else "but one is empty"
            raise ValueError(f"Class names must not be empty or occur more than once, {found}. Rename this class.")
        if self.binary_masks and (len(self.names) != 2 or self.reduce_labels or self.colors):
            raise ValueError(
                "binary_masks is for masks of 0 and 255 with two classes, without a palette and without "
                f"reduce_labels. The classes are {joined(self.names)}. Remove binary_masks, or name two classes."
            )


@lru_cache(maxsize=8)
def index_table(classes: ClassList) -> np.ndarray:
    """Return a table from mask values to class numbers plus one; the entry of an invalid value is 0."""
    table = np.zeros(1 << 16, np.int16)
    if classes.binary_masks:
        table[0], table[255] = 1, 2
        return table
    if classes.values:
        table[:] = 1 + IGNORED_LABEL
        table[list(classes.values)] = 1 + np.arange(len(classes.names))
        return table
    first = int(classes.reduce_labels)
    table[first : first + len(classes.names)] = 1 + np.arange(len(classes.names))
    table[[0, IGNORED_LABEL] if classes.reduce_labels else IGNORED_LABEL] = 1 + IGNORED_LABEL
    return table


@lru_cache(maxsize=8)
def color_table(classes: ClassList) -> np.ndarray:
    """Return a table from colors 65536 R + 256 G + B to class numbers plus one; the entry of an unknown color is 0."""
    table = np.zeros(1 << 24, np.int16)  # a large table, but memory pages are allocated only on first access
    for (red, green, blue), label in classes.colors:
        table[red << 16 | green << 8 | blue] = 1 + label
    return table


def choose_classes(
    folder: Path | None,
    class_names: Sequence[str] | None,
    classes_file: str | None,
    reduce_labels: bool,
    binary_masks: bool = False,
    layout: Layout | None = None,
) -> ClassList:
    """Return the classes of masks.

    The first source that exists is used. For names, the sources are `class_names`, `classes_file`, a file with a usual
    name in `folder`, and `layout`; for colors, `classes_file` and a palette file in `folder`.
    """
    names = list(class_names or [])
    palette: dict[Color, str] = {}
    files = [folder / name for name in (*NAME_FILES, *PALETTE_FILES) if folder and (folder / name).is_file()]
    for file in files if classes_file is None else [Path(classes_file).expanduser()]:
        found, colors = read_class_file(file)
        names, palette = names or found, palette or colors
    if not names and layout and layout.class_names:
        is_reduced = reduce_labels or layout.reduce_labels
        return ClassList(layout.class_names, reduce_labels=is_reduced, values=layout.class_values)
    if not names:
        raise ValueError(
            f"The names of the classes are unknown. Give them as class_names, in a file {' or '.join(NAME_FILES)} "
            "next to the folders of the splits, or in another file given as classes_file."
        )
    return ClassList(tuple(names), tuple(_numbered(palette, names).items()), reduce_labels, binary_masks)


def _numbered(palette: Mapping[Color, str], names: list[str]) -> dict[Color, int]:
    numbers = {name: number for number, name in enumerate(names)}
    is_ignored = {name: name.lower() in IGNORED_NAMES and name not in numbers for name in palette.values()}
    if unknown := sorted(name for name in set(palette.values()) if name not in numbers and not is_ignored[name]):
        raise ValueError(
            f"The palette has colors for {joined(unknown)}, but the classes are {joined(names)}. Use the same "
            f"spelling, or name the color of unlabeled pixels {sorted(IGNORED_NAMES)[0]!r}."
        )
    return {color: numbers.get(name, IGNORED_LABEL) for color, name in palette.items()}


def read_class_file(file: Path) -> tuple[list[str], dict[Color, str]]:
    """Return the class names in a file, and the name of each color if the file is a palette.

    The file contains one class per line (name, number and name, or name and color), or `id2label` as JSON.
    """
    text = read_text(file)
    if file.suffix.lower() == ".json":
        return _read_id2label(file, text), {}
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if file.suffix.lower() == ".csv":
        lines = lines[1:]  # skip the first line if it is the header of a table
    colors = [_name_and_color(line) for line in lines]
    if not any(colors):
        if file.name in PALETTE_FILES[:3]:
            raise ValueError(f"{file} has no line like 'name 255 0 128'. Write a name and a color on each line.")
        if len(lines) == 1 and "," in lines[0] and not NUMBERED.fullmatch(lines[0]):
            raise ValueError(f"{file} has a single line with commas, {lines[0]!r}. Write one class name per line.")
        return _without_numbers(lines, file), {}
    if None in colors:
        raise ValueError(
            f"{file} is a palette, but its line {lines[colors.index(None)]!r} has no color. Write each line as "
            "'name 255 0 128' or '255 0 128 name'."
        )
    palette: dict[Color, str] = {}
    for name, color in filter(None, colors):
        if palette.setdefault(color, name) != name:
            raise ValueError(
                f"{file} uses the color {color} for both {palette[color]!r} and {name!r}. Change one of them."
            )
    return list(dict.fromkeys(name for name in palette.values() if name.lower() not in IGNORED_NAMES)), palette


def read_class_names(folders: Sequence[Path]) -> list[str]:
    """Return the class names in the first classes.txt or id2label.json found in the folders; empty if none exists."""
    files = [folder / name for folder in folders for name in NAME_FILES if (folder / name).is_file()]
    return read_class_file(files[0])[0] if files else []


def _read_id2label(file: Path, text: str) -> list[str]:
    try:
        names = {int(number): str(name) for number, name in dict(parse_json(text)).items()}
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{file} is not a JSON object of class numbers and names: {error}. Correct the file."
        ) from error
    names.pop(IGNORED_LABEL, None)
    return _by_number(names, file)


def _without_numbers(lines: list[str], file: Path) -> list[str]:
    """Remove line numbers from class names; raise `ValueError` if the numbers start at 1 instead of 0."""
    names = {int(match[1]): match[2] for match in map(NUMBERED.fullmatch, lines) if match}
    is_numbered = names and sorted(names) in [list(range(first, first + len(lines))) for first in (0, 1)]
    return _by_number(names, file) if is_numbered else lines


def _by_number(names: Mapping[int, str], file: Path) -> list[str]:
    if sorted(names) != list(range(len(names))):
        raise ValueError(
            f"{file} numbers its classes {joined(sorted(names))}. Number these {len(names)} classes from 0 to "
            f"{len(names) - 1}. If class numbers in masks start at 1 and 0 means unlabeled, also set reduce_labels. "
            f"If the numbers are part of the class names, use a file {NAME_FILES[1]} instead."
        )
    return [names[number] for number in range(len(names))]


def _name_and_color(line: str) -> tuple[str, Color] | None:
    """Parse "name 255 0 128" or "255 0 128 name", optionally with commas, or "name:255,0,128::"; otherwise `None`."""
    if match := CVAT_LINE.fullmatch(line):
        line = " ".join(match.groups())
    words = [word for word in re.split(r"[\s,;]+", line) if word]
    for numbers, name in ((words[:3], words[3:]), (words[-3:], words[:-3])):
        if name and len(numbers) == 3 and all(word.isdecimal() and int(word) <= 255 for word in numbers):
            red, green, blue = map(int, numbers)
            return " ".join(name), (red, green, blue)
    return None


@dataclass(frozen=True)
class ClassNumbers:
    """The class names of a dataset in the order of class numbers, and the class number of each label text."""

    names: tuple[str, ...]
    numbers: Mapping[str, int]

    def __post_init__(self) -> None:
        if len(self.names) < 2:
            raise ValueError(f"The classes are {joined(self.names)}, but there must be at least 2. Add classes.")
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"The class names {joined(self.names)} are not unique. Rename duplicate names.")

    def number(self, label: object, file: str) -> int:
        """Return the class number of a label; `file` names the image in error messages."""
        if label in UNLABELED:
            raise ValueError(f"{file} has no label (value {label!r}). Add a label, or remove the image from the data.")
        number = self.numbers.get(str(label).strip())
        if number is None:
            raise ValueError(
                f"{file} has the label {label!r}, which is not one of the {len(self.names)} classes "
                f"{joined(self.names)}. Correct the label, or give the names of all classes as class_names."
            )
        return number

    def relabeled(self, split: Dataset) -> Dataset:
        """Convert the column `label` of a split to class numbers. Error messages name images by the column `file`."""
        numbers = [self.number(label, file) for label, file in zip(split["label"][:], split["file"][:], strict=True)]
        return with_class_column(split, "label", numbers, self.names)


def known_classes(feature: object, names: Sequence[str]) -> ClassNumbers | None:
    """Return the classes of a label column from its type or from `names`, or `None` if neither has class names.

    Integer labels are indices into `names`.
    """
    if isinstance(feature, ClassLabel):
        if names and list(names) != feature.names:
            raise ValueError(
                f"class_names={joined(names)} differs from the class names in the data, {joined(feature.names)}. "
                "Remove class_names."
            )
        names = feature.names
    if not names:
        return None
    if isinstance(feature, ClassLabel) or feature in INTEGERS:
        return ClassNumbers(tuple(names), {str(number): number for number in range(len(names))})
    return _by_name(names)


def classes_from_labels(labels: Iterable[object]) -> ClassNumbers:
    """Return the classes that occur in labels, sorted numerically if all are numbers, otherwise alphabetically."""
    return _by_name(sorted_names({str(label).strip() for label in labels if label not in UNLABELED}))


def sorted_names(names: set[str]) -> list[str]:
    """Sort names numerically if all are numbers, otherwise alphabetically."""
    return sorted(names, key=int if all(name.isdecimal() for name in names) else None)


def _by_name(names: Sequence[str]) -> ClassNumbers:
    return ClassNumbers(tuple(names), {name: number for number, name in enumerate(names)})


def with_class_labels(splits: DatasetDict) -> DatasetDict:
    """Convert the column `label` of all splits to the same `datasets.ClassLabel` type.

    The classes are those of "train", or of the first split if there is no "train". Classes of a `ClassLabel` column
    keep their order. Other classes are named by their values and sorted as in `sorted_names`. Splits without any
    label, such as published test sets, are removed with a warning.
    """
    splits = DatasetDict(splits)
    labels: dict[str, list[str]] = {}
    for name, split in splits.items():
        values = split["label"][:]
        if not values:
            raise ValueError(f"The split {name!r} is empty. Add examples or remove the split.")
        if name == "train" or has_labels(name, values):
            labels[name] = _names_of(values, split.features["label"], name)
    if not labels:
        raise ValueError(f"None of the splits {', '.join(splits)} has labels. Add labels.")
    first = next(iter(labels))
    classes = _class_names(splits[first].features["label"], labels[first], first)
    numbers = {name: number for number, name in enumerate(classes)}
    for name, names in labels.items():
        if unknown := sorted(set(names) - numbers.keys()):
            occurring = set(names)
            missing = [label for label in classes if label not in occurring]
            raise ValueError(
                f"The labels of the splits differ. Only in {name!r}: {joined(unknown)}. Only in {first!r}: "
                f"{joined(missing) if missing else 'none'}. Use the same spelling in all splits, or add examples of "
                f"the missing classes to {first!r}."
            )
        if splits[name].features["label"] != ClassLabel(names=classes):
            splits[name] = with_class_column(splits[name], "label", [numbers[label] for label in names], classes)
    return DatasetDict({name: splits[name] for name in labels})


def has_labels(name: str, labels: Iterable[object]) -> bool:
    """Return whether a split has any label; otherwise, log a warning that the split is ignored."""
    if any(label not in UNLABELED for label in labels):
        return True
    logger.warning("Ignored the split %r because it has no labels: all are -1 or empty.", name)
    return False


def with_class_column(dataset: Dataset, column: str, numbers: Sequence[int], names: Sequence[str]) -> Dataset:
    """Replace a column by class numbers of type `datasets.ClassLabel`."""
    # Adding a new column avoids a cast, which would copy all images.
    return dataset.remove_columns(column).add_column(column, numbers, feature=ClassLabel(names=list(names)))


def _names_of(values: list[Any], feature: object, split: str) -> list[str]:
    names: list[str | None]
    if isinstance(feature, ClassLabel):
        known = dict(enumerate(feature.names))
        names = [known.get(value) for value in values]
        hint = f"Labels of {len(known)} classes must be 0 to {len(known) - 1}."
    else:
        names = [None if value in UNLABELED else str(value).strip() or None for value in values]
        count = len({str(value) for value in values if value not in UNLABELED}) - len({*names} - {None})
        report(
            count,
            f"{count} labels of the split {split!r} differ from others only in leading or trailing spaces and were "
            "merged with them",
        )
        hint = "Add labels to these examples, or remove them."
    if wrong := [index for index, name in enumerate(names) if name is None]:
        raise ValueError(
            f"{len(wrong)} of {len(values)} labels of the split {split!r} are missing or out of range; the first is "
            f"{values[wrong[0]]!r} at index {wrong[0]}. {hint}"
        )
    return [name for name in names if name is not None]


def _class_names(feature: object, names: list[str], split: str) -> list[str]:
    """Return the names of all classes in order, and log a warning about classes without examples."""
    occurring = set(names)
    classes: list[str] = feature.names if isinstance(feature, ClassLabel) else sorted_names(occurring)
    if missing := [name for name in classes if name not in occurring]:
        logger.warning("The split %r has no examples of the classes %s.", split, joined(missing))
    if split == "train" and len(occurring) < 2:
        raise ValueError(f"All labels of the split {split!r} are {names[0]!r}, but at least 2 classes are needed.")
    return classes
