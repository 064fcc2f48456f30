"""Tables of image paths and targets: CSV, TSV and JSON lines."""

from pathlib import Path

from ..reading.columns import TableRow, read_rows
from ..reading.files import TABLE_SUFFIXES, Ignored, joined, list_tables
from ..reading.match import Match, Target
from ..reading.splits import by_split, find_split_folders, is_split, split_of


# Names of tables in the folder of their images: `datasets`, and the multi-label export of Roboflow
FOLDER_TABLES = ("metadata", "_classes")


def detect(path: Path, target: Target) -> Match | None:
    """Find a table, or `train.csv`, `test.csv`, ..., or `train/metadata.csv`, ..., or `metadata.csv` in a folder."""
    if path.is_file():
        is_table = path.suffix.lower() in TABLE_SUFFIXES
        return Match({split_of(path.stem) or "train": path}, path.name) if is_table else None
    tables = list_tables(path)
    found, others = by_split((table.stem, table) for table in tables)
    is_exact = all(is_split(table.stem) for table in found.values())
    if not (found and is_exact) and (own := _in_split_folders(path) or _whole(tables)):
        found, others, is_exact = own, [table for table in tables if table not in own.values()], True
    if found:
        names = joined([table.relative_to(path).as_posix() for table in found.values()])
        return Match(found, f"tables {names}", ignored=_ignored(path, others), rank=0 if is_exact else 3)
    if not tables:
        return None
    names = " or ".join(repr(str(table)) for table in tables)
    doubt = f"contains a table without a split in its name. Give the path of the table: {names}."
    is_clear = target == "points" and len(tables) == 1
    return Match({"train": tables[0]}, tables[0].name, "" if is_clear else doubt, _ignored(path, tables[1:]))


def _in_split_folders(path: Path) -> dict[str, Path]:
    folders = find_split_folders(path, is_divided=_tables_in, is_data=_tables_in).folders
    found = {split: tables for split, folder in folders.items() if (tables := _tables_in(folder))}
    return {split: tables[0] for split, tables in found.items()}


def _tables_in(folder: Path) -> list[Path]:
    return _named(list_tables(folder))


def _named(tables: list[Path]) -> list[Path]:
    return [table for name in FOLDER_TABLES for table in tables if table.stem == name]


def _whole(tables: list[Path]) -> dict[str, Path]:
    return {"train": found[0]} if (found := _named(tables)) else {}


def _ignored(path: Path, tables: list[Path]) -> Ignored:
    return ((f"tables in {path}", "their names contain no split", [table.name for table in tables]),)


def read(match: Match) -> list[list[TableRow]]:
    """Read the rows of all tables. Image paths are relative to the folder of their table."""
    return [read_rows(table, split, match.options) for split, table in match.files.items()]
