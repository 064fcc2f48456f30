"""Image files in one folder per class."""

from collections import Counter
from pathlib import Path

from datasets import Dataset, DatasetDict, Features, Image, NamedSplit, Value
from transformers.utils import logging

from .folders import IMAGE_SUFFIXES, files_below, is_image, subfolders
from .splits import one_per_split, split_named
from .wording import listed


logger = logging.get_logger(__name__)


def load_image_folder(folder: Path) -> DatasetDict:
    """Lists the images of a folder, without opening them.

    The folder holds one folder per class, or one such folder for each of "train", "validation" and "test", by any of
    their usual names. Images lie in the folder of their class at any depth; hidden files are ignored. A split
    other than "train" that holds images without a class, as test sets are often published, is left out with a warning.

    Returns:
        Splits with the columns `image` (paths that are opened on access) and `label` (the class folder's name), sorted
        by class and then by path.

    Raises:
        ValueError: if there is no image, no class folder or a class folder without an image.
    """
    folder = folder.absolute()  # the dataset outlives the working directory
    roots = _split_folders(folder)
    unlabelled = [name for name, root in roots.items() if name != "train" and _is_unlabelled(root)]
    if unlabelled:
        logger.warning("Left out of %s, as their images lie in no class folder: %s.", folder, listed(unlabelled))
    return DatasetDict({name: _load_split(name, root) for name, root in roots.items() if name not in unlabelled})


def has_class_folders(folder: Path) -> bool:
    """Returns whether a folder looks like one of `load_image_folder`: it has folders of splits, or of two classes."""
    inside = subfolders(folder)
    return len(inside) > 1 or any(split_named(sub.name) for sub in inside)


def _is_unlabelled(root: Path) -> bool:
    return not subfolders(root) and bool(_loose_images(root))


def _loose_images(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_file() and is_image(path))


def _split_folders(folder: Path) -> dict[str, Path]:
    named = [(sub.name, sub) for sub in subfolders(folder) if split_named(sub.name)]
    # A class may be called "train" too, but then it holds images and not further folders.
    if not any(subfolders(sub) for _, sub in named):
        return {"train": folder}
    if others := sorted({sub.name for sub in subfolders(folder)} - {name for name, _ in named}):
        logger.warning("Left out of %s, as their names are of no known split: %s.", folder, listed(others))
    return one_per_split(named)


def _load_split(name: str, root: Path) -> Dataset:
    files = {sub.name: files_below(sub) for sub in subfolders(root)}
    images = {label: [file for file in found if is_image(file)] for label, found in files.items()}
    loose = _loose_images(root)
    _check_images(root, images, loose)
    others = Counter(file.suffix for found in files.values() for file in found if not is_image(file))
    if others:
        logger.warning("Left out of %s, as they do not end like images: %s.", root, dict(others))
    if loose:
        logger.warning("Left out of %s, as they lie in no class folder: %s.", root, listed(loose))
    return Dataset.from_dict(
        {
            "image": [str(file) for found in images.values() for file in found],
            "label": [label for label, found in images.items() for _ in found],
        },
        features=Features({"image": Image(), "label": Value("string")}),
        split=NamedSplit(name),
    )


def _check_images(root: Path, images: dict[str, list[Path]], loose: list[str]) -> None:
    suffixes = ", ".join(sorted(IMAGE_SUFFIXES))
    if not any(images.values()):
        found = f"only images without a class ({listed(loose)})" if loose else f"no image: no file ends in {suffixes}"
        raise ValueError(f"{root} holds {found}. Put the images into one folder per class: {root.name}/cat/1.jpg, ...")
    if empty := [label for label, found in images.items() if not found]:
        raise ValueError(
            f"Class folders of {root} without an image: {', '.join(map(repr, empty))}. Remove them, or put images "
            f"there ({suffixes})."
        )
