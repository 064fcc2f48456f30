"""Labels other than one class per image: several names, columns of 0 and 1, and numbers.

Shapes: N images, K labels or values.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
from datasets import ClassLabel, Dataset, DatasetDict, LargeList, List, Value, concatenate_datasets
from datasets.table import InMemoryTable
from transformers.utils import logging

from .columns import USUAL_NAMES, SourceOptions, take_columns
from .files import listed, with_files
from .stored import KEY, URL, tar_label


logger = logging.get_logger(__name__)
ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
SINGLE: Final = "single_label_classification"
MULTI: Final = "multi_label_classification"
REGRESSION: Final = "regression"
FLAGS, VALUES = "label_flags", "label_values"  # columns of a number for each name, NaN if it is missing
NEEDED = {MULTI: "0 or 1 for each class", REGRESSION: "numbers, as problem_type='regression' needs"}
SEPARATORS = "|;"  # between names, if none is given
SPECIAL_CELLS = dict.fromkeys(("", "nan", "na", "none", "null"), math.nan) | {"true": 1.0, "false": 0.0}
FLOATS = (Value("float32"), Value("float64"))
Cells = list[Any]


def value_column(rows: Dataset) -> str | None:
    """Returns the column of several labels or of values, `FLAGS` or `VALUES`; None if there is none."""
    return next((name for name in (FLAGS, VALUES) if name in rows.column_names), None)


def value_matrix(rows: Dataset) -> np.ndarray:
    """Returns the labels or values of images, (N, K) float64, NaN for missing ones."""
    return np.array([[*row.values()] for row in rows[value_column(rows)][:]], dtype=np.float64)


def values_target(row: Mapping[str, Any], names: Sequence[str], column: str) -> dict[str, list[float]]:
    """Read the number of each name as `label`, a list of K floats, NaN if it is missing or there is no such name."""
    return {"label": [row[column].get(name, math.nan) for name in names]}


def number_in(cell: Any) -> float | None:
    """Returns the number in a cell, NaN if it is empty, None if it is text."""
    text = "" if cell is None else str(cell).strip().lower()
    try:
        number = SPECIAL_CELLS[text] if text in SPECIAL_CELLS else float(text)
    except ValueError:
        return None
    return None if math.isinf(number) else number


def is_flag(cell: Any) -> bool:
    """Returns whether a cell is 0 or 1, or empty."""
    number = number_in(cell)
    return number is not None and not (number < 0 or number > 1 or number % 1 > 0)  # NaN is neither


def inner_type(feature: Any) -> Any:
    """Returns the type of the items of a list, of anything else its own."""
    return feature.feature if isinstance(feature, List | LargeList) else feature


def read_cells(rows: Dataset, column: str, split: str) -> Cells:
    """Returns the cells of a column, with the names of class numbers, None for those below 0."""
    if column not in rows.features:
        raise ValueError(f"The split {split!r} has no column {column!r}, which others have. Add it.")
    cells, kind = list(rows[column][:]), inner_type(rows.features[column])
    if not isinstance(kind, ClassLabel):
        return cells
    names: dict[int | None, str | None] = {None: None, -1: None, **dict(enumerate(kind.names))}
    return [[names[item] for item in cell] if isinstance(cell, list) else names[cell] for cell in cells]


def find_columns(rows: Dataset, image: str, given: str | None) -> list[str]:
    """Returns the columns of labels: those given, with commas between them, else of type, name, or of 0 and 1."""
    others = (image, "split", "file", KEY, URL)
    features = {name: kind for name, kind in rows.features.items() if name not in others}
    if given is not None:
        names = [given] if given in features else [name.strip() for name in given.split(",")]
        return names if features.keys() >= {*names} else []
    typed = [name for name, kind in features.items() if isinstance(inner_type(kind), ClassLabel)]
    usual = [name for name in features if name.strip().lower() in USUAL_NAMES["label"]]
    if found := typed or tar_label(rows.features) or usual:
        return found if len(found) == 1 else []
    flags = [name for name, kind in features.items() if isinstance(kind, Value) and all(map(is_flag, rows[name][:]))]
    return flags if len(flags) > 1 else []


def find_separator(cells: Cells) -> str | None:
    """Returns what separates the names in cells, if some name occurs in several cells."""
    texts = {cell.strip() for cell in cells if isinstance(cell, str)}
    for separator in SEPARATORS:
        parts = [part.strip() for text in texts if separator in text for part in text.split(separator)]
        if len({*parts}) < len(parts) or not texts.isdisjoint(parts):
            return separator
    return None


def detect(columns: Sequence[Cells], feature: Any, separator: str | None) -> ProblemType:
    """Returns what columns of labels are for, of which the first is of the type `feature`."""
    if len(columns) > 1:
        return MULTI if all(is_flag(cell) for cells in columns for cell in cells) else REGRESSION
    numbers, is_named = [number_in(cell) for cell in columns[0]], isinstance(feature, ClassLabel)
    has_fractions = None not in numbers and any(number is not None and number % 1 > 0 for number in numbers)
    if feature in FLOATS or (has_fractions and not is_named):
        return REGRESSION
    is_several = feature != inner_type(feature) or separator or (not is_named and find_separator(columns[0]))
    return MULTI if is_several else SINGLE


def label_values(
    splits: DatasetDict,
    options: SourceOptions,
    problem_type: ProblemType | None,
    separator: str | None = None,
    class_names: Sequence[str] = (),
) -> DatasetDict | None:
    """Return `image`, `file` and `FLAGS` or `VALUES`, a number for each name; None if images have one label each.

    Args:
        splits: Images and columns of any names.
        options: The columns to take; several ones with commas between them.
        problem_type: What the labels are for; by default `detect` finds out.
        separator: What separates the names in a cell, by default one of `SEPARATORS`.
        class_names: All names of classes, for cells of names; by default those that occur in the first split.

    Raises:
        ValueError: if a label is of the wrong kind or unknown, or all are missing.
    """
    first = "train" if "train" in splits else next(iter(splits))
    images = {name: options.choose_image(rows.features, f"The split {name!r}") for name, rows in splits.items()}
    names = find_columns(splits[first], images[first], options.target_column)
    if not names:
        return None
    columns = {split: [read_cells(rows, name, split) for name in names] for split, rows in splits.items()}
    feature = splits[first].features[names[0]]
    if feature != inner_type(feature) and (inner_type(feature) in FLOATS or problem_type == REGRESSION):
        names, columns = _one_by_one(names[0], columns)
    kind = problem_type or detect(columns[first], feature, separator)
    if kind == SINGLE:
        return None
    known = inner_type(feature).names if isinstance(inner_type(feature), ClassLabel) else []
    if kind == MULTI and len(names) == 1 and (known or separator or not all(map(is_flag, columns[first][0]))):
        names, columns = _flag_names(columns, first, separator, known or class_names)
    if problem_type is None:
        logger.warning("Labels are read for %s: %s. If that is wrong, set problem_type.", kind, listed(names))
    found = DatasetDict()
    for split, cells in columns.items():
        table = [_numbers_in(own, name, split, kind) for own, name in zip(cells, names, strict=True)]  # (K, N)
        if not np.isnan(table).all():
            struct = pa.StructArray.from_arrays([*map(pa.array, table)], names=[*names])
            values = Dataset(InMemoryTable(pa.table({FLAGS if kind == MULTI else VALUES: struct})))
            found[split] = concatenate_datasets(
                [take_columns(splits[split], {images[split]: "image"}), values], axis=1
            )
        elif split == first:
            raise ValueError(f"All labels of the split {split!r} are missing ({listed(names)}). Fill them in.")
        else:
            logger.warning("The split %r has no labels; it is left out.", split)
    return with_files(found)


def _one_by_one(column: str, columns: Mapping[str, list[Cells]]) -> tuple[list[str], dict[str, list[Cells]]]:
    """Returns the numbers of lists, which are as long, in columns of their own by split, and names for these."""
    lengths = {len(cell) for (cells,) in columns.values() for cell in cells if cell is not None}
    if len(lengths) != 1 or lengths == {0}:
        raise ValueError(f"Lists of {listed(sorted(lengths))} numbers are in {column!r}. All must be as long.")
    names = [f"{column}_{number}" for number in range(*lengths)]
    filled = {split: [cell or [None] * len(names) for cell in cells] for split, (cells,) in columns.items()}
    return names, {split: [list(values) for values in zip(*cells, strict=True)] for split, cells in filled.items()}


def _numbers_in(cells: Cells, name: str, split: str, kind: ProblemType) -> np.ndarray:
    """Returns the numbers in a column of a split, (N,) float64."""
    numbers = [number_in(cell) for cell in cells]
    if wrong := [row for row, n in enumerate(numbers) if n is None or (kind == MULTI and not is_flag(cells[row]))]:
        raise ValueError(
            f"{len(wrong)} of {len(cells)} labels of the split {split!r} in the column {name!r} are not "
            f"{NEEDED[kind]}; the first is {cells[wrong[0]]!r} in row {wrong[0] + 1}. Empty cells are missing labels."
        )
    return np.array(numbers, dtype=np.float64)


def _flag_names(
    columns: Mapping[str, list[Cells]], first: str, separator: str | None, known: Sequence[str]
) -> tuple[list[str], dict[str, list[Cells]]]:
    """Returns the names of all classes and, by split, for each of them whether a cell names it; None stays."""
    separator = separator or find_separator(columns[first][0])

    def names_in(cell: Any) -> set[str]:
        parts = [] if cell is None else cell if isinstance(cell, list) else str(cell).split(separator or "\0")
        return {str(part).strip() for part in parts if part is not None} - {""}

    found = {split: [*map(names_in, cells)] for split, (cells,) in columns.items()}
    occurring = {split: set[str]().union(*rows) for split, rows in found.items()}
    are_numbers = all(name.isdecimal() for name in occurring[first])
    names = [*known] or sorted(occurring[first], key=int if are_numbers else None)
    for split, own in occurring.items():
        if unknown := sorted(own - {*names}):
            raise ValueError(
                f"The split {split!r} has the labels {listed(unknown)}, but the classes are {listed(names)}. Spell "
                f"them the same, or give {first!r} examples of them."
            )
    return names, {
        split: [
            [None if cell is None else name in own for own, cell in zip(found[split], cells, strict=True)]
            for name in names
        ]
        for split, (cells,) in columns.items()
    }
