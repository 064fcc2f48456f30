"""Parquet files as repositories on the Hub hold them."""

import glob
from pathlib import Path

from datasets import Dataset, DatasetDict, load_dataset
from datasets.exceptions import DatasetGenerationError

from ..messages import listed
from .splits import files_by_split, split_within


def find_parquet(path: Path) -> dict[str, list[str]]:
    """Finds parquet files.

    Args:
        path: A parquet file, or the folder that holds them, or one above it.

    Returns:
        The files by split, a word of the file's name or else of its folder's. If none has such a name, all are
        "train"; if some have, the others are left out with a warning. Nothing if there are none.
    """
    if path.is_file():
        return {split_within(path.stem) or "train": [str(path)]} if path.suffix.lower() == ".parquet" else {}
    return files_by_split(path, sorted((*path.glob("*.parquet"), *path.glob("*/*.parquet"))))


def load_parquet(files: dict[str, list[str]]) -> DatasetDict:
    """Reads parquet files, each split by itself, so that their columns may differ.

    Args:
        files: Paths by split.

    Returns:
        Splits with the columns of the files.

    Raises:
        ValueError: if files are damaged, empty or do not go together.
    """
    return load_files("parquet", files)


def load_files(kind: str, files: dict[str, list[str]]) -> DatasetDict:
    """Reads files of a kind that `datasets` knows; see `load_parquet`."""
    return DatasetDict({split: _load_split(kind, split, names) for split, names in files.items()})


def _load_split(kind: str, split: str, names: list[str]) -> Dataset:
    patterns = [glob.escape(name) for name in names]  # brackets in a path are no pattern
    try:
        return load_dataset(kind, data_files={split: patterns}, split=split)
    except (ValueError, DatasetGenerationError) as error:  # they do not say which file it is
        raise ValueError(
            f"The split {split!r} cannot be read from {listed(names)}: {error.__cause__ or error} Get these files "
            "anew, or leave them out if they are empty."
        ) from error
