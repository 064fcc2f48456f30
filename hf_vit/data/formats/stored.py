"""Datasets that `datasets` reads: on the Hub, in folders of `save_to_disk`, in parquet files, in tar files.

Tar files are in the format of WebDataset: the files of an example lie side by side, `a/0001.jpg` and `a/0001.cls`.
"""

import difflib
import glob
import tarfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, Image, IterableDataset, config, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from pyarrow import ArrowInvalid, parquet
from transformers.utils import logging

from ...model.remote_code import is_within_reach
from .classes import INTEGERS, names_beside, with_class_column
from .columns import SourceOptions
from .files import (
    SPLIT_NAMES,
    Format,
    files_below,
    files_by_split,
    first_format,
    is_image,
    listed,
    one_per_split,
    raise_faults,
    split_named,
    subfolders,
    visible,
)


logger = logging.get_logger(__name__)
BLOCK = tarfile.BLOCKSIZE
MAX_SECONDS = 60.0  # for all archives of a dataset
CHUNK_BYTES = 2**20


def check_tars(files: Iterable[str], max_seconds: float = MAX_SECONDS) -> None:
    """Read the headers of tar files to their ends, as long as there is time.

    A tar file ends in blocks of zeros. Readers that find no further member stop without an error, even if the file is
    cut or goes on.

    Args:
        files: Paths of tar files, plain or compressed by gzip.
        max_seconds: Time limit. A warning counts the files whose ends were not reached.

    Raises:
        OSError: if a file is cut or damaged, or goes on after its end.
    """
    paths = list(files)
    end = time.monotonic() + max_seconds
    with ThreadPoolExecutor() as threads:
        found = list(threads.map(partial(_fault_of, end=end), paths))
    raise_faults(
        [f"{path}: {fault}" for path, fault in zip(paths, found, strict=True) if fault],
        f"of {len(paths)} tar files are not whole, and readers would skip the missing parts without an error",
        "Get them again, and pack joined ones anew.",
        error=OSError,
    )
    if num_late := found.count(None):
        logger.warning(
            "%d of %d tar files could not be read to their ends in %.0f seconds, so they may be incomplete.",
            *(num_late, len(paths), max_seconds),
        )


def _fault_of(path: str, end: float) -> str | None:
    """Return the fault of a tar file, empty if there is none, or `None` if the time is over before its end."""
    try:
        with tarfile.open(path) as tar:
            while tar.next() is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # which may be millions
                if time.monotonic() > end:
                    return None
            stream, place = tar.fileobj, tar.offset
            assert stream is not None
            stream.seek(place)
            if len(block := stream.read(BLOCK)) < BLOCK or any(block):
                return f"at byte {place} there is neither another member nor the blocks of zeros that end a tar file"
            is_joined = any(chunk.strip(b"\0") for chunk in iter(partial(stream.read, CHUNK_BYTES), b""))
            return f"it goes on after its end at byte {place}, as files do that were joined" if is_joined else ""
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        return f"it is cut or damaged ({error})"


def check_parquet(files: Iterable[str]) -> None:
    """Raise `OSError` for parquet files that are cut or damaged, before a stream reaches them."""
    paths, cut = list(files), []
    for path in paths:
        try:
            parquet.read_metadata(path)
        except (ArrowInvalid, OSError):
            cut.append(path)
    finding, advice = f"of {len(paths)} parquet files are cut or damaged", "Get them again, or leave them out."
    raise_faults(cut, finding, advice, error=OSError)


TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz")
Formats = Iterable[Format[DatasetDict]]
Take = Callable[[Any, str, SourceOptions], Any]
URL = "__url__"  # the column in which `datasets` names the tar file of an example
TAR_LABELS = ("cls", "txt")  # kinds of files in tar files that hold labels


def find_saved(path: Path) -> Path | None:
    """Return a folder if it was written by `Dataset.save_to_disk`."""
    return path if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")) else None


def load_saved(path: Path) -> DatasetDict:
    """Opens a folder written by `Dataset.save_to_disk`, whose splits get their usual names."""
    saved = load_from_disk(path)
    return _standard_splits(saved if isinstance(saved, DatasetDict) else {str(saved.split or "train"): saved})


def load_from_hub(options: SourceOptions, *, streaming: bool = False) -> DatasetDict:
    """Load a dataset on the Hub, or open it as streams, with the usual names of splits."""
    with _explained(options):
        return _standard_splits(load_dataset(options.source, **options.hub, streaming=streaming))


def _standard_splits(splits: dict[str, Dataset]) -> DatasetDict:
    """Renames splits to "train", "validation" and "test" and leaves others out, with a warning."""
    # A single split of another name is what there is to train on.
    others = [name for name in splits if split_named(name) is None]
    if len(splits) == len(others) == 1:
        return DatasetDict({"train": splits[others[0]]})
    if len(splits) == len(others):
        raise ValueError(f"None of the splits {listed(others)} goes by a known name: {', '.join(SPLIT_NAMES)}.")
    if others:
        logger.warning("Left out, as their names are of no known split: %s.", listed(others))
    return DatasetDict(one_per_split((name, split) for name, split in splits.items() if name not in others))


@contextmanager
def _explained(options: SourceOptions) -> Iterator[None]:
    """Names what lies near where a dataset was looked for that is neither here nor on the Hub."""
    try:
        validate_repo_id(options.source)
        prepared = Path(config.HF_DATASETS_CACHE, options.source.replace("/", "___"))
        if not prepared.is_dir() and not is_within_reach(options.source, "dataset"):
            raise ConnectionError(f"Couldn't reach {options.source!r} on the Hub")
        yield
    except (HFValidationError, FileNotFoundError, ConnectionError) as error:
        raise FileNotFoundError(
            f"There is no file or folder {options.source!r}. {_neighbors(options.path.absolute())} Nor did the "
            f"Hub give a dataset of that name: {error}"
        ) from error


def _neighbors(path: Path) -> str:
    while not path.parent.is_dir():
        path = path.parent
    names = [other.name for other in visible(path.parent.iterdir())]
    near = difflib.get_close_matches(path.name, names)
    if near:
        return f"Did you mean {' or '.join(repr(str(path.parent / name)) for name in near)}?"
    return f"In {path.parent} there is no {path.name!r}, but {listed(names) if names else 'nothing'}."


def class_folder(options: SourceOptions, are_named: object = None) -> Path:
    """Returns where a file may name the classes; from the Hub, id2label.json is downloaded unless they are named."""
    if options.path.exists() or are_named:
        return options.path.parent if options.path.is_file() else options.path
    try:
        file = hf_hub_download(options.source, "id2label.json", repo_type="dataset", revision=options.dataset_revision)
        return Path(file).parent
    except EntryNotFoundError:
        return options.path


def find_parquet(path: Path) -> dict[str, list[str]]:
    """Finds a parquet file, or those in a folder or one below, by split; see `files_by_split`."""
    return files_by_split(path, _files_that_end(path, (".parquet",)))


def find_tars(path: Path) -> dict[str, list[str]]:
    """Finds a tar file, or those in a folder or one below, by split; none beside images, which they may archive."""
    files = _files_that_end(path, TAR_SUFFIXES)
    has_images = bool(files) and path.is_dir() and any(is_image(file) for file in files_below(path))
    return {} if has_images else files_by_split(path, files)


def _files_that_end(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Return a file, or the visible files in a folder or one below, whose names end in one of the suffixes."""
    folders = (path, *subfolders(path)) if path.is_dir() else ()
    files = visible(file for folder in folders for file in folder.iterdir()) if folders else [path]
    return [file for file in files if file.name.lower().endswith(suffixes) and file.is_file()]


def find_shards(path: Path) -> tuple[str, dict[str, list[str]]]:
    """Find parquet files, or else tar files; return the kind as `load_files` takes it, and the files by split."""
    files = find_parquet(path)
    return ("parquet", files) if files else ("webdataset", find_tars(path))


def load_files(kind: str, files: Mapping[str, list[str]], *, streaming: bool = False) -> DatasetDict:
    """Read files of a kind, "parquet" or "webdataset", each split by itself, so that their columns may differ.

    `OSError` is raised for tar files, and for parquet files that are read as streams, that are cut or damaged. Unless
    tar files are read as streams, their content is copied into the cache of `datasets`.
    """
    if kind == "webdataset" or streaming:
        (check_tars if kind == "webdataset" else check_parquet)(chain.from_iterable(files.values()))
    splits = {}
    for split, names in files.items():
        patterns = [glob.escape(name) for name in names]  # brackets in a path are no pattern
        try:
            rows = load_dataset(kind, data_files={split: patterns}, split=split, streaming=streaming)
        except (ValueError, DatasetGenerationError) as error:  # they do not say which file it is
            raise ValueError(
                f"The split {split!r} cannot be read from {listed(names)}: {error.__cause__ or error} Get these files "
                "again, or leave them out if they are empty."
            ) from error
        splits[split] = _with_tar_names(rows) if streaming and kind == "webdataset" else rows
    return DatasetDict(splits)


def _with_tar_names(stream: IterableDataset) -> IterableDataset:
    """Return a stream whose images, which are not decoded, have the names of their tar files in their paths."""
    images = [name for name, feature in stream.features.items() if isinstance(feature, Image)]
    for name in images:
        stream = stream.cast_column(name, Image(decode=False))
    return stream.map(partial(_with_tar_name, images=images), features=stream.features)


def _with_tar_name(row: dict[str, Any], images: list[str]) -> dict[str, Any]:
    named = {name: row[name] and row[name] | {"path": f"{row[URL]}: {row[name]['path']}"} for name in images}
    return row | named


def load_shards(kind: str, files: Mapping[str, list[str]], options: SourceOptions) -> DatasetDict:
    """Read what `find_shards` finds; in tar files, numbers in `.cls` are classes if a file names them."""
    splits = load_files(kind, files)
    names = names_beside([class_folder(options)]) if kind == "webdataset" else []
    for split, rows in splits.items():
        if names and rows.features.get("cls") in INTEGERS:
            splits[split] = with_class_column(rows, "cls", rows["cls"][:], names)
    return splits


# Pairs of a function that recognizes a format and one that reads it, in the order in which they are tried
COLUMN_FORMATS = ((find_parquet, partial(load_files, "parquet")), (find_saved, load_saved))


def load_columns(options: SourceOptions, formats: Formats = COLUMN_FORMATS) -> DatasetDict | None:
    """Load from the Hub if there is no such path, else in the first format that is recognized; `None` if none is."""
    if not options.path.exists():
        return load_from_hub(options)
    options.check_no_hub_options()
    return first_format(options.path, formats)


def load_splits(
    options: SourceOptions, take: Take, others: Formats, problem: str, columns: Formats = COLUMN_FORMATS
) -> DatasetDict:
    """Load a dataset in the first format that is recognized, or from the Hub.

    Args:
        options: Where the dataset is, and which columns to take.
        take: Reduces a split from the Hub, or of a format in `columns`, to the columns of its images and targets. It
            also gets the name of the split, and `options`.
        others: Formats that are tried after `columns`, and whose readers return such columns themselves.
        problem: What is wrong with a path of no known format, and what to do, for the error after its name.
        columns: Formats whose columns have any names.
    """
    if (splits := load_columns(options, columns)) is not None:
        return take_from(splits, take, options)
    if (found := first_format(options.path, others)) is None:
        raise ValueError(f"{options.path} {problem}")
    return found


def take_from(splits: Mapping[str, Any], take: Take, options: SourceOptions) -> DatasetDict:
    """Reduce datasets or streams by split to their images and targets, see `load_splits`."""
    return DatasetDict({name: take(split, name, options) for name, split in splits.items()})


def open_streams(options: SourceOptions) -> DatasetDict:
    """Open a dataset on the Hub, or parquet or tar files on disk, to be read while used; empty for other data."""
    if not options.path.exists():
        return load_from_hub(options, streaming=True)
    kind, files = find_shards(options.path)
    if files:
        options.check_no_hub_options()
    return load_files(kind, files, streaming=True)
