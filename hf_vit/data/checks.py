"""Images that cannot be read: found before a training starts rather than in the middle of it."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from itertools import repeat

from datasets import Dataset, DatasetDict, Image
from transformers.utils import logging

from ..image_inputs_hf_vit import decode_image, read_image
from .encoded import encoded_bytes
from .wording import in_lines, listed


logger = logging.get_logger(__name__)

CHUNK_SIZE = 64  # images that a thread takes at a time
MAX_NAMED = 100


def unreadable_images(dataset: Dataset, num_threads: int | None = None, show_progress: bool = True) -> dict[int, str]:
    """Decodes every image to its last byte, as training will.

    Args:
        dataset: Examples with the columns `image`, of type `datasets.Image`, and `file`, its name.
        num_threads: How many images are decoded at a time; by default as many as Python thinks fit.
        show_progress: Whether to draw a progress bar.

    Returns:
        For the index of each image that cannot be read, its file and the reason.
    """
    encoded = dataset.select_columns(["image", "file"]).cast_column("image", Image(decode=False))
    starts = range(0, len(encoded), CHUNK_SIZE)
    unreadable: dict[int, str] = {}
    with (
        ThreadPoolExecutor(num_threads) as threads,
        logging.tqdm(total=len(encoded), desc="Checking images", disable=not show_progress) as bar,
    ):
        for start, found in zip(starts, threads.map(_unreadable_chunk, repeat(encoded), starts), strict=True):
            unreadable |= found
            bar.update(min(CHUNK_SIZE, len(encoded) - start))
    return unreadable


def _unreadable_chunk(encoded: Dataset, start: int) -> dict[int, str]:
    unreadable: dict[int, str] = {}
    chunk = encoded[start : start + CHUNK_SIZE]
    for index, (image, file) in enumerate(zip(chunk["image"], chunk["file"], strict=True), start=start):
        try:
            read_image(decode_image(BytesIO(encoded_bytes(image)), "it"), "it", num_channels=3)
        except (OSError, TypeError, ValueError) as error:
            unreadable[index] = f"{file}: {error}"
    return unreadable


def without_unreadable(
    splits: DatasetDict, unreadable: Mapping[str, Mapping[int, str]], skip_unreadable: bool
) -> DatasetDict:
    """Decides what to do about images that cannot be read.

    Args:
        splits: Examples with the column `label` of type `datasets.ClassLabel`.
        unreadable: What `unreadable_images` found in each split.
        skip_unreadable: Leave them out, with a warning, rather than raise an error.

    Raises:
        ValueError: if there are unreadable images and `skip_unreadable` is not set, or if without them a class of
            "train" or a whole split would have no image left.
    """
    reasons = [reason for found in unreadable.values() for reason in found.values()]
    if not reasons:
        return splits
    total = sum(map(len, splits.values()))
    found = f"{len(reasons)} of {total} images cannot be read:{in_lines(reasons, MAX_NAMED)}"
    if not skip_unreadable:
        raise ValueError(f"{found}\nRepair or remove them, or leave them out with skip_unreadable.")
    readable = DatasetDict({name: _without(split, unreadable[name]) for name, split in splits.items()})
    if emptied := [name for name, split in readable.items() if not len(split)]:
        raise ValueError(f"{found}\nWithout them no image would be left for {listed(emptied)}. Repair some.")
    if lost := _classes_lost(splits, readable):
        raise ValueError(f"{found}\nWithout them no image would be left to train {', '.join(lost)} on. Repair some.")
    logger.warning("Left out: %s", found)
    return readable


def _without(split: Dataset, unreadable: Mapping[int, str]) -> Dataset:
    if not unreadable:
        return split
    return split.select([index for index in range(len(split)) if index not in unreadable])


def _classes_lost(splits: DatasetDict, readable: DatasetDict) -> list[str]:
    if "train" not in splits:
        return []
    names = splits["train"].features["label"].names
    return [names[label] for label in sorted(set(splits["train"]["label"][:]) - set(readable["train"]["label"][:]))]
