"""Datasets that `datasets` itself opens: on the Hub, in parquet files, and in folders of `Dataset.save_to_disk`."""

import difflib
import glob
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from datasets import (
    DatasetDict,
    IterableDataset,
    load_dataset,
    load_from_disk,
)
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from ..messages import listed
from .parquet import find_parquet, load_parquet
from .splits import standard_splits
from .tar_shards import find_tars


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
    with _explained(source):
        return standard_splits(load_dataset(source, config_name, revision=revision))


def stream_from_hub(source: str, config_name: str | None, revision: str | None) -> dict[str, IterableDataset]:
    """Opens a dataset on the Hub that is read while it is used; otherwise as `load_from_hub`."""
    with _explained(source):
        return standard_splits(load_dataset(source, config_name, revision=revision, streaming=True))


def stream_from_disk(path: Path) -> dict[str, IterableDataset]:
    """Opens parquet files or tar shards that are read while they are used.

    Returns:
        Splits with the columns of the files; nothing if there are no such files.

    Raises:
        ValueError: if the first tar shard is not in the format of WebDataset.
    """
    kind, files = "parquet", find_parquet(path)
    if not files:
        kind, files = "webdataset", find_tars(path)
    return {
        name: load_dataset(kind, data_files={name: list(map(glob.escape, found))}, split=name, streaming=True)
        for name, found in files.items()
    }


@contextmanager
def _explained(source: str) -> Iterator[None]:
    """Says what lies near where a dataset was looked for that is neither here nor on the Hub."""
    try:
        validate_repo_id(source)
        yield
    except (HFValidationError, FileNotFoundError, ConnectionError) as error:
        raise FileNotFoundError(
            f"There is no file or folder {source!r}. {_neighbors(Path(source).expanduser().absolute())} Nor did the "
            f"Hub give a dataset of that name: {error}"
        ) from error


def id2label_on_hub(source: str, revision: str | None) -> str | None:
    """Returns the file in a dataset's repository that names its classes, if it has one."""
    try:
        return str(hf_hub_download(source, "id2label.json", repo_type="dataset", revision=revision))
    except EntryNotFoundError:
        return None


def load_columns(source: str, config_name: str | None, revision: str | None) -> DatasetDict | None:
    """Loads parquet files, a folder written by `Dataset.save_to_disk`, or, if there is no such path, from the Hub.

    Args:
        source: Path, or name on the Hub.
        config_name: As in `load_from_hub`.
        revision: As in `load_from_hub`.

    Returns:
        Its splits; `None` if the path holds something else.

    Raises:
        FileNotFoundError: if `source` is neither a path nor a name on the Hub.
        ValueError: if files are damaged, no split goes by a known name, or an option is for the Hub alone.
    """
    path = Path(source).expanduser()
    if not path.exists():
        return load_from_hub(source, config_name, revision)
    check_on_disk(path, config_name, revision)
    if parquet_files := find_parquet(path):
        return load_parquet(parquet_files)
    return load_saved(path) if is_saved(path) else None


def check_on_disk(path: Path, config_name: str | None, revision: str | None) -> None:
    """Raises `ValueError` if something that is for the Hub is asked of data that lie on disk."""
    check_revision(path, revision)
    if config_name is not None:
        raise ValueError(f"dataset_config_name={config_name!r} chooses on the Hub, but {path} is here. Leave it out.")


def check_revision(path: Path, revision: str | None) -> None:
    """Raises `ValueError` if a revision is asked of data that lie on disk."""
    if revision is not None:
        raise ValueError(
            f"dataset_revision={revision!r} is for datasets on the Hub, but {path} is here. Leave it out."
        )


def _neighbors(path: Path) -> str:
    """Says what lies where `path` was looked for."""
    while not path.parent.is_dir():
        path = path.parent
    names = sorted(other.name for other in path.parent.iterdir() if not other.name.startswith("."))
    near = difflib.get_close_matches(path.name, names)
    if near:
        return f"Did you mean {' or '.join(repr(str(path.parent / name)) for name in near)}?"
    return f"In {path.parent} there is no {path.name!r}, but {listed(names) if names else 'nothing'}."


NUM_SHARDS = 64  # of files on disk: at most so many worker processes share them
