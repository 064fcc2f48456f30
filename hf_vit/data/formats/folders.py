"""Readers of folders with one subfolder per class, and of parallel folders of images and targets."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from itertools import takewhile
from pathlib import Path

from datasets import Dataset, DatasetDict, Image, Value
from transformers.utils import logging

from .files import (
    IMAGE_SUFFIXES,
    files_below,
    images_at,
    is_image,
    joined,
    raise_faults,
    split_from_alias,
    splits_in,
    subfolders,
)


logger = logging.get_logger(__name__)
IMAGE_FOLDERS = ("images", "image", "imgs", "img", "rgb")
TARGET_FOLDERS = {
    "mask": ("masks", "mask", "labels", "annotations", "segmentations"),
    "depth": ("depths", "depth", "depth_maps", "labels", "annotations"),
}
TARGET_SUFFIXES = {"mask": IMAGE_SUFFIXES, "depth": IMAGE_SUFFIXES | {".npy"}}


def load_image_folder(folder: Path) -> DatasetDict:
    """List images sorted by class folder and path, without opening them.

    The folder contains one subfolder per class, or a folder for each split ("train", "validation" and "test", or one
    of their usual aliases) with one subfolder per class. Images are found at any depth below their class folder;
    hidden files are ignored. A split other than "train" whose images are not in class folders, such as a published
    test set without labels, is ignored with a warning.
    """
    folder = folder.absolute()  # absolute paths stay valid if the working directory changes
    roots = _split_folders(folder)
    unlabeled = [
        name
        for name, root in roots.items()
        if name != "train" and not subfolders(root) and _images_without_class(root)
    ]
    if unlabeled:
        logger.warning(
            "Ignored splits in %s because their images are not in class folders: %s.", folder, joined(unlabeled)
        )
    return DatasetDict({name: _load_split(name, root) for name, root in roots.items() if name not in unlabeled})


def has_class_folders(folder: Path) -> bool:
    """Return whether `load_image_folder` can read a folder: it has several subfolders, or one named like a split."""
    inside = subfolders(folder)
    return len(inside) > 1 or any(split_from_alias(sub.name) for sub in inside)


def _images_without_class(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_file() and is_image(path))


def _split_folders(folder: Path) -> dict[str, Path]:
    # A folder named "train" without subfolders is a class, not a split.
    if not any(subfolders(sub) for sub in subfolders(folder) if split_from_alias(sub.name)):
        return {"train": folder}
    named = splits_in(folder)
    report_other_folders(folder, named)
    return named


def report_other_folders(folder: Path, named: Mapping[str, Path]) -> None:
    """Log a warning that names the subfolders of a folder that do not belong to one of its splits."""
    if others := sorted({sub.name for sub in subfolders(folder)} - {root.name for root in named.values()}):
        logger.warning("Ignored folders in %s because they are not named like a split: %s.", folder, joined(others))


def _load_split(name: str, root: Path) -> Dataset:
    files = {sub.name: files_below(sub) for sub in subfolders(root)}
    images = {label: [file for file in found if is_image(file)] for label, found in files.items()}
    loose = _images_without_class(root)
    _check_images(root, images, loose)
    _check_places(images)
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
        raise ValueError(
            f"{root} contains {found}. Put the images into one folder per class: {root.name}/cat/1.jpg, ..."
        )
    if empty := [label for label, found in images.items() if not found]:
        raise ValueError(
            f"{root} has class folders without an image: {', '.join(map(repr, empty))}. Remove them, or add images "
            f"({suffixes})."
        )


def _check_places(images: dict[str, list[Path]]) -> None:
    labels: dict[Path, str] = {}
    for label, found in images.items():
        for place in {file.parent for file in found}:
            if (other := labels.setdefault(place.resolve(), label)) != label:
                raise ValueError(
                    f"Because of symbolic links, the images in {place.resolve()} belong to two classes, {other!r} and "
                    f"{label!r}. Remove one of the links."
                )


def load_pairs(folder: Path, target: str) -> DatasetDict:
    """List pairs of an image and its target ("mask" or "depth"), sorted by path, without opening them.

    The folder contains `images/` and `masks/` (or `depths/`, ...), either directly, or per split as `train/images/` or
    `images/train/`, where a split is named "train", "validation", "test" or one of their usual aliases. The image and
    its target have the same relative path except for the suffix. If no path matches, the words at the end that all
    file names of a folder share are ignored, as in `1_leftImg8bit.png` and `1_gtFine_labelTrainIds.png`.
    """
    folder = folder.absolute()  # absolute paths stay valid if the working directory changes
    roots = _split_roots(folder, target)
    if not roots:
        image, other = IMAGE_FOLDERS[0], TARGET_FOLDERS[target][0]
        inside = [path.name for path in subfolders(folder)]
        raise ValueError(
            f"{folder} needs folders of images and {target}s, but has {joined(inside) if inside else 'no folders'}. "
            f"Save pairs as train/{image}/1.jpg and train/{other}/1.png, ..., or in {image}/ and {other}/."
        )
    found = {split: _match(images, targets, target) for split, (images, targets) in roots.items()}
    raise_faults(
        [problem for _, problems in found.values() for problem in problems],
        f"files in {folder} do not form pairs",
        f"An image and its {target} must have the same name except for the suffix. Add or remove files.",
    )
    splits = DatasetDict()
    for split, (pairs, _) in found.items():
        images, targets = zip(*((str(image), str(file)) for image, file in pairs), strict=True)
        splits[split] = images_at(images, split, **{target: (targets, Image(decode=False))})
    return splits


def _split_roots(folder: Path, target: str) -> dict[str, tuple[Path, Path]]:
    whole = _find_pair_folders(folder, target)
    if whole is not None:
        named = {name: splits_in(side) for name, side in zip(("image", target), whole, strict=True)}
        if not named["image"] and not named[target]:
            return {"train": whole}
        sides = {split: (named["image"].get(split), named[target].get(split)) for split in named["image"]}
    else:
        named_folders = splits_in(folder)
        sides = {split: _find_pair_folders(sub, target) or (sub, None) for split, sub in named_folders.items()}
    complete = {split: (images, targets) for split, (images, targets) in sides.items() if images and targets}
    if complete and (others := sorted(sides.keys() - complete.keys())):
        lack = f"because they have no folder of images or of {target}s: {joined(others)}"
        logger.warning("Ignored splits in %s %s.", folder, lack)
    return complete


def _find_pair_folders(folder: Path, target: str) -> tuple[Path, Path] | None:
    """Return the image folder and the target folder inside a folder, or `None` if one of them is missing."""
    inside = {sub.name.lower(): sub for sub in subfolders(folder)}
    images, targets = (
        next((inside[name] for name in names if name in inside), None)
        for names in (IMAGE_FOLDERS, TARGET_FOLDERS[target])
    )
    return (images, targets) if images and targets else None


def _match(images: Path, targets: Path, target: str) -> tuple[list[tuple[Path, Path]], list[str]]:
    """Return pairs of an image and its target, and a message for each file with no or several counterparts."""
    problems: list[str] = []
    sides = []
    for folder, suffixes in ((images, IMAGE_SUFFIXES), (targets, TARGET_SUFFIXES[target])):
        by_stem = defaultdict(list)
        for file in files_below(folder):
            if file.suffix.lower() in suffixes:
                by_stem[file.relative_to(folder).with_suffix("").as_posix()].append(file)
        if not by_stem:
            return [], [f"{folder} has no file that ends in {', '.join(sorted(suffixes))}"]
        problems += [
            f"{joined(list(map(str, found)))} have the same stem" for found in by_stem.values() if len(found) > 1
        ]
        sides.append({stem: files[0] for stem, files in by_stem.items()})
    if not sides[0].keys() & sides[1].keys():
        sides = [_without_common_words(side) for side in sides]
    problems += _unpaired(sides[0], sides[1], f"no {target} in {targets}")
    problems += _unpaired(sides[1], sides[0], f"no image in {images}")
    return [(file, sides[1][stem]) for stem, file in sorted(sides[0].items()) if stem in sides[1]], problems


def _unpaired(side: dict[str, Path], other: Collection[str], problem: str) -> Iterator[str]:
    return (f"{file}: {problem}" for stem, file in sorted(side.items()) if stem not in other)


def _without_common_words(side: dict[str, Path]) -> dict[str, Path]:
    """Remove the words at the end that all file stems share, unless the shortened stems are no longer unique."""
    words = [stem.split("_")[:0:-1] for stem in side]  # words of each stem from last to second
    common = sum(1 for _ in takewhile(lambda same: len(set(same)) == 1, zip(*words, strict=False)))
    cut = {stem.rsplit("_", common)[0]: file for stem, file in side.items()}
    return cut if len(cut) == len(side) else side
