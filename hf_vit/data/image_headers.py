"""The sizes of images, of which only the headers are read."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Image

from ..image_inputs_hf_vit import header_size
from .wording import MAX_NAMED, in_lines


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
