"""Folders written by `Dataset.save_to_disk`."""

from pathlib import Path

from datasets import DatasetDict, load_from_disk

from ..reading.hub import standard_splits
from ..reading.match import Match, Target


def detect(path: Path, target: Target) -> Match | None:
    """Find the description that `save_to_disk` writes."""
    name = next((name for name in ("dataset_dict.json", "state.json") if (path / name).is_file()), None)
    return Match(path, name) if name else None


def read(match: Match) -> DatasetDict:
    """Read all columns of all splits."""
    saved = load_from_disk(match.files)
    return standard_splits(saved if isinstance(saved, DatasetDict) else {str(saved.split or "train"): saved})
