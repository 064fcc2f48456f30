"""Parquet files as repositories on the Hub hold them."""

import glob
from collections import defaultdict
from pathlib import Path

from datasets import Dataset, DatasetDict, load_dataset
from datasets.exceptions import DatasetGenerationError
from transformers.utils import logging

from .splits import SPLITS, split_within
from .wording import listed


logger = logging.get_logger(__name__)


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
    files: dict[str | None, list[str]] = defaultdict(list)
    for file in sorted((*path.glob("*.parquet"), *path.glob("*/*.parquet"))):
        folder = "" if file.parent == path else file.parent.name
        files[split_within(file.stem) or split_within(folder)].append(str(file))
    others = files.pop(None, [])
    if not files:
        return {"train": others} if others else {}
    if others:
        logger.warning("Left out, as their names say no split: %s.", listed(others))
    return {split: files[split] for split in SPLITS if split in files}


def load_parquet(files: dict[str, list[str]]) -> DatasetDict:
    """Reads parquet files, each split by itself, so that their columns may differ.

    Args:
        files: Paths by split.

    Returns:
        Splits with the columns of the files.

    Raises:
        ValueError: if files are damaged, empty or do not go together.
    """
    return DatasetDict({split: _load_split(split, names) for split, names in files.items()})


def _load_split(split: str, names: list[str]) -> Dataset:
    patterns = [glob.escape(name) for name in names]  # brackets in a path are no pattern
    try:
        return load_dataset("parquet", data_files={split: patterns}, split=split)
    except (ValueError, DatasetGenerationError) as error:  # they do not say which file it is
        raise ValueError(
            f"The split {split!r} cannot be read from {listed(names)}: {error.__cause__ or error} Get these files "
            "anew, or leave them out if they are empty."
        ) from error
