"""Reader of multi-label and regression targets: lists of class names, columns of 0 and 1, and numbers.

Shapes: N images, K classes or values.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
from datasets import ClassLabel, Dataset, DatasetDict, LargeList, List, Value, concatenate_datasets
from datasets.table import InMemoryTable
from transformers.utils import logging

from .classes import sorted_names
from .columns import USUAL_NAMES, Columns
from .files import joined
from .shards import tar_label


logger = logging.get_logger(__name__)
ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
SINGLE: Final = "single_label_classification"
MULTI: Final = "multi_label_classification"
REGRESSION: Final = "regression"
FLAGS, VALUES = "label_flags", "label_values"  # columns of structs with one number per name; NaN means missing
NEEDED = {MULTI: "0 or 1 for each class", REGRESSION: "numbers, which problem_type='regression' requires"}
SEPARATORS = "|;,"  # default separators of class names in multi-label cells, in the order in which they are tried
SPECIAL_CELLS = dict.fromkeys(("", "nan", "na", "none", "null"), math.nan) | {"true": 1.0, "false": 0.0}


def problem_type_of(rows: Dataset) -> ProblemType:
    """Return the problem type of a dataset, which determines the name of its label column."""
    return MULTI if FLAGS in rows.column_names else REGRESSION if VALUES in rows.column_names else SINGLE


def value_table(rows: Dataset) -> pd.DataFrame:
    """Return the labels or values of images as a table with one float64 column per name. Missing values are NaN."""
    return pd.DataFrame(rows[FLAGS if FLAGS in rows.column_names else VALUES][:], dtype=np.float64)


def values_target(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, list[float]]:
    """Return `label`, a list of K numbers, one for each name; NaN for missing values and unknown names."""
    return {"label": [(row.get(FLAGS) or row[VALUES]).get(name, math.nan) for name in names]}


def number_in(cell: Any) -> float:
    """Return the number in a cell, NaN if the cell is empty, or infinity if it contains anything else."""
    text = str(cell).strip().lower()
    try:
        return SPECIAL_CELLS[text] if text in SPECIAL_CELLS else float(text)
    except ValueError:
        return math.inf


def are_binary(numbers: pd.DataFrame | pd.Series) -> Any:
    """Return whether each number in a table is 0, 1 or missing."""
    return numbers.isna() | numbers.isin([0, 1])


def class_names_of(feature: Any) -> list[str]:
    """Return the class names of a column of class numbers or of lists of them; empty for other types of columns."""
    inner = feature.feature if isinstance(feature, List | LargeList) else feature
    return inner.names if isinstance(inner, ClassLabel) else []


def find_columns(columns: Columns, given: str | None) -> list[str]:
    """Return the label columns in `given` (comma-separated); by default, find them by type, name, or 0/1 values."""
    if given is not None:
        names = [given] if given in columns else [name.strip() for name in given.split(",")]
        return names if columns.keys() >= {*names} else []
    typed = [name for name, (_, kind) in columns.items() if class_names_of(kind)]
    usual = [name for name in columns if name.strip().lower() in USUAL_NAMES["label"]]
    if found := typed or tar_label(columns) or usual:
        return found if len(found) == 1 else []
    texts = {name: cells for name, (cells, kind) in columns.items() if isinstance(kind, Value)}
    flags = [name for name, cells in texts.items() if are_binary(pd.Series(map(number_in, cells[:]))).all()]
    return flags if len(flags) > 1 else []


def read_cells(columns: Columns, names: Sequence[str], split: str) -> pd.DataFrame:
    """Return the values of columns, with class numbers replaced by names, and invalid numbers such as -1 by `None`."""
    if lacking := [name for name in names if name not in columns]:
        raise ValueError(f"The split {split!r} has no column {lacking[0]!r}, but another split has it. Add it.")
    found = pd.DataFrame({name: columns[name][0][:] for name in names}, dtype=object)
    for name in names:
        if known := dict(enumerate(class_names_of(columns[name][1]))):
            found[name] = [
                [*map(known.get, cell)] if isinstance(cell, list) else known.get(cell) for cell in found[name]
            ]
    return found


def detect(cells: pd.DataFrame, numbers: pd.DataFrame, separator: str | None, is_named: bool) -> ProblemType:
    """Detect the problem type. Text in a single column is a single class name, unless a separator is given."""
    if cells.shape[1] > 1:
        return MULTI if are_binary(numbers).all(axis=None) else REGRESSION
    types, are_numbers = {*map(type, cells.iloc[:, 0])}, not is_named and not np.isinf(numbers).any(axis=None)
    if are_numbers and (float in types or (numbers % 1 > 0).any(axis=None)):
        return REGRESSION
    return MULTI if list in types or separator else SINGLE


def label_values(
    images: DatasetDict,
    columns: Mapping[str, Columns],
    given: str | None,
    problem_type: ProblemType | None,
    separator: str | None = None,
    class_names: Sequence[str] = (),
) -> DatasetDict | None:
    """Add multi-label (`FLAGS`) or regression targets (`VALUES`) to images; return `None` if the task is single-label.

    Args:
        images: Images by split.
        columns: Other columns by split.
        given: Comma-separated names of the label columns; by default found by `find_columns`.
        problem_type: Problem type; by default found by `detect`.
        separator: Separator of class names in a cell; by default one of `SEPARATORS`.
        class_names: Names of all classes, if cells contain names; by default those that occur in the first split.

    Raises:
        ValueError: if a label has the wrong type or is unknown, or if all labels of the first split are missing.
    """
    first = "train" if "train" in images else next(iter(images))
    if not (names := find_columns(columns[first], given)):
        return None
    known = class_names_of(columns[first][names[0]][1])
    cells = pd.concat({split: read_cells(own, names, split) for split, own in columns.items()})  # index: split, row
    lists = [cell for cell in cells[names[0]] if isinstance(cell, list)]
    if lists and (problem_type == REGRESSION or any(isinstance(item, float) for cell in lists for item in cell)):
        cells, lists = one_by_one(cells[names[0]], {*map(len, lists)}), []
    numbers = pd.DataFrame(np.vectorize(number_in, [float])(cells), cells.index, cells.columns)
    kind = problem_type or detect(cells, numbers, separator, bool(known))
    if kind == SINGLE:
        return None
    has_names = known or separator or lists or not are_binary(numbers).all(axis=None)
    if kind == MULTI and cells.shape[1] == 1 and has_names:
        numbers = flags_of_names(cells.iloc[:, 0], first, separator, known or class_names)
    if problem_type is None:
        logger.warning("Labels are used for %s: %s. If this is wrong, set problem_type.", kind, joined([*numbers]))
    wrong = ~are_binary(numbers) if kind == MULTI else np.isinf(numbers)
    if wrong.any(axis=None):
        name = wrong.any().idxmax()
        split, row = wrong[name].idxmax()
        raise ValueError(
            f"{wrong.loc[split][name].sum()} of {len(images[split])} labels of the split {split!r} in the column "
            f"{name!r} are not {NEEDED[kind]}; the first is {cells[name][split, row]!r} in row {row + 1}. Correct "
            "them. If a label is missing, leave its cell empty."
        )
    found = DatasetDict()
    for split, rows in images.items():
        own = numbers[numbers.index.get_level_values(0) == split]
        if not own.isna().all(axis=None):
            struct = pa.StructArray.from_arrays([*map(pa.array, own.to_numpy().T)], names=[*own])
            values = Dataset(InMemoryTable(pa.table({FLAGS if kind == MULTI else VALUES: struct})))
            found[split] = concatenate_datasets([rows, values], axis=1)
        elif split == first:
            raise ValueError(f"All labels of the split {split!r} are missing ({joined([*own])}). Add labels.")
        else:
            logger.warning("Ignored the split %r because it has no labels.", split)
    return found


def one_by_one(cells: pd.Series, lengths: set[int]) -> pd.DataFrame:
    """Convert cells with lists of numbers of the same length to a table with one column per list element."""
    if len(lengths) != 1 or lengths == {0}:
        raise ValueError(
            f"{cells.name!r} has lists of {joined(sorted(lengths))} numbers. All lists must have the same length."
        )
    rows = [cell if isinstance(cell, list) else [cell] * max(lengths) for cell in cells]
    return pd.DataFrame(rows, cells.index, [f"{cells.name}_{number}" for number in range(*lengths)], dtype=object)


def flags_of_names(cells: pd.Series, first: str, separator: str | None, names: Sequence[str]) -> pd.DataFrame:
    """Convert cells with lists of class names, or with separated class names, to multi-hot labels.

    Args:
        cells: Cells, indexed by split and row.
        first: Name of the split that defines the classes if `names` is empty.
        separator: Separator of names in text; by default one of `SEPARATORS`.
        names: Names of all classes.

    Returns:
        Table with one column per class: 1 if the cell contains the class, 0 if not, and NaN for missing cells.
    """
    marks = (mark for mark in SEPARATORS if any(isinstance(cell, str) and mark in cell for cell in cells))
    separator = separator or next(marks, "\0")
    lists = cells.dropna().map(lambda cell: cell if isinstance(cell, list) else str(cell).split(separator))
    items = lists.explode().dropna().astype(str).str.strip()
    items = items[items != ""]
    occurring = {split: {*own} for split, own in items.groupby(level=0)}
    names = [*names] or sorted_names(occurring.get(first, set()))
    for split, own in occurring.items():
        if unknown := sorted(own - {*names}):
            raise ValueError(
                f"The split {split!r} has the labels {joined(unknown)}, but the classes are {joined(names)}. Use the "
                f"same spelling, or add examples of these labels to {first!r}."
            )
    flags = np.zeros((len(cells), len(names)))
    flags[cells.index.get_indexer(items.index), pd.Index(names, dtype=object).get_indexer(items)] = 1
    flags[cells.isna()] = math.nan
    return pd.DataFrame(flags, cells.index, names)
