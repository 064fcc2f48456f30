"""Data sets that `datasets` itself has written: on the Hub, and in folders of `Dataset.save_to_disk`."""

import difflib
from pathlib import Path

from datasets import DatasetDict, load_dataset, load_from_disk
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from .splits import standard_splits
from .wording import listed


def is_saved(path: Path) -> bool:
    """Returns whether a path is a folder written by `Dataset.save_to_disk`."""
    return any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))


def load_saved(path: Path) -> DatasetDict:
    """Opens a folder written by `Dataset.save_to_disk`.

    Returns:
        Its splits, called "train", "validation" and "test".

    Raises:
        ValueError: if no split goes by a known name, or two by the same.
    """
    saved = load_from_disk(path)
    return standard_splits(saved if isinstance(saved, DatasetDict) else {str(saved.split or "train"): saved})


def load_from_hub(source: str, config_name: str | None, revision: str | None) -> DatasetDict:
    """Loads a dataset on the Hub.

    Args:
        source: Its name, which is also that of a path where nothing lies.
        config_name: Which of its configurations, if it has several.
        revision: Branch, tag or commit.

    Returns:
        Its splits, called "train", "validation" and "test".

    Raises:
        FileNotFoundError: if there is none of that name.
        ValueError: if no split goes by a known name, or two by the same.
    """
    try:
        validate_repo_id(source)
        return standard_splits(load_dataset(source, config_name, revision=revision))
    except (HFValidationError, FileNotFoundError, ConnectionError) as error:
        raise FileNotFoundError(
            f"There is no file or folder {source!r}. {_neighbours(Path(source).expanduser().absolute())} Nor did the "
            f"Hub give a dataset of that name: {error}"
        ) from error


def check_revision(path: Path, revision: str | None) -> None:
    """Raises `ValueError` if a revision is asked of data that lie on disk."""
    if revision is not None:
        raise ValueError(
            f"dataset_revision={revision!r} is for datasets on the Hub, but {path} is here. Leave it out."
        )


def _neighbours(path: Path) -> str:
    """Says what lies where `path` was looked for."""
    while not path.parent.is_dir():
        path = path.parent
    names = sorted(other.name for other in path.parent.iterdir() if not other.name.startswith("."))
    near = difflib.get_close_matches(path.name, names)
    if near:
        return f"Did you mean {' or '.join(repr(str(path.parent / name)) for name in near)}?"
    return f"In {path.parent} there is no {path.name!r}, but {listed(names) if names else 'nothing'}."
