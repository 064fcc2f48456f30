"""Files in folders, and the sizes that their headers give."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict, Features, Image, NamedSplit

from ...model.image_inputs import header_size
from ..messages import MAX_NAMED, in_lines


IMAGE_SUFFIXES = {
    ".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp"
}  # fmt: skip


def is_image(file: Path) -> bool:
    """Returns whether a visible file ends like an image that PIL reads."""
    return file.suffix.lower() in IMAGE_SUFFIXES and not file.name.startswith(".")


def subfolders(folder: Path) -> list[Path]:
    """Lists the visible folders in a folder, sorted."""
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def files_below(folder: Path) -> list[Path]:
    """Lists the visible files at any depth, sorted; unlike `Path.rglob`, also behind links to folders."""
    found = []
    for path, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(path, name) for name in names if not name.startswith(".")]
    return sorted(found)


def images_at(paths: Sequence[str], split: str) -> Dataset:
    """Returns a split with the column `image`, which opens its file on access."""
    return Dataset.from_dict({"image": list(paths)}, features=Features({"image": Image()}), split=NamedSplit(split))


def with_files(splits: DatasetDict) -> DatasetDict:
    """Adds the column `file`: the path of each image, or the one beside its bytes, else "image 17 of train".

    Args:
        splits: Datasets with the column `image` of type `datasets.Image`, numbered as their source is.
    """
    return DatasetDict({name: split.add_column("file", _files(split, name)) for name, split in splits.items()})


def _files(split: Dataset, name: str) -> list[str]:
    # As Arrow, which leaves the bytes of the images where they are.
    paths = split.select_columns("image").with_format("arrow")[:].flatten()["image.path"].to_pylist()
    return [path or f"image {number} of {name}" for number, path in enumerate(paths)]


READ_AHEAD = 64  # images of which the bytes are in memory at a time


def image_sizes(images: Dataset) -> np.ndarray:
    """Returns (I, 2) int64, width and height of upright images.

    Args:
        images: The column `image`, of type `datasets.Image`.

    Raises:
        OSError: if files are no images, or do not exist.
    """
    encoded = images.select_columns("image").cast_column("image", Image(decode=False))
    sizes: list[tuple[int, int] | str] = []
    with ThreadPoolExecutor() as threads:
        for chunk in encoded.iter(READ_AHEAD):
            sizes += threads.map(_size_or_fault, chunk["image"])
    if faults := [found for found in sizes if isinstance(found, str)]:
        raise OSError(f"{len(faults)} of {len(sizes)} images cannot be opened:{in_lines(faults, MAX_NAMED)}")
    return np.array(sizes, np.int64).reshape(-1, 2)


def _size_or_fault(encoded: Mapping[str, Any]) -> tuple[int, int] | str:
    try:
        if encoded["bytes"] is not None:
            return header_size(BytesIO(encoded["bytes"]), str(encoded["path"] or "an image"))
        with Path(encoded["path"]).open("rb") as stream:
            return header_size(stream, encoded["path"])
    except (OSError, ValueError) as error:
        return str(error)
