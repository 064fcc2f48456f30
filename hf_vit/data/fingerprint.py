"""Fingerprint of a dataset, to check that a resumed training run uses the data that it started with."""

import hashlib
import inspect
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch
from datasets import Dataset, Image
from torch import nn
from transformers import PreTrainedModel


CHUNK_SIZE = 64
MAX_HASHED_BYTES = 10**9  # for larger datasets, only an evenly spaced subset of the images is hashed
THREADS = 8
NOT_IN_OUTPUTS = ("_name_or_path", "auto_map", "transformers_version")  # fields of a configuration without effect
FEATURE_FOLDER = "hf_vit_features"  # subfolder of the `datasets` cache for image features


def fingerprint(rows: Dataset) -> dict[str, Any]:
    """Return the fingerprint of a split, which does not depend on the folder that its files are stored in.

    Args:
        rows: Rows with images in columns of type `datasets.Image`, as paths or as bytes, image names in the column
            `file`, and target columns.

    Returns:
        The number of rows, and three digests: of the ordered names (relative to the common folder) and sizes of the
        image files, of all other columns except `file`, and of the image contents. If the images exceed
        `MAX_HASHED_BYTES` in total, only every n-th image is read, with the smallest n that stays within this limit.
    """
    columns = [name for name, feature in rows.features.items() if isinstance(feature, Image)]
    for name in columns:
        rows = rows.cast_column(name, Image(decode=False))
    flat = rows.flatten()
    paths = [path for name in columns for path in _column(flat, f"{name}.path")]
    sizes = _sizes(paths)
    embedded = sum(pc.sum(pc.binary_length(flat.data.column(f"{name}.bytes"))).as_py() or 0 for name in columns)
    step = max(1, math.ceil((sum(size or 0 for size in sizes) + embedded) / MAX_HASHED_BYTES))
    absolute = [path for path in paths if path and os.path.isabs(path)]
    folder = os.path.commonpath(absolute) if absolute else ""
    names = [(path or "").removeprefix(folder) for path in paths]
    image_columns = [f"{name}.{part}" for name in columns for part in ("path", "bytes")]
    others = flat.remove_columns([*image_columns, *({"file"} & set(flat.column_names))])
    return {
        "number": len(rows),
        "names and sizes": _digest(map(str, zip(names, sizes, strict=True))),
        "targets": _digest(_texts(others)),
        "contents": _digest(_contents(rows.select_columns(columns), range(0, len(rows), step))),
    }


def digest_files(sources: Iterable[str]) -> str:
    """Return a digest of the names and sizes of the shards of a stream, given as files or as folders of files."""
    found = []
    for source in map(Path, sources):
        files = sorted(file for file in source.rglob("*") if file.is_file()) if source.is_dir() else [source]
        found += [(file.relative_to(source).as_posix(), str(file)) for file in files]
    names, paths = [name for name, _ in found], [path for _, path in found]
    return _digest(map(str, zip(names, _sizes(paths), strict=True)))


def _column(rows: Dataset, name: str) -> list[Any]:
    return list(rows.select_columns(name).with_format("arrow")[:][name].to_pylist()) if len(rows) else []


def _sizes(paths: Sequence[str | None]) -> list[int | None]:
    """Return the size of each file in bytes, or `None` if a path is not an existing file."""
    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(_size, paths, chunksize=100))


def _size(path: str | None) -> int | None:
    try:
        return os.stat(path).st_size if path else None
    except OSError:  # the path may be only a name stored with the image bytes, or a file on the Hub
        return None


def _texts(rows: Dataset) -> Iterator[str]:
    if rows.column_names:
        for batch in rows.with_format(None).iter(batch_size=1000):
            yield json.dumps(batch, default=_as_text, sort_keys=True, ensure_ascii=False)


def _as_text(value: Any) -> str:
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else str(value)


def image_checksums(rows: Dataset, seconds: float) -> dict[int, str]:
    """Return the checksum of each image by the index of its first row.

    The checksum is empty if the image cannot be read, or if it was not reached within the time limit of `seconds`.
    """
    encoded = rows.select_columns("image").cast_column("image", Image(decode=False))
    numbers = rows["image_id"][:] if "image_id" in rows.column_names else np.arange(len(rows))
    order = np.random.default_rng(0).permutation(np.unique(numbers, return_index=True)[1]).tolist()
    found, end = dict.fromkeys(order, ""), time.monotonic() + seconds
    for index, content in zip(order, _contents(encoded, order), strict=True):
        found[index] = content
        if time.monotonic() > end:
            break
    return found


def _contents(rows: Dataset, indices: Sequence[int]) -> Iterator[str]:
    """Yield the checksums of the images in the rows at the given indices."""
    with ThreadPoolExecutor(THREADS) as threads:
        for start in range(0, len(indices), CHUNK_SIZE):
            batch = rows[indices[start : start + CHUNK_SIZE]]
            yield from threads.map(_checksum, chain.from_iterable(zip(*batch.values(), strict=True)))


def _checksum(image: Mapping[str, Any] | None) -> str:
    if image is None:
        return ""
    if image["bytes"] is not None:
        return hashlib.sha256(image["bytes"]).hexdigest()
    try:
        with open(image["path"], "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError:
        return ""


def image_state(image: Mapping[str, Any] | None) -> tuple[object, ...]:
    """Return what identifies an image, given as a cell of type `datasets.Image(decode=False)`.

    This is the checksum of its content if the cell contains the content, and otherwise its path with the size in bytes
    and the modification time in nanoseconds of the file, if it exists on disk.
    """
    if image is None or image["bytes"] is not None:
        return (_checksum(image),)
    try:
        stat = os.stat(image["path"])
    except (OSError, TypeError, ValueError):  # the path is a URL, or missing
        return (image["path"],)
    return image["path"], stat.st_size, stat.st_mtime_ns


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode("utf-8", "surrogateescape") + b"\n")
    return digest.hexdigest()[:16]


def digest(parts: Iterable[str | bytes]) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 hash of the concatenated parts."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part if isinstance(part, bytes) else part.encode())
    return found.hexdigest()[:16]


def digest_weights(model: nn.Module) -> str:
    """Return a digest of the names, dtypes, shapes, and values of all weights of a model."""
    return digest(
        part
        for name, weight in sorted(model.state_dict().items())
        for part in (
            f"{name} {weight.dtype} {tuple(weight.shape)}",
            weight.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
    )


def digest_model(model: PreTrainedModel, *processors: Any) -> dict[str, str]:
    """Return digests of everything that determines the outputs of a model.

    Args:
        model: The model.
        *processors: Image processor, tokenizer, or other objects with a method `save_pretrained`.

    Returns:
        Digests by name: `weights`, `config`, `image_processor` (saved settings of all processors), and `code` (source
        files of the model and of the processors).
    """
    config = {name: value for name, value in model.config.to_dict().items() if name not in NOT_IN_OUTPUTS}
    folders = dict.fromkeys(Path(inspect.getfile(type(part))).parent for part in (model, *processors))
    with TemporaryDirectory() as folder:
        for processor in processors:
            processor.save_pretrained(folder)
        saved = [file.read_bytes() for file in sorted(Path(folder).iterdir()) if file.suffix != ".py"]
    return {
        "weights": digest_weights(model),
        "config": digest([json.dumps(config, default=str, sort_keys=True)]),
        "image_processor": digest(saved),
        "code": digest(file.read_bytes() for folder in folders for file in sorted(folder.glob("*.py"))),
    }
