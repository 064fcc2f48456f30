"""Parquet files with columns of images and targets."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

from datasets import DatasetDict, Features
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
    return _open(match.files)


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
    return _open(files, streaming=True)


def _open(files: Mapping[str, list[str]], *, streaming: bool = False) -> DatasetDict:
    opened = open_shards("parquet", files, streaming=streaming)
    for names in files.values():
        check_classes(names)
    return opened


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


def read_labels(files: Iterable[str], column: str) -> Iterator[object]:
    """Yield the labels in files without reading the images."""
    for file in files:
        yield from parquet.ParquetFile(file).read([column])[column].to_pylist()
