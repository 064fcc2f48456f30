"""Parquet files with columns of images and targets."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

from datasets import DatasetDict
from pyarrow import ArrowInvalid, parquet

from ..reading.files import raise_faults
from ..reading.match import Match, Target
from ..reading.shards import open_shards, shards_by_split


def detect(path: Path, target: Target) -> Match | None:
    """Find parquet files by split: the path itself, or files in a folder and its subfolders."""
    files = shards_by_split(path, (".parquet",))
    return Match(files, f"parquet files of {', '.join(files)}") if files else None


def read(match: Match) -> DatasetDict:
    """Read all columns of all files."""
    return open_shards("parquet", match.files)


def stream(files: Mapping[str, list[str]]) -> DatasetDict:
    """Stream all files. Raise `OSError` if any is truncated or damaged."""
    paths, cut = list(chain.from_iterable(files.values())), []
    for path in paths:
        try:
            parquet.read_metadata(path)
        except (ArrowInvalid, OSError):
            cut.append(path)
    finding, advice = f"of {len(paths)} parquet files are truncated or damaged", "Download them again or remove them."
    raise_faults(cut, finding, advice, error=OSError)
    return open_shards("parquet", files, streaming=True)


def read_labels(files: Iterable[str], column: str) -> Iterator[object]:
    """Yield the labels in files without reading the images."""
    for file in files:
        yield from parquet.ParquetFile(file).read([column])[column].to_pylist()
