"""Names of splits: what a folder, a file or a split on the Hub says about its part in a training."""

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from datasets import Dataset, DatasetDict
from transformers.utils import logging

from ..messages import listed


logger = logging.get_logger(__name__)
T = TypeVar("T")
SPLITS = ("train", "validation", "test")
SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
}


def split_named(name: str) -> str | None:
    """Returns the split that is called `name`, as "validation" is "val", or `None` if none is."""
    return SPLIT_NAMES.get(name.strip().lower())


def split_within(name: str) -> str | None:
    """Returns the split that is a word of `name`, as in "train-00000-of-00001", or `None` if none is."""
    return next((SPLIT_NAMES[word] for word in re.split(r"[\W_]+", name.lower()) if word in SPLIT_NAMES), None)


def one_per_split(named: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Sorts things by the split they are called, in the order train, validation, test.

    Args:
        named: Pairs of a name that `split_named` knows and what goes by it.

    Raises:
        ValueError: if two names mean the same split.
    """
    names: dict[str, str] = {}
    things: dict[str, T] = {}
    for name, thing in named:
        split = SPLIT_NAMES[name.strip().lower()]
        if split in names:
            raise ValueError(f"{names[split]!r} and {name!r} both mean the split {split!r}. Keep one of them.")
        names[split], things[split] = name, thing
    return {split: things[split] for split in SPLITS if split in things}


def files_by_split(folder: Path, files: Iterable[Path]) -> dict[str, list[str]]:
    """Sorts files by the split that is a word of their name, or else of that of their folder, below `folder`.

    Returns:
        Paths by split. If none has such a name, all are "train"; if some have, the others are left out with a warning.
        Nothing if there are none.
    """
    found: dict[str | None, list[str]] = defaultdict(list)
    for file in files:
        parent = "" if file.parent == folder else file.parent.name
        found[split_within(file.stem) or split_within(parent)].append(str(file))
    others = found.pop(None, [])
    if not found:
        return {"train": others} if others else {}
    if others:
        logger.warning("Left out, as their names say no split: %s.", listed(others))
    return {split: found[split] for split in SPLITS if split in found}


def standard_splits(splits: dict[str, Dataset]) -> DatasetDict:
    """Renames splits to "train", "validation" and "test" and leaves others out, with a warning.

    A single split of another name is what there is to train on.

    Raises:
        ValueError: if there are several splits and none goes by a known name, or two by the same.
    """
    others = [name for name in splits if split_named(name) is None]
    if len(splits) == len(others) == 1:
        return DatasetDict({"train": splits[others[0]]})
    if len(splits) == len(others):
        raise ValueError(f"None of the splits {listed(others)} goes by a known name: {', '.join(SPLIT_NAMES)}.")
    if others:
        logger.warning("Left out, as their names are of no known split: %s.", listed(others))
    return DatasetDict(one_per_split((name, split) for name, split in splits.items() if name not in others))
