"""Tables of paths beside labels, captions or keypoints: CSV, TSV and JSON lines."""

import csv
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from datasets import DatasetDict

from .columns import USUAL_NAMES, SourceOptions
from .files import (
    SPLIT_NAMES,
    SPLITS,
    images_at,
    listed,
    one_per_split,
    raise_faults,
    split_named,
    split_within,
    visible,
)
from .text import parse_json, read_text


TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl")
DELIMITERS = ",;\t"


def list_tables(folder: Path) -> list[Path]:
    """Lists the tables of a folder, whatever their names."""
    return [table for suffix in TABLE_SUFFIXES for table in visible(folder.glob(f"*{suffix}"))]


def find_tables(path: Path) -> dict[str, Path]:
    """Finds tables by split, "train" where a name says none, at a path or in its folder."""
    # Folders have train.csv, test.csv, ..., or train/metadata.csv, ..., or metadata.csv.
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


@dataclass(frozen=True)
class TableRow:
    """A row of a table: the path of its image, values by column, and the number, for errors, in `where`."""

    split: str
    image: str
    cells: Mapping[str, Any]
    where: str


def read_rows(table: Path, table_split: str, options: SourceOptions) -> list[TableRow]:
    """Reads the rows of a table with a column of paths, relative to its folder, and maybe `split`."""
    rows = read_table(table)
    column = options.choose("image", list(dict.fromkeys(chain.from_iterable(rows))), str(table))
    folder = table.parent.absolute()  # the dataset outlives the working directory
    found = []
    for number, cells in enumerate(rows, start=1):
        where, split = f"{table}, row {number}", table_split
        if "split" in cells:
            named = split_named(str(cells["split"]))
            if named is None:
                raise ValueError(f"{where}, is of the split {cells['split']!r}. Known are {', '.join(SPLIT_NAMES)}.")
            split = named
        found.append(TableRow(split, str(folder / str(cells.get(column) or "")), cells, where))
    return found


def columns_of(rows: Iterable[TableRow]) -> list[str]:
    """Returns the columns that any row has."""
    return list(dict.fromkeys(column for row in rows for column in row.cells))


def load_tables(
    tables: Mapping[str, Path],
    options: SourceOptions,
    kind: str,
    read_cell: Callable[[Any, str], Any],
    feature: Any,
    *,
    prefers_lists: bool = False,
) -> DatasetDict:
    """Read `image` (paths that are opened on access) and a column called `kind` from tables by split.

    Args:
        tables: Paths by split.
        options: The columns to take.
        kind: A key of `USUAL_NAMES`.
        read_cell: Returns the value of a cell; its second argument begins error messages.
        feature: Type of the values.
        prefers_lists: Whether of several columns with usual names, those of lists are taken.
    """
    images, values = defaultdict[str, list[str]](list), defaultdict[str, list[Any]](list)
    for table_split, table in tables.items():
        rows = read_rows(table, table_split, options)
        columns = columns_of(rows)
        usual = [column for column in columns if column.strip().lower() in USUAL_NAMES[kind]]
        lists = [column for column in usual if prefers_lists and isinstance(rows[0].cells.get(column), list)]
        column = options.choose(kind, columns, str(table), by_type=lists)
        for row in rows:
            images[row.split].append(row.image)
            values[row.split].append(read_cell(row.cells.get(column), f"{row.where},"))
    check_exist([image for paths in images.values() for image in paths])
    known = [split for split in SPLITS if split in images]
    return DatasetDict({name: images_at(images[name], name, **{kind: (values[name], feature)}) for name in known})


def check_exist(images: Collection[str]) -> None:
    """Raise `ValueError` if files that tables name do not exist."""
    raise_faults(
        [image for image in images if not os.path.isfile(image)],
        f"of {len(images)} images do not exist. Paths are relative to the folder of their table. They are",
    )


def read_table(table: Path) -> list[dict[str, Any]]:
    """Reads the cells of a table, of which there is at least one row."""
    text = read_text(table)
    rows = list(_parse_jsonl(text, table)) if table.suffix.lower() == ".jsonl" else _parse_csv(text, table)
    if not rows:
        raise ValueError(f"{table} has no rows. Fill it or leave it out.")
    return rows


def _parse_csv(text: str, file: Path) -> list[dict[str, Any]]:
    """Parses columns parted by commas, semicolons or tabs, whichever the header has most of."""
    lines = text.splitlines(keepends=True)
    delimiter = max(DELIMITERS, key=lines[0].count) if lines else ","
    reader = csv.DictReader(lines, delimiter=delimiter, skipinitialspace=True)
    header = list(filter(None, reader.fieldnames or ()))
    if several := sorted({name for name in header if header.count(name) > 1}):
        raise ValueError(f"{file} has several columns called {listed(several)}. Rename or remove the others.")
    rows = list(reader)
    # The reader puts what goes beyond the header under the key None, and None into cells that lack.
    if ragged := [number for number, row in enumerate(rows, start=1) if None in row or None in row.values()]:
        raise ValueError(
            f"{file} has {len(ragged)} rows with more or fewer cells than its header; the first is row {ragged[0]}. "
            "Quote cells that hold the delimiter."
        )
    return rows


def _parse_jsonl(text: str, file: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                yield dict(parse_json(line))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{file}, line {number} is no JSON object: {error}.") from error
