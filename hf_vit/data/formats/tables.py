"""Tables of paths and labels: CSV, TSV and JSON lines."""

import csv
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, Features, Image, NamedSplit, Value

from ..messages import in_lines
from .columns import choose_column
from .splits import SPLIT_NAMES, SPLITS, one_per_split, split_named, split_within


TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl")
DELIMITERS = ",;\t"
MAX_MISSING = 10


def list_tables(folder: Path) -> list[Path]:
    """Lists the tables of a folder, whatever their names."""
    return [table for suffix in TABLE_SUFFIXES for table in sorted(folder.glob(f"*{suffix}"))]


def find_tables(path: Path) -> dict[str, Path]:
    """Finds the tables of a data set.

    Args:
        path: A table, or a folder with train.csv, test.csv, ..., with train/metadata.csv, ..., or with metadata.csv.

    Returns:
        The tables by split, where a table without a split in its name is "train"; nothing if there are none.

    Raises:
        ValueError: if there are several tables for one split.
    """
    if path.is_file():
        return {split_within(path.stem) or "train": path} if path.suffix.lower() in TABLE_SUFFIXES else {}
    tables = list_tables(path)
    by_name = [(table.stem, table) for table in tables if split_named(table.stem)]
    by_folder = [
        (table.parent.name, table)
        for suffix in TABLE_SUFFIXES
        for table in sorted(path.glob(f"*/metadata{suffix}"))
        if split_named(table.parent.name)
    ]
    whole = [("train", table) for table in tables if table.stem == "metadata"]
    return one_per_split(by_name or by_folder or whole)


def load_tables(tables: dict[str, Path], image_column: str | None, label_column: str | None) -> DatasetDict:
    """Reads tables with a column of paths, relative to the table's folder, and one of labels.

    A column `split` overrides the split that a table's name says.

    Args:
        tables: Tables by split.
        image_column: The column of paths, where its name is not a usual one.
        label_column: The column of labels, where its name is not a usual one.

    Returns:
        Splits with the columns `image` (paths that are opened on access) and `label` (text).

    Raises:
        ValueError: if a table cannot be read, a column is missing, or an image does not exist.
    """
    examples: dict[str, tuple[list[str], list[str | None]]] = {}
    for table_split, table in tables.items():
        for split, image, label in _examples(table, table_split, image_column, label_column):
            images, labels = examples.setdefault(split, ([], []))
            images.append(image)
            labels.append(label)
    check_exist([image for images, _ in examples.values() for image in images])
    return DatasetDict(
        {
            split: Dataset.from_dict(
                {"image": examples[split][0], "label": examples[split][1]},
                features=Features({"image": Image(), "label": Value("string")}),
                split=NamedSplit(split),
            )
            for split in SPLITS
            if split in examples
        }
    )


def _examples(
    table: Path, table_split: str, image_column: str | None, label_column: str | None
) -> Iterator[tuple[str, str, str | None]]:
    """Yields split, path and label of each row."""
    rows = read_table(table)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    image_column = choose_column("image_column_name", image_column, columns, str(table))
    label_column = choose_column("label_column_name", label_column, columns, str(table))
    folder = table.parent.absolute()  # the dataset outlives the working directory
    for number, row in enumerate(rows, start=1):
        where = f"{table}, row {number},"
        label = row.get(label_column)
        if not (label is None or isinstance(label, str | int)):
            raise ValueError(f"{where} has the label {label!r}, but a label is a word or a whole number.")
        image = str(folder / str(row.get(image_column) or ""))
        yield split_of(row, table_split, where), image, None if label is None else str(label).strip()


def read_table(table: Path) -> list[dict[str, Any]]:
    """Reads the rows of a table, of which there is at least one.

    Raises:
        ValueError: if it is malformed or empty.
    """
    rows = _read_jsonl(table) if table.suffix.lower() == ".jsonl" else _read_csv(table)
    if not rows:
        raise ValueError(f"{table} has no rows. Fill it or leave it out.")
    return rows


def split_of(row: dict[str, Any], table_split: str, where: str) -> str:
    """Returns the split that a row is of: that of its column `split`, if there is one, else that of its table.

    Raises:
        ValueError: if it has no known name.
    """
    if "split" not in row:
        return table_split
    if (split := split_named(str(row["split"]))) is None:
        raise ValueError(f"{where} is of the split {row['split']!r}. Known are {', '.join(SPLIT_NAMES)}.")
    return split


def _read_csv(file: Path) -> list[dict[str, Any]]:
    """Reads a table whose columns are parted by commas, semicolons or tabs, whichever its header has most of."""
    lines = _read_text(file).splitlines(keepends=True)
    delimiter = max(DELIMITERS, key=lines[0].count) if lines else ","
    rows = list(csv.DictReader(lines, delimiter=delimiter, skipinitialspace=True))
    # The reader puts what goes beyond the header under the key None, and None into cells that lack.
    if ragged := [number for number, row in enumerate(rows, start=1) if None in row or None in row.values()]:
        raise ValueError(
            f"{file} has {len(ragged)} rows with more or fewer cells than its header; the first is row {ragged[0]}. "
            "Quote cells that hold the delimiter."
        )
    return rows


def _read_jsonl(file: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(_read_text(file).splitlines(), start=1):
        if line.strip():
            try:
                rows.append(dict(json.loads(line)))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{file}, line {number} is no JSON object: {error}.") from error
    return rows


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")  # spreadsheets put a mark in front
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no UTF-8 text: {error}. Save it as UTF-8.") from error


def check_exist(images: list[str]) -> None:
    """Raises `ValueError` if files that tables name do not exist."""
    if missing := [image for image in images if not os.path.isfile(image)]:
        raise ValueError(
            f"{len(missing)} of {len(images)} images do not exist. Paths are relative to the folder of their table. "
            f"They are:{in_lines(missing, MAX_MISSING)}"
        )
