"""Tar files in WebDataset format.

The files of an example have the same stem, such as `a/0001.jpg` and `a/0001.cls`.
"""

import tarfile
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any

from datasets import DatasetDict, Features, Image, IterableDataset
from transformers.utils import logging

from ..reading.classes import INTEGERS, read_class_names, with_class_column
from ..reading.files import has_image, parse_json, raise_faults
from ..reading.hub import class_folder
from ..reading.match import Match, Target
from ..reading.shards import KEY, TAR_SUFFIXES, URL, open_shards, shards_by_split


logger = logging.get_logger(__name__)
BLOCK = tarfile.BLOCKSIZE
MAX_SECONDS = 60.0  # time limit for checking all tar files of a dataset
CHUNK_BYTES = 2**20


def detect(path: Path, target: Target) -> Match | None:
    """Find tar files by split. Tar files next to images may be archives and are ignored."""
    files = shards_by_split(path, TAR_SUFFIXES)
    is_archive = bool(files) and path.is_dir() and has_image(path)
    return None if is_archive or not files else Match(files, f"tar files of {', '.join(files)}")


def read(match: Match) -> DatasetDict:
    """Read all files. If there is a file of class names, convert `.cls` numbers to classes."""
    check_tars(chain.from_iterable(match.files.values()))
    splits = DatasetDict({name: rows.flatten() for name, rows in open_shards("webdataset", match.files).items()})
    names = read_class_names([class_folder(match.options)])
    for split, rows in splits.items():
        if names and rows.features.get("cls") in INTEGERS:
            splits[split] = with_class_column(rows, "cls", rows["cls"][:], names)
    return splits


def stream(files: Mapping[str, list[str]]) -> DatasetDict:
    """Stream all files. The content of JSON files is in columns such as `json.label`."""
    check_tars(chain.from_iterable(files.values()))
    opened = open_shards("webdataset", files, streaming=True)
    return DatasetDict({name: _flat_stream(rows) for name, rows in opened.items()})


def read_labels(files: Iterable[str], column: str) -> Iterator[object]:
    """Yield the labels in files without reading the images."""
    for file in files:
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
