"""Folders with one subfolder of images per class."""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset, DatasetDict, Value
from transformers.utils import logging

from ..reading.files import (
    IMAGE_FOLDERS,
    IMAGE_SUFFIXES,
    TARGETS,
    files_below,
    has_image,
    images_at,
    is_image,
    joined,
    list_tables,
    subfolders,
)
from ..reading.match import Match, Target
from ..reading.splits import find_split_folders, report_other_folders


logger = logging.get_logger(__name__)
ADVICE = "Put the images into one folder per class: {}/cat/1.jpg, ..."
ROLES = {*IMAGE_FOLDERS, *TARGETS}
WORD = re.compile(r"[^\W\d_]+")  # matches the word at the start of a file name such as "cat.0.jpg"
MOST_WORDS = 100  # maximum number of words at the start of file names that may be classes


@dataclass(frozen=True)
class ClassFolders:
    """The folders of the splits, which contain class folders, and the names of all other folders."""

    roots: dict[str, Path]
    others: tuple[str, ...] = ()


def detect(path: Path, target: Target) -> Match | None:
    """Find class folders, also inside the folders of splits.

    The names of all folders and their content decide whether they are splits or classes, see `find_split_folders`.
    """
    if not path.is_dir():
        return None
    folder = path.absolute()  # absolute paths stay valid if the working directory changes
    found, names = find_split_folders(folder), [sub.name for sub in subfolders(folder)]
    if any(map(subfolders, found.folders.values())):
        return Match(ClassFolders(found.folders, found.others), f"class folders in {joined(list(found.folders))}")
    classes = ClassFolders({"train": folder})
    if not has_image(folder):
        return None
    if not names:
        loose = joined(_images_without_class(folder))
        return Match(classes, "images", f"contains only images without a class ({loose}). {ADVICE.format(path.name)}")
    evidence = f"class folders {joined(names)}"
    if doubt := found.doubt or (found.folders and f"has no class folders: {joined(names)} are names of splits"):
        confirm = "If all of these folders are classes, set data_format (--data_format) to 'class_folders'."
        return Match(classes, evidence, ". ".join([doubt, *_labels_elsewhere(folder), confirm]))
    if {name.lower() for name in names} <= ROLES:
        return Match(
            classes, evidence, f"contains folders of images and their targets, not of classes: {joined(names)}."
        )
    only = f"has a single class folder. All labels of the split 'train' are {names[0]!r}, but at least 2 are needed."
    return Match(classes, evidence, only if len(names) == 1 else "")


def _labels_elsewhere(folder: Path) -> list[str]:
    """Describe where the labels of images may be that are not in class folders."""
    places = [folder, *subfolders(folder)]
    tables = [str(table.relative_to(folder)) for place in places for table in list_tables(place)]
    words = {
        match[0]: name for place in places for name in _images_without_class(place) if (match := WORD.match(name))
    }
    found = [f"Labels may be in the tables {joined(tables)}"] if tables else []
    if 1 < len(words) <= MOST_WORDS:
        found.append(f"Labels may be in the names of the files, such as {joined(list(words.values())[:3])}")
    return found


def read(match: Match) -> DatasetDict:
    """List images sorted by class folder and path, without opening them.

    Images are found at any depth below their class folder; hidden files are ignored. A split other than "train" whose
    images are not in class folders, such as a published test set without labels, is ignored with a warning.
    """
    folders: ClassFolders = match.files
    report_other_folders(match.path, folders.others)
    unlabeled = [
        name
        for name, root in folders.roots.items()
        if name != "train" and not subfolders(root) and _images_without_class(root)
    ]
    if unlabeled:
        logger.warning(
            "Ignored splits in %s because their images are not in class folders: %s.", match.path, joined(unlabeled)
        )
    places = dict.fromkeys((match.path, *folders.roots.values()))
    if tables := [str(table) for place in places for table in list_tables(place)]:
        logger.warning("Ignored %d tables next to class folders: %s.", len(tables), joined(tables))
    return DatasetDict(
        {name: _load_split(name, root) for name, root in folders.roots.items() if name not in unlabeled}
    )


def _images_without_class(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_file() and is_image(path))


def _load_split(name: str, root: Path) -> Dataset:
    files = {sub.name: files_below(sub) for sub in subfolders(root)}
    images = {label: [file for file in found if is_image(file)] for label, found in files.items()}
    loose = _images_without_class(root)
    _check_images(root, images, loose)
    _check_places(root, images)
    others = Counter(file.suffix for found in files.values() for file in found if not is_image(file))
    if others:
        logger.warning("Ignored files in %s because they are not images, by suffix: %s.", root, dict(others))
    if loose:
        logger.warning("Ignored images in %s because they are not in a class folder: %s.", root, joined(loose))
    labels = [label for label, found in images.items() for _ in found]
    paths = (str(file) for found in images.values() for file in found)
    return images_at(paths, name, label=(labels, Value("string")))


def _check_images(root: Path, images: dict[str, list[Path]], loose: list[str]) -> None:
    suffixes = ", ".join(sorted(IMAGE_SUFFIXES))
    if not any(images.values()):
        found = f"only images without a class ({joined(loose)})" if loose else f"no image: no file ends in {suffixes}"
        raise ValueError(f"{root} contains {found}. {ADVICE.format(root.name)}")
    if empty := [label for label, found in images.items() if not found]:
        raise ValueError(
            f"{root} has class folders without an image: {joined(empty)}. Remove them, or add images ({suffixes})."
        )


def _check_places(root: Path, images: dict[str, list[Path]]) -> None:
    """Check that no image belongs to two classes, and log a warning about folders inside of class folders."""
    labels: dict[Path, str] = {}
    inner = []
    for label, found in images.items():
        for place in sorted({file.parent for file in found}):
            if place != root / label:
                inner.append(str(place.relative_to(root)))
            if (other := labels.setdefault(place.resolve(), label)) != label:
                raise ValueError(
                    f"Because of symbolic links, the images in {place.resolve()} belong to two classes, {other!r} and "
                    f"{label!r}. Remove one of the links."
                )
    if inner:
        logger.warning(
            "Images in %d folders inside of class folders in %s have the class of the outer folder (%d classes): %s. "
            "If the inner folders are the classes, move them to %s.",
            *(len(inner), root, len(images), joined(inner), root),
        )
