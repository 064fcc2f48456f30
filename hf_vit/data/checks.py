"""Images and targets that cannot be read or trained on, found before a training starts."""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict
from PIL import Image as PILImage
from transformers.utils import logging

from ..model.image_inputs import is_transparent, read_image
from .datasets import TargetDataset
from .formats.files import in_lines, listed
from .targets import image_only


logger = logging.get_logger(__name__)
CHUNK_SIZE = 64  # images that a thread takes at a time
MAX_NAMED = 100


def check_apart(sources: Iterable[str], output_dir: str) -> None:
    """Raises `ValueError` if results would lie among the data, and be taken for data later, or the data among them.

    Args:
        sources: Paths of data, or names on the Hub, which are not looked at.
        output_dir: Where the results are to be written.
    """
    output = Path(output_dir).expanduser().resolve()
    for source in sources:
        place = Path(source).expanduser().resolve()
        if place.exists() and (output.is_relative_to(place) or place.is_relative_to(output)):
            raise ValueError(
                f"output_dir={output_dir!r} and the data {source!r} lie one in the other, so that pictures of results "
                "would be taken for data next time. Write the output elsewhere."
            )


def shows_transparency(encoded: Mapping[str, Any]) -> bool:
    """Returns whether an image has transparent pixels; false for one that cannot be read, see `unreadable_images`.

    Args:
        encoded: A cell of the type `datasets.Image(decode=False)`. It is decoded only if its header speaks of alpha.
    """
    content = encoded["bytes"]
    try:
        with PILImage.open(encoded["path"] if content is None else BytesIO(content)) as image:
            return is_transparent(image)
    except Exception:  # of damaged images PIL raises many
        return False


def unreadable_images(dataset: Dataset, num_threads: int | None = None, show_progress: bool = True) -> dict[int, str]:
    """Decodes every image to its last byte, as training will.

    Args:
        dataset: Examples with the columns `image`, of type `datasets.Image`, and `file`, its name.
        num_threads: How many images are decoded at a time; by default as many as Python thinks fit.
        show_progress: Whether to draw a progress bar.

    Returns:
        For the index of each image that cannot be read, its file and the reason.
    """
    return check_dense(TargetDataset(dataset, image_only), num_threads, show_progress)


def without_unreadable(
    splits: DatasetDict,
    unreadable: Mapping[str, Mapping[int, str]],
    skip_unreadable: bool,
    fault: str = "cannot be read",
) -> DatasetDict:
    """Decides what to do about images that cannot be read, or are otherwise of no use.

    Args:
        splits: Examples; where they have a column `label`, it is of type `datasets.ClassLabel`.
        unreadable: What `unreadable_images` or `check_dense` found in each split.
        skip_unreadable: Leave them out, with a warning, rather than raise an error.
        fault: What is wrong with them, for the error.

    Raises:
        ValueError: if there are unreadable images and `skip_unreadable` is not set, or if without them a class of
            "train" or a whole split would have no image left.
    """
    reasons = [reason for found in unreadable.values() for reason in found.values()]
    if not reasons:
        return splits
    total = sum(map(len, splits.values()))
    found = f"{len(reasons)} of {total} images {fault}:{in_lines(reasons, MAX_NAMED)}"
    if not skip_unreadable:
        raise ValueError(f"{found}\nRepair or remove them, or leave them out with skip_unreadable.")
    readable = DatasetDict(splits)
    for name, wrong in unreadable.items():
        if wrong:
            readable[name] = splits[name].select([n for n in range(len(splits[name])) if n not in wrong])
    if emptied := [name for name, split in readable.items() if not len(split)]:
        raise ValueError(f"{found}\nWithout them no image would be left for {listed(emptied)}. Repair some.")
    if "train" in splits and "label" in splits["train"].column_names:
        names = splits["train"].features["label"].names
        if lost := sorted(set(splits["train"]["label"][:]) - set(readable["train"]["label"][:])):
            words = ", ".join(names[label] for label in lost)
            raise ValueError(f"{found}\nWithout them no image would be left to train {words} on. Repair some.")
    logger.warning("Left out: %s", found)
    return readable


def check_dense(dataset: TargetDataset, num_threads: int | None = None, show_progress: bool = True) -> dict[int, str]:
    """Reads every image with its target, as training will.

    Found are files that cannot be read, an image and a target of different sizes, images of another size than the
    annotations of their objects say, labels or colors of no class, and targets of a wrong type. Depth maps without a
    valid pixel are warned of.

    Args:
        dataset: What will be trained on. On several processes, each may check a shard of its rows.
        num_threads: How many examples are read at a time; by default as many as Python thinks fit.
        show_progress: Whether to draw a progress bar.

    Returns:
        For the index of each example that is wrong, its file and the reason.
    """
    without_depth: list[str] = []

    def faults_among(indices: range) -> dict[int, str]:
        faults: dict[int, str] = {}
        for index in indices:
            try:
                example = dataset[index]
                read_image(example["image"], example["file"], num_channels=3)
            except (OSError, TypeError, ValueError) as error:
                faults[index] = str(error)
            else:
                if "depth_map" in example and not example["depth_map"].any():
                    without_depth.append(example["file"])
        return faults

    chunks = [range(start, min(start + CHUNK_SIZE, len(dataset))) for start in range(0, len(dataset), CHUNK_SIZE)]
    faults: dict[int, str] = {}
    with (
        ThreadPoolExecutor(num_threads) as threads,
        logging.tqdm(total=len(dataset), desc="Checking images", disable=not show_progress) as bar,
    ):
        for chunk, found in zip(chunks, threads.map(faults_among, chunks), strict=True):
            faults |= found
            bar.update(len(chunk))
    if without_depth:
        logger.warning(
            "%d of %d depth maps have no valid pixel, and nothing is learned from them:%s",
            len(without_depth),
            len(dataset),
            in_lines(sorted(without_depth), MAX_NAMED),
        )
    return faults
