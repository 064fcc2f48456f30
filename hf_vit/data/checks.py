"""Images that cannot be read: found before a training starts rather than in the middle of it."""

from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from itertools import repeat
from pathlib import Path

from datasets import Dataset, Image
from transformers.utils import logging

from ..image_inputs_hf_vit import decode_image, read_image
from .wording import in_lines


logger = logging.get_logger(__name__)

CHUNK_SIZE = 64  # images that a thread takes at a time


def unreadable_images(dataset: Dataset, num_threads: int | None = None) -> dict[int, str]:
    """Decodes every image to its last byte, as training will.

    Args:
        dataset: Examples with the column `image` of type `datasets.Image`.
        num_threads: How many images are decoded at a time; by default as many as Python thinks fit.

    Returns:
        For the index of each image that cannot be read, its path, or its number if it is no file, and the reason.
    """
    encoded = dataset.select_columns("image").cast_column("image", Image(decode=False))
    starts = range(0, len(encoded), CHUNK_SIZE)
    unreadable: dict[int, str] = {}
    with ThreadPoolExecutor(num_threads) as threads, logging.tqdm(total=len(encoded), desc="Checking images") as bar:
        for start, found in zip(starts, threads.map(_unreadable_chunk, repeat(encoded), starts), strict=True):
            unreadable |= found
            bar.update(min(CHUNK_SIZE, len(encoded) - start))
    return unreadable


def _unreadable_chunk(encoded: Dataset, start: int) -> dict[int, str]:
    unreadable: dict[int, str] = {}
    for index, image in enumerate(encoded[start : start + CHUNK_SIZE]["image"], start=start):
        path, content = (image["path"], image["bytes"]) if image is not None else (None, None)
        name = f"image {index}" + (f" of {encoded.split}" if encoded.split else "")
        try:
            _read(path, content)
        except (OSError, TypeError, ValueError) as error:
            unreadable[index] = f"{path if path and content is None else name}: {error}"
    return unreadable


def _read(path: str | None, content: bytes | None) -> None:
    if content is None:
        if path is None:
            raise ValueError("there is no image")
        content = Path(path).read_bytes()
    read_image(decode_image(BytesIO(content), "it"), "it", num_channels=3)


def without_unreadable(dataset: Dataset, unreadable: dict[int, str], skip: bool) -> Dataset:
    """Decides what to do about images that cannot be read. Several processes can share what one of them found.

    Args:
        dataset: Examples with the column `label` of type `datasets.ClassLabel`.
        unreadable: What `unreadable_images` found in it.
        skip: Leave them out, with a warning, rather than raise an error.

    Raises:
        ValueError: if there are unreadable images and `skip` is not set, or if a class would have no image left.
    """
    if not unreadable:
        return dataset
    found = f"{len(unreadable)} of {len(dataset)} images cannot be read:{in_lines(unreadable.values())}"
    if not skip:
        raise ValueError(f"{found}\nRepair or remove them, or leave them out with --skip_unreadable.")
    readable = dataset.select([index for index in range(len(dataset)) if index not in unreadable])
    if lost := sorted(set(dataset["label"][:]) - set(readable["label"][:])):
        names = ", ".join(dataset.features["label"].names[label] for label in lost)
        raise ValueError(f"{found}\nWithout them no image would be left of these classes: {names}. Repair some.")
    logger.warning("Left out: %s", found)
    return readable
