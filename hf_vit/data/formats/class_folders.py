"""Folders with one subfolder of images per class."""

import re
from collections import Counter
from itertools import chain
from pathlib import Path

from datasets import Dataset, DatasetDict, Value
from transformers.utils import logging

from ..reading.files import (
    IMAGE_FOLDERS,
    NO_IMAGE,
    TABLE_SUFFIXES,
    TARGETS,
    files_below,
    has_image,
    images_at,
    is_image,
    joined,
    list_tables,
    subfolders,
    visible,
    warn_ignored,
)
from ..reading.match import Match, Target
from ..reading.splits import find_split_folders, unread_lists


logger = logging.get_logger(__name__)
ADVICE = "Put the images into one folder per class: {}/cat/1.jpg, ..."
ROLES = {*IMAGE_FOLDERS, *TARGETS}
WORD = re.compile(r"[^\W\d_]+")  # matches the word at the start of a file name such as "cat.0.jpg"
CONFIRM = "set data_format (--data_format) to 'class_folders'."
OTHER_SUFFIXES = {*TABLE_SUFFIXES, ".json", ".xml"}  # suffixes of files that may contain other labels
MOST_WORDS = 100  # maximum number of words at the start of file names that may be classes


def detect(path: Path, target: Target) -> Match | None:
    """Find class folders, also inside the folders of splits.

    The names of all folders and their content decide whether they are splits or classes, see `find_split_folders`.
    """
    if not path.is_dir():
        return None
    folder = path.absolute()  # absolute paths stay valid if the working directory changes
    found, names = find_split_folders(folder), [sub.name for sub in subfolders(folder)]
    if any(map(subfolders, found.folders.values())):
        evidence = f"class folders in {joined([root.name for root in found.folders.values()])}"
        return Match(found.folders, evidence, ignored=(*found.ignored(folder), *unread_lists(folder)), rank=1)
    if not has_image(folder):
        return None
    doubt = ""
    if not names:
        doubt = f"contains {_loose(_images_without_class(folder))}. {ADVICE.format(path.name)}"
    elif found.doubt or found.folders:
        doubt = found.doubt or f"has no class folders: {joined(names)} are names of splits"
        doubt = ". ".join([doubt, *_labels_elsewhere(folder), f"If all of these folders are classes, {CONFIRM}"])
    elif {name.lower() for name in names} <= ROLES:
        doubt = (
            f"has the folders {joined(names)}, which are usual names for images and targets. For classes, {CONFIRM}"
        )
    elif len(names) == 1:
        inner = joined([sub.name for sub in subfolders(folder / names[0])])
        doubt = f"has one folder. All labels of the split 'train' are {names[0]!r}, but at least 2 classes are needed."
        doubt += f" It contains {inner}: give its path if these are classes or splits." if inner else ""
    return Match({"train": folder}, f"class folders {joined(names)}", doubt, unread_lists(folder), rank=1)


def _labels_elsewhere(folder: Path) -> list[str]:
    """Describe where the labels of images may be that are not in class folders."""
    places = [folder, *subfolders(folder)]
    tables = [str(table.relative_to(folder)) for place in places for table in list_tables(place)]
    words: dict[str, str] = {}
    for name in chain.from_iterable(map(_images_without_class, places)):
        if match := WORD.match(name):
            words.setdefault(match[0], name)
    found = [f"Labels may be in the tables {joined(tables)}"] if tables else []
    if 1 < len(words) <= MOST_WORDS:
        found.append(f"Labels may be in the names of the files, such as {joined(list(words.values())[:3])}")
    return found


def read(match: Match) -> DatasetDict:
    """List images sorted by class folder and path, without opening them.

    Images are found at any depth below their class folder; hidden files are ignored. A split other than "train" whose
    images are not in class folders, such as a published test set without labels, is ignored with a warning.
    """
    roots: dict[str, Path] = match.files
    unlabeled = [
        name
        for name, root in roots.items()
        if name != "train" and not subfolders(root) and _images_without_class(root)
    ]
    warn_ignored(f"splits in {match.path}", "their images are not in class folders", unlabeled)
    places = dict.fromkeys((match.path.absolute(), *roots.values()))
    beside = [path for place in places for path in visible(place.iterdir()) if path.suffix.lower() in OTHER_SUFFIXES]
    warn_ignored(f"{len(beside)} files next to class folders", "class folders define the labels", beside)
    return DatasetDict({name: _load_split(name, root) for name, root in roots.items() if name not in unlabeled})


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
    warn_ignored(f"images in {root}", "they are not in a class folder", loose)
    labels = [label for label, found in images.items() for _ in found]
    paths = (str(file) for found in images.values() for file in found)
    return images_at(paths, name, label=(labels, Value("string")))


def _check_images(root: Path, images: dict[str, list[Path]], loose: list[str]) -> None:
    if not any(images.values()):
        raise ValueError(f"{root} contains {_loose(loose)}. {ADVICE.format(root.name)}")
    if empty := [label for label, found in images.items() if not found]:
        raise ValueError(f"{root} has class folders without an image: {joined(empty)}. Remove them, or add images.")


def _loose(images: list[str]) -> str:
    return f"only images without a class ({joined(images)})" if images else NO_IMAGE.removeprefix("contains ")


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
