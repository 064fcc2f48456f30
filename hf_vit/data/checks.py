"""Checks for unreadable images and invalid targets before training starts."""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict
from PIL import Image as PILImage
from PIL.TiffImagePlugin import TiffImageFile
from transformers.utils import logging

from ..model.image_inputs import is_transparent, read_image
from .datasets import TargetDataset
from .reading.files import in_lines, joined
from .targets import image_only


logger = logging.get_logger(__name__)
CHUNK_SIZE = 64  # number of images that a thread checks per task
MAX_NAMED = 100


def check_output_outside_data(sources: Iterable[str], output_dir: str) -> None:
    """Raise `ValueError` if the output folder is inside a data folder or contains one.

    Otherwise, images that are written to the output folder could be loaded as data later.

    Args:
        sources: Paths of datasets. Names of datasets on the Hub are ignored.
        output_dir: Folder that results are written to.
    """
    output = Path(output_dir).expanduser().resolve()
    for source in sources:
        place = Path(source).expanduser().resolve()
        if place.exists() and (output.is_relative_to(place) or place.is_relative_to(output)):
            raise ValueError(
                f"output_dir={output_dir!r} must neither contain the data {source!r} nor be inside the data folder, "
                "because images in the output folder could be loaded as data later. Choose another output folder."
            )


def has_transparency(encoded: Mapping[str, Any]) -> bool:
    """Return whether an image has transparent pixels. For an image that cannot be read, return `False`.

    Args:
        encoded: A cell of type `datasets.Image(decode=False)`. It is decoded only if its header declares transparency.
    """
    content = encoded["bytes"]
    try:
        with PILImage.open(encoded["path"] if content is None else BytesIO(content)) as image:
            return is_transparent(image)
    except Exception:  # PIL raises many types of errors for damaged images
        return False


def unreadable_images(dataset: Dataset, num_threads: int | None = None, show_progress: bool = True) -> dict[int, str]:
    """Find images that cannot be decoded completely.

    Args:
        dataset: Examples with the columns `image` (`datasets.Image`) and `file` (name of the image).
        num_threads: Number of images to decode in parallel; by default chosen by `ThreadPoolExecutor`.
        show_progress: Whether to show a progress bar.

    Returns:
        A dictionary from the index of each unreadable image to an error message with the file name.
    """
    return check_dense(TargetDataset(dataset, image_only), num_threads, show_progress)


def drop_unreadable(
    splits: DatasetDict,
    unreadable: Mapping[str, Mapping[int, str]],
    skip_unreadable: bool,
    fault: str = "cannot be read",
) -> DatasetDict:
    """Remove unreadable or otherwise unusable images, or raise an error.

    Args:
        splits: Examples by split. A column `label`, if present, must be of type `datasets.ClassLabel`.
        unreadable: Output of `unreadable_images` or `check_dense` for each split.
        skip_unreadable: Whether to remove these images with a warning instead of raising an error.
        fault: Description of the problem in warnings and error messages.

    Raises:
        ValueError: if there are unreadable images and `skip_unreadable` is not set, or if a split or a class of
            "train" would have no image left.
    """
    reasons = [reason for found in unreadable.values() for reason in found.values()]
    if not reasons:
        return splits
    total = sum(map(len, splits.values()))
    found = f"{len(reasons)} of {total} images {fault}:{in_lines(reasons, MAX_NAMED)}"
    if not skip_unreadable:
        raise ValueError(f"{found}\nRepair or remove these images, or set skip_unreadable to ignore them.")
    readable = DatasetDict(splits)
    for name, wrong in unreadable.items():
        if wrong:
            readable[name] = splits[name].select([n for n in range(len(splits[name])) if n not in wrong])
    if emptied := [name for name, split in readable.items() if not len(split)]:
        raise ValueError(
            f"{found}\nWithout these images, the following splits are empty: {joined(emptied)}. Repair some of the "
            "images."
        )
    if "train" in splits and "label" in splits["train"].column_names:
        names = splits["train"].features["label"].names
        if lost := sorted(set(splits["train"]["label"][:]) - set(readable["train"]["label"][:])):
            words = ", ".join(names[label] for label in lost)
            raise ValueError(
                f"{found}\nWithout these images, the following classes have no training image: {words}. Repair some "
                "of the images."
            )
    logger.warning("Ignored: %s", found)
    return readable


def check_dense(dataset: TargetDataset, num_threads: int | None = None, show_progress: bool = True) -> dict[int, str]:
    """Read all examples and find those whose image or target cannot be used for training.

    Detected problems are unreadable files, a target or annotation whose size differs from its image, unknown classes
    or colors in masks, and targets of a wrong type. Depth maps without a valid pixel and images with several pages
    only cause a warning.

    Args:
        dataset: Training examples. In distributed training, each process may check a shard.
        num_threads: Number of examples to read in parallel; by default chosen by `ThreadPoolExecutor`.
        show_progress: Whether to show a progress bar.

    Returns:
        A dictionary from the index of each invalid example to an error message with the file name.
    """
    without_depth, with_pages = list[str](), list[str]()

    def faults_among(indices: range) -> dict[int, str]:
        faults: dict[int, str] = {}
        for index in indices:
            try:
                example = dataset[index]
                read_image(example["image"], example["file"], num_channels=3)
            except (OSError, TypeError, ValueError) as error:
                faults[index] = str(error)
            else:
                image = example["image"]
                if isinstance(image, TiffImageFile) and image.n_frames > 1:
                    with_pages.append(f"{example['file']}: {image.n_frames} pages")
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
    if with_pages:
        logger.warning(
            "%d of %d images have further pages, which are ignored:%s",
            *(len(with_pages), len(dataset), in_lines(sorted(with_pages), MAX_NAMED)),
        )
    if without_depth:
        logger.warning(
            "%d of %d depth maps have no valid pixel and do not contribute to training:%s",
            *(len(without_depth), len(dataset), in_lines(sorted(without_depth), MAX_NAMED)),
        )
    return faults
