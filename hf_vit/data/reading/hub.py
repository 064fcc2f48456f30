"""Datasets on the Hub."""

import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from datasets import Dataset, DatasetDict, config, load_dataset
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers.utils import logging

from ...model.remote_code import is_repository_available
from .columns import SourceOptions
from .files import joined, visible
from .splits import SPLIT_NAMES, by_split


logger = logging.get_logger(__name__)


def load_from_hub(options: SourceOptions, *, streaming: bool = False) -> DatasetDict:
    """Load or stream a dataset on the Hub, with standard split names."""
    with _explain_missing_dataset(options):
        return standard_splits(load_dataset(options.source, **options.hub, streaming=streaming))


def standard_splits(splits: Mapping[str, Dataset]) -> DatasetDict:
    """Rename splits to "train", "validation" and "test"; ignore splits of other names with a warning."""
    # A single split becomes "train" if its name is unknown.
    found, others = by_split((name, name) for name in splits)
    if not found and len(others) == 1:
        return DatasetDict({"train": splits[others[0]]})
    if not found:
        raise ValueError(
            f"The names of the splits {joined(others)} are unknown. Rename them to one of {', '.join(SPLIT_NAMES)}."
        )
    if others:
        logger.warning("Ignored splits with unknown names: %s.", joined(others))
    return DatasetDict({split: splits[name] for split, name in found.items()})


@contextmanager
def _explain_missing_dataset(options: SourceOptions) -> Iterator[None]:
    """Context manager that adds similar local paths to the error if a dataset is neither on disk nor on the Hub."""
    try:
        validate_repo_id(options.source)
        prepared = Path(config.HF_DATASETS_CACHE, options.source.replace("/", "___"))
        if not prepared.is_dir() and not is_repository_available(options.source, "dataset"):
            raise ConnectionError(f"Cannot reach {options.source!r} on the Hub")
        yield
    except (HFValidationError, FileNotFoundError, ConnectionError) as error:
        raise FileNotFoundError(
            f"There is no file or folder {options.source!r}. {_neighbors(options.path.absolute())} A dataset of this "
            f"name could not be loaded from the Hub either: {error}"
        ) from error


def _neighbors(path: Path) -> str:
    while not path.parent.is_dir():
        path = path.parent
    names = [other.name for other in visible(path.parent.iterdir())]
    near = difflib.get_close_matches(path.name, names)
    if near:
        return f"Did you mean {' or '.join(repr(str(path.parent / name)) for name in near)}?"
    return f"The folder {path.parent} has no {path.name!r}. It contains {joined(names) if names else 'nothing'}."


def class_folder(options: SourceOptions, are_named: object = None) -> Path:
    """Return the folder that may contain a file of class names.

    For a dataset on the Hub, download its id2label.json, unless `are_named` is true because class names are given.
    """
    if options.path.exists() or are_named:
        return options.path.parent if options.path.is_file() else options.path
    try:
        file = hf_hub_download(options.source, "id2label.json", repo_type="dataset", revision=options.dataset_revision)
        return Path(file).parent
    except EntryNotFoundError:
        return options.path
