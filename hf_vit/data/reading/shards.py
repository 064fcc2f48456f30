"""Parquet and tar files that contain the examples of a split together, called shards."""

import glob
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import DatasetDict, load_dataset
from datasets.exceptions import DatasetGenerationError

from .columns import USUAL_NAMES
from .files import joined, subfolders, visible
from .splits import files_by_split


TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz")
KEY, URL = "__key__", "__url__"  # columns that `datasets` adds: the name of an example, and the name of its tar file


def shards_by_split(path: Path, suffixes: tuple[str, ...]) -> dict[str, list[str]]:
    """Find files with one of the suffixes by split: the path itself, or files in a folder and its subfolders."""
    folders = (path, *subfolders(path)) if path.is_dir() else ()
    files = visible(file for folder in folders for file in folder.iterdir()) if folders else [path]
    return files_by_split(path, [file for file in files if file.name.lower().endswith(suffixes) and file.is_file()])


def open_shards(kind: str, files: Mapping[str, list[str]], *, streaming: bool = False) -> DatasetDict:
    """Load or stream files of a kind that `datasets` supports, "parquet" or "webdataset".

    Splits are loaded separately because their columns may differ. Unless tar files are streamed, their content is
    copied into the cache of `datasets`.

    Raises:
        ValueError: if a split cannot be read.
    """
    splits = {}
    for split, names in files.items():
        patterns = [glob.escape(name) for name in names]  # `datasets` would interpret brackets as patterns
        try:
            splits[split] = load_dataset(kind, data_files={split: patterns}, split=split, streaming=streaming)
        except (ValueError, DatasetGenerationError) as error:  # these errors do not name the file
            raise ValueError(
                f"The split {split!r} cannot be read from {joined(names)}: {error.__cause__ or error} Download these "
                "files again, or remove them if they are empty."
            ) from error
    return DatasetDict(splits)


def tar_label(features: Mapping[str, Any]) -> list[str]:
    """Return a list with the label column of tar files: `cls`, a usual name in `json`, or `txt`; empty if none."""
    usual = {f"json.{name}" for name in USUAL_NAMES["label"]}
    candidates = ("cls", *(name for name in features if name.strip().lower() in usual), "txt")
    return [name for name in candidates if name in features][:1] if URL in features else []
