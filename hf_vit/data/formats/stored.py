"""Reader of formats that `datasets` supports: datasets on the Hub, `save_to_disk` folders, parquet files, tar files.

Tar files are in WebDataset format: the files of an example have the same stem, such as `a/0001.jpg` and `a/0001.cls`.
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
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, Features, Image, IterableDataset, config, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from pyarrow import ArrowInvalid, parquet
from transformers.utils import logging

from ...model.remote_code import is_repository_available
from .classes import INTEGERS, read_class_names, with_class_column
from .columns import USUAL_NAMES, SourceOptions
from .files import (
    SPLIT_NAMES,
    Format,
    by_unique_split,
    files_below,
    files_by_split,
    first_format,
    is_image,
    joined,
    parse_json,
    raise_faults,
    split_from_alias,
    subfolders,
    visible,
)


logger = logging.get_logger(__name__)
BLOCK = tarfile.BLOCKSIZE
MAX_SECONDS = 60.0  # time limit for checking all tar files of a dataset
CHUNK_BYTES = 2**20


def check_tars(files: Iterable[str], max_seconds: float = MAX_SECONDS) -> None:
    """Check that tar files are complete, by reading the headers of all members.

    A tar file ends with blocks of zeros. Readers that find no further member stop without an error, even if the file
    is truncated or more data follow, as in concatenated files.

    Args:
        files: Paths of tar files, uncompressed or compressed with gzip.
        max_seconds: Time limit. Afterwards, only the last block of the remaining uncompressed files is checked, and a
            warning reports the number of files that were not read completely.

    Raises:
        OSError: if a file is truncated or damaged, or contains data after its end marker.
    """
    paths = list(files)
    end = time.monotonic() + max_seconds
    with ThreadPoolExecutor() as threads:
        found = list(threads.map(partial(_fault_of, end=end), paths))
    raise_faults(
        [f"{path}: {fault}" for path, fault in zip(paths, found, strict=True) if fault],
        f"of {len(paths)} tar files are incomplete, so some of their examples would be skipped without an error",
        "Download damaged files again. Repack files that were concatenated.",
        error=OSError,
    )
    if num_late := found.count(None):
        logger.warning(
            "%d of %d tar files could not be checked completely in %.0f seconds, so they may be incomplete.",
            *(num_late, len(paths), max_seconds),
        )


def _fault_of(path: str, end: float) -> str | None:
    """Describe the error in a tar file: an empty string if there is none, `None` if the time limit was exceeded."""
    try:
        with tarfile.open(path) as tar:
            stream = tar.fileobj
            assert stream is not None
            if isinstance(stream, BufferedReader):  # only uncompressed files are opened in this way
                stream.seek(-BLOCK, 2)
                if stream.read().strip(b"\0"):
                    return "it does not end with the blocks of zeros of a tar file"
            while tar.next() is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # saves memory if there are millions of members
                if time.monotonic() > end:
                    return None
            place = tar.offset
            stream.seek(place)
            if len(block := stream.read(BLOCK)) < BLOCK or any(block):
                return f"at byte {place} there is neither another member nor the blocks of zeros of the end"
            is_joined = any(chunk.strip(b"\0") for chunk in iter(partial(stream.read, CHUNK_BYTES), b""))
            return f"it has more data after its end at byte {place}, as concatenated files do" if is_joined else ""
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        return f"it is truncated or damaged ({error})"


def check_parquet(files: Iterable[str]) -> None:
    """Raise `OSError` if parquet files are truncated or damaged, before they are streamed."""
    paths, cut = list(files), []
    for path in paths:
        try:
            parquet.read_metadata(path)
        except (ArrowInvalid, OSError):
            cut.append(path)
    finding, advice = f"of {len(paths)} parquet files are truncated or damaged", "Download them again or remove them."
    raise_faults(cut, finding, advice, error=OSError)


def check_classes(files: Iterable[str]) -> None:
    """Raise `ValueError` if the parquet files of a split have different class names or another order of them.

    `datasets` reads the class numbers of all files with the class names of the first file.
    """
    known: dict[str, tuple[str, str]] = {}  # type of each column, and the first file that contains it
    for path in files:
        for name, feature in Features.from_arrow_schema(parquet.read_schema(path)).items():
            kind, first = known.setdefault(name, (str(feature), path))
            if kind != str(feature) and "ClassLabel(" in kind and "ClassLabel(" in str(feature):
                raise ValueError(
                    f"The class names of the column {name!r} in {path} differ from those in {first}, or have another "
                    "order. Write all files of a split with the same class names in the same order."
                )


TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz")
Formats = Iterable[Format[DatasetDict]]
Take = Callable[[Any, str, SourceOptions], Any]
KEY, URL = "__key__", "__url__"  # columns that `datasets` adds: the name of an example, and the name of its tar file


def find_saved(path: Path) -> Path | None:
    """Return the folder if it was written by `Dataset.save_to_disk`, otherwise `None`."""
    return path if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")) else None


def load_saved(path: Path) -> DatasetDict:
    """Load a folder written by `Dataset.save_to_disk`, with standard split names."""
    saved = load_from_disk(path)
    return _standard_splits(saved if isinstance(saved, DatasetDict) else {str(saved.split or "train"): saved})


def load_from_hub(options: SourceOptions, *, streaming: bool = False) -> DatasetDict:
    """Load or stream a dataset on the Hub, with standard split names."""
    with _explain_missing_dataset(options):
        return _standard_splits(load_dataset(options.source, **options.hub, streaming=streaming))


def _standard_splits(splits: dict[str, Dataset]) -> DatasetDict:
    """Rename splits to "train", "validation" and "test"; ignore splits of other names with a warning."""
    # A single split becomes "train", regardless of its name.
    others = [name for name in splits if split_from_alias(name) is None]
    if len(splits) == len(others) == 1:
        return DatasetDict({"train": splits[others[0]]})
    if len(splits) == len(others):
        raise ValueError(
            f"The names of the splits {joined(others)} are unknown. Rename them to one of {', '.join(SPLIT_NAMES)}."
        )
    if others:
        logger.warning("Ignored splits with unknown names: %s.", joined(others))
    return DatasetDict(by_unique_split((name, split) for name, split in splits.items() if name not in others))


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


def find_parquet(path: Path) -> dict[str, list[str]]:
    """Find parquet files by split: the path itself, or files in a folder and its subfolders; see `files_by_split`."""
    return files_by_split(path, _files_that_end(path, (".parquet",)))


def find_tars(path: Path) -> dict[str, list[str]]:
    """Find tar files by split, as in `find_parquet`. Tar files next to images may be archives and are ignored."""
    files = _files_that_end(path, TAR_SUFFIXES)
    has_images = bool(files) and path.is_dir() and any(is_image(file) for file in files_below(path))
    return {} if has_images else files_by_split(path, files)


def _files_that_end(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the files with one of the suffixes: the path itself, or visible files in a folder and its subfolders."""
    folders = (path, *subfolders(path)) if path.is_dir() else ()
    files = visible(file for folder in folders for file in folder.iterdir()) if folders else [path]
    return [file for file in files if file.name.lower().endswith(suffixes) and file.is_file()]


def find_shards(path: Path) -> tuple[str, dict[str, list[str]]]:
    """Find parquet files, or otherwise tar files; return the `kind` argument of `load_files`, and files by split."""
    files = find_parquet(path)
    return ("parquet", files) if files else ("webdataset", find_tars(path))


def load_files(kind: str, files: Mapping[str, list[str]], *, streaming: bool = False) -> DatasetDict:
    """Load or stream files of a kind, "parquet" or "webdataset".

    Splits are loaded separately because their columns may differ. Unless tar files are streamed, their content is
    copied into the cache of `datasets`.

    Raises:
        OSError: if a tar file, or a streamed parquet file, is truncated or damaged.
        ValueError: if a split cannot be read, or its parquet files number their classes differently.
    """
    if kind == "webdataset" or streaming:
        (check_tars if kind == "webdataset" else check_parquet)(chain.from_iterable(files.values()))
    splits = {}
    for split, names in files.items():
        patterns = [glob.escape(name) for name in names]  # `datasets` would interpret brackets as patterns
        try:
            rows = load_dataset(kind, data_files={split: patterns}, split=split, streaming=streaming)
        except (ValueError, DatasetGenerationError) as error:  # these errors do not name the file
            raise ValueError(
                f"The split {split!r} cannot be read from {joined(names)}: {error.__cause__ or error} Download these "
                "files again, or remove them if they are empty."
            ) from error
        if kind == "parquet":
            check_classes(names)
        splits[split] = rows if kind != "webdataset" else _flat_stream(rows) if streaming else rows.flatten()
    return DatasetDict(splits)


def _flat_stream(stream: IterableDataset) -> IterableDataset:
    """Flatten the JSON column of a stream of tar files to `json.label`, ..., and add tar file names to image paths."""
    features = dict(stream.features)
    images = [name for name, feature in features.items() if isinstance(feature, Image)]
    inner = features.pop("json") if isinstance(features.get("json"), dict) else {}
    flat = {f"json.{name}": feature for name, feature in inner.items()}
    for name in images:
        stream = stream.cast_column(name, Image(decode=False))
        features[name] = Image(decode=False)
    return stream.map(
        partial(_flat_row, images=images, inner=list(inner)),
        remove_columns=["json"] if inner else [],
        features=Features(features | flat),
    )


def _flat_row(row: dict[str, Any], images: list[str], inner: list[str]) -> dict[str, Any]:
    if not any(row[name] for name in images):
        raise ValueError(
            f"{row[URL]}: {row[KEY]} has no image ({' or '.join(images)}). Add one, or remove the example."
        )
    named = {name: row[name] and row[name] | {"path": f"{row[URL]}: {row[name]['path']}"} for name in images}
    return row | named | {f"json.{name}": (row["json"] or {}).get(name) for name in inner}


def tar_label(features: Mapping[str, Any]) -> list[str]:
    """Return a list with the label column of tar files: `cls`, a usual name in `json`, or `txt`; empty if none."""
    usual = {f"json.{name}" for name in USUAL_NAMES["label"]}
    candidates = ("cls", *(name for name in features if name.strip().lower() in usual), "txt")
    return [name for name in candidates if name in features][:1] if URL in features else []


def read_labels(kind: str, files: Iterable[str], column: str) -> Iterator[object]:
    """Yield the labels in files found by `find_shards`, without reading the images."""
    for file in files:
        if kind == "parquet":
            yield from parquet.ParquetFile(file).read([column])[column].to_pylist()
        else:
            yield from _read_tar_labels(file, *column.partition(".")[::2])


def _read_tar_labels(file: str, kind: str, inner: str) -> Iterator[object]:
    with tarfile.open(file) as tar:
        for member in tar:
            tar.members.clear()  # type: ignore[attr-defined]  # saves memory if there are millions of members
            if not (member.isfile() and Path(member.name).name.partition(".")[2] == kind):
                continue
            content = tar.extractfile(member)
            assert content is not None
            text = content.read().decode()
            try:
                yield parse_json(text).get(inner) if kind == "json" else int(text) if kind == "cls" else text
            except ValueError as error:
                raise ValueError(
                    f"{file}: {member.name} has {text!r}, which is not a label: {error}. Correct the file."
                ) from error


def load_shards(kind: str, files: Mapping[str, list[str]], options: SourceOptions) -> DatasetDict:
    """Load files found by `find_shards`. If there is a file of class names, convert `.cls` numbers to classes."""
    splits = load_files(kind, files)
    names = read_class_names([class_folder(options)]) if kind == "webdataset" else []
    for split, rows in splits.items():
        if names and rows.features.get("cls") in INTEGERS:
            splits[split] = with_class_column(rows, "cls", rows["cls"][:], names)
    return splits


# Pairs of functions that find and read the files of a format, in the order in which formats are tried
COLUMN_FORMATS = ((find_parquet, partial(load_files, "parquet")), (find_saved, load_saved))


def load_columns(options: SourceOptions, formats: Formats = COLUMN_FORMATS) -> DatasetDict | None:
    """Load a path in the first matching format, or return `None`. If the path does not exist, load from the Hub."""
    if not options.path.exists():
        return load_from_hub(options)
    options.check_no_hub_options()
    return first_format(options.path, formats)


def load_splits(
    options: SourceOptions, take: Take, others: Formats, problem: str, columns: Formats = COLUMN_FORMATS
) -> DatasetDict:
    """Load a dataset from a path in the first matching format, or from the Hub if the path does not exist.

    Args:
        options: Location of the dataset and names of its columns.
        take: Function that selects the image and target columns of a split from the Hub or of a format in `columns`.
            Its arguments are the split, its name, and `options`.
        others: Formats tried after `columns`. Their readers select the image and target columns themselves.
        problem: Text that follows the path in the error message for paths of unknown format.
        columns: Formats with arbitrary column names.
    """
    if (splits := load_columns(options, columns)) is not None:
        return take_from(splits, take, options)
    if (found := first_format(options.path, others)) is None:
        raise ValueError(f"{options.path} {problem}")
    return found


def take_from(splits: Mapping[str, Any], take: Take, options: SourceOptions) -> DatasetDict:
    """Select the image and target columns of each split with the function `take`, see `load_splits`."""
    return DatasetDict({name: take(split, name, options) for name, split in splits.items()})


def open_streams(options: SourceOptions) -> DatasetDict:
    """Stream a dataset on the Hub, or parquet or tar files on disk; return an empty dictionary for other data."""
    if not options.path.exists():
        return load_from_hub(options, streaming=True)
    kind, files = find_shards(options.path)
    if files:
        options.check_no_hub_options()
    return load_files(kind, files, streaming=True)
