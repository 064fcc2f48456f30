"""Tar files in the format of WebDataset: the files of an example lie side by side, `a/0001.jpg` and `a/0001.cls`."""

import json
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, IterableDataset

from .classes import INTEGERS, NAME_FILES, read_class_file
from .columns import USUAL_NAMES
from .files import files_below, is_image
from .parquet import load_files
from .splits import files_by_split, split_within


TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz")
KEY, URL = "__key__", "__url__"  # what `datasets` calls the name of an example and its tar file


def find_tars(path: Path) -> dict[str, list[str]]:
    """Finds tar files.

    Args:
        path: A tar file, or the folder that holds them, or one above it.

    Returns:
        The files by split, as `find_parquet` does. Nothing if there are none, or images beside them, which they are
        the archives of.
    """
    if path.is_file():
        return {split_within(path.name) or "train": [str(path)]} if _is_tar(path) else {}
    files = sorted(file for pattern in ("*", "*/*") for file in path.glob(pattern) if _is_tar(file))
    if not files or any(is_image(file) for file in files_below(path)):
        return {}
    return files_by_split(path, files)


def load_tars(path: Path, files: dict[str, list[str]]) -> DatasetDict:
    """Copies the content of tar files into the cache of `datasets`, and opens it.

    Args:
        path: Where class names may be, in classes.txt or id2label.json.
        files: Paths by split.

    Returns:
        Splits with a column for each kind of file. Numbers in `.cls` are classes where their names are known.

    Raises:
        ValueError: if files are damaged or do not go together, or a file of class names is malformed.
    """
    splits = load_files("webdataset", files)
    names = class_names_at(path)
    return DatasetDict({name: _with_names(split, names) for name, split in splits.items()}) if names else splits


def class_names_at(path: Path) -> list[str]:
    """Returns the class names that lie beside data, in classes.txt or id2label.json; none if there is no such file.

    Raises:
        ValueError: if the file is malformed.
    """
    folder = path if path.is_dir() else path.parent
    return next((read_class_file(folder / name)[0] for name in NAME_FILES if (folder / name).is_file()), [])


def from_tars(dataset: Any, label_column: str | None) -> Any:
    """Reduces data that come from tar files to columns of images and one of labels; leaves others as they are.

    The labels are the column that is given, else `.cls`, else what has a usual name in `.json`, else `.txt`.

    Args:
        dataset: A `Dataset` or an `IterableDataset`; images of the latter keep the names of their tar files.
        label_column: Kind of file with the labels, as "txt", or name in JSON, as "json.label", if it is not clear.

    Returns:
        The label column is called as it is given, else "label"; there is none if there are no labels.
    """
    if dataset.features is None or KEY not in dataset.features:
        return dataset
    images = [name for name, feature in dataset.features.items() if isinstance(feature, Image)]
    label, name = label_column_of(dataset, label_column), label_column or "label"
    return (_listed if isinstance(dataset, Dataset) else _streamed)(dataset, images, label, name)


def _listed(dataset: Dataset, images: list[str], label: str | None, name: str) -> Dataset:
    flat = dataset if label in dataset.features else dataset.flatten()
    if label not in flat.features:
        return flat.select_columns(images)
    kept = flat.select_columns([*images, label])
    return kept if label == name else kept.rename_column(label, name)


def _streamed(stream: IterableDataset, images: list[str], label: str | None, name: str) -> IterableDataset:
    features = stream.features
    feature = None if label is None else _feature_of(features, label)
    kinds = {column: Image(decode=False) for column in images}
    known = label if feature is not None else None
    for column in images:
        stream = stream.cast_column(column, Image(decode=False))
    return stream.map(
        partial(_row_of_stream, images=images, label=known, name=name),
        remove_columns=list(features),
        features=Features(kinds if known is None else {**kinds, name: feature}),
    )


def read_tar_labels(files: Iterable[str], label_column: str | None) -> Iterator[object]:
    """Yields the labels in tar files that lie on disk, and passes the images over.

    Args:
        files: Tar files.
        label_column: What `label_column_of` says.

    Raises:
        ValueError: if a label is no number, or no JSON, where it should be.
    """
    kind, _, inner = (label_column or "").partition(".")
    for file in files:
        with tarfile.open(file) as tar:
            for member in tar:
                end = Path(member.name).name.partition(".")[2]
                if member.isfile() and end == kind:
                    content = tar.extractfile(member)
                    assert content is not None
                    yield _parse(content.read().decode(), end, inner, f"{file}: {member.name}")


def label_column_of(dataset: Dataset | IterableDataset, given: str | None) -> str | None:
    """Returns which kind of file, or name in JSON, has the labels of tar files, see `from_tars`, if any has."""
    if given is not None:
        return given
    features = dataset.features
    inside = features["json"] if isinstance(features.get("json"), dict) else {}
    in_json = [f"json.{name}" for name in inside if name.strip().lower() in USUAL_NAMES["label_column_name"]]
    candidates = [*(["cls"] if "cls" in features else []), *in_json, *(["txt"] if "txt" in features else [])]
    return candidates[0] if candidates else None


def _parse(text: str, kind: str, inner: str, where: str) -> object:
    try:
        return json.loads(text).get(inner) if kind == "json" else int(text) if kind == "cls" else text
    except ValueError as error:
        raise ValueError(f"{where} holds {text!r}, which is no label: {error}. Correct it.") from error


def _is_tar(path: Path) -> bool:
    return path.name.lower().endswith(TAR_SUFFIXES) and not path.name.startswith(".") and path.is_file()


def _feature_of(features: Mapping[str, Any], label: str) -> Any:
    kind, _, inner = label.partition(".")
    if label in features:
        return features[label]
    return features[kind].get(inner) if isinstance(features.get(kind), dict) else None


def _row_of_stream(row: dict[str, Any], images: list[str], label: str | None, name: str) -> dict[str, Any]:
    """Returns images that are called by their tar files and keys, and the label."""
    named = {
        column: row[column] and {"bytes": row[column]["bytes"], "path": f"{row[URL]}: {row[KEY]}.{column}"}
        for column in images
    }
    if not any(named.values()):
        raise ValueError(f"{row[URL]}: {row[KEY]} has no image ({' or '.join(images)}). Add it, or leave it out.")
    if label is None:
        return named
    kind, _, inner = label.partition(".")
    return {**named, name: row[label] if label in row else (row[kind] or {}).get(inner)}


def _with_names(split: Dataset, names: list[str]) -> Dataset:
    if "cls" not in split.features or split.features["cls"] not in INTEGERS:
        return split
    return split.remove_columns("cls").add_column("cls", split["cls"][:], feature=ClassLabel(names=names))
