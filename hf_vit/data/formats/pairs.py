"""Parallel folders of images and of targets that are stored as images: masks or depth maps."""

from collections import defaultdict
from collections.abc import Collection, Iterator
from itertools import takewhile
from pathlib import Path

from datasets import DatasetDict, Image

from ..reading.files import (
    IMAGE_FOLDERS,
    IMAGE_SUFFIXES,
    TARGET_FOLDERS,
    files_below,
    images_at,
    joined,
    raise_faults,
    subfolders,
    walk_files,
)
from ..reading.match import Match, Target
from ..reading.splits import find_split_folders, unread_lists


TARGET_SUFFIXES = {"mask": IMAGE_SUFFIXES, "depth": IMAGE_SUFFIXES | {".npy"}}
AMBIGUOUS = {"labels", "annotations"}  # folders that may also contain text, XML or JSON files
Pairs = tuple[Path, Path]  # folder of images and folder of targets


def detect(path: Path, target: Target) -> Match | None:
    """Find `images/` and `masks/` (or `depths/`, ...), either directly, or as `train/images/` or `images/train/`."""
    if not path.is_dir():
        return None
    folder, what = path.absolute(), _what(target)  # absolute paths stay valid if the working directory changes
    if whole := _find_pair_folders(folder, what):
        sides = [find_split_folders(side, is_divided=lambda sub: True) for side in whole]
        found: dict[str, tuple[Path, Path | None]] = {"train": whole}
        if any(side.folders for side in sides):
            found = {split: (images, sides[1].folders.get(split)) for split, images in sides[0].folders.items()}
    else:
        sides = [find_split_folders(folder, *[lambda sub: _find_pair_folders(sub, what)] * 2)]
        found = {split: _find_pair_folders(sub, what) or (sub, None) for split, sub in sides[0].folders.items()}
    roots = {split: (images, targets) for split, (images, targets) in found.items() if targets}
    if not roots:
        return None
    evidence = f"folders of {what}s {joined([str(targets.relative_to(folder)) for _, targets in roots.values()])}"
    doubt = next((f"has unclear splits: {side.doubt}. Move the folders." for side in sides if side.doubt), "")
    lack = f"they have no folder of images or of {what}s"
    ignored = (
        *sides[0].ignored(folder),
        *unread_lists(folder),
        (f"splits in {folder}", lack, sorted(found.keys() - roots.keys())),
    )
    # Formats with instances have priority over semantic masks.
    return Match(roots, evidence, doubt, ignored, rank=3 if target == "instances" else 0)


def _what(target: Target) -> str:
    return "depth" if target == "depth" else "mask"


def read(match: Match) -> DatasetDict:
    """List pairs of an image and its target ("mask" or "depth"), sorted by path, without opening them.

    The image and its target have the same relative path except for the suffix. If no path matches, the words at the
    end that all file names of a folder share are ignored, as in `1_leftImg8bit.png` and `1_gtFine_labelTrainIds.png`.
    """
    target, roots = _what(match.target), match.files
    found = {split: _match(images, targets, target) for split, (images, targets) in roots.items()}
    raise_faults(
        [problem for _, problems in found.values() for problem in problems],
        f"files in {match.path} do not form pairs",
        f"An image and its {target} must have the same name except for the suffix. Add or remove files.",
    )
    splits = DatasetDict()
    for split, (pairs, _) in found.items():
        images, targets = zip(*((str(image), str(file)) for image, file in pairs), strict=True)
        splits[split] = images_at(images, split, **{target: (targets, Image(decode=False))})
    return splits


def explain(path: Path, target: str) -> str:
    """Return the end of the error message for a path without pairs of images and targets ("mask" or "depth")."""
    if path.is_file():
        return "is a file of an unknown format. Give a parquet file or a folder. Extract archives first."
    image, other = IMAGE_FOLDERS[0], TARGET_FOLDERS[target][0]
    inside = [sub.name for sub in subfolders(path)] if path.is_dir() else []
    return (
        f"needs folders of images and {target}s, but has {joined(inside) if inside else 'no folders'}. Save pairs as "
        f"train/{image}/1.jpg and train/{other}/1.png, ..., or in {image}/ and {other}/."
    )


def _find_pair_folders(folder: Path, target: str) -> Pairs | None:
    """Return the image folder and the target folder inside a folder, or `None` if one of them is missing."""
    inside = {sub.name.lower(): sub for sub in subfolders(folder)}
    images, targets = (
        next((inside[name] for name in names if name in inside and _may_contain(inside[name], suffixes)), None)
        for names, suffixes in ((IMAGE_FOLDERS, IMAGE_SUFFIXES), (TARGET_FOLDERS[target], TARGET_SUFFIXES[target]))
    )
    return (images, targets) if images and targets else None


def _may_contain(folder: Path, suffixes: Collection[str]) -> bool:
    """Return whether a folder has files with one of the suffixes, or a name that no other kind of data uses."""
    is_clear = folder.name.lower() not in AMBIGUOUS
    return is_clear or any(file.suffix.lower() in suffixes for file in walk_files(folder))


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
    sides[1] = _without_image_suffixes(sides[0], sides[1])
    if not sides[0].keys() & sides[1].keys():
        sides = [_without_common_words(side) for side in sides]
    problems += _unpaired(sides[0], sides[1], f"no {target} in {targets}")
    problems += _unpaired(sides[1], sides[0], f"no image in {images}")
    return [(file, sides[1][stem]) for stem, file in sorted(sides[0].items()) if stem in sides[1]], problems


def _without_image_suffixes(images: dict[str, Path], targets: dict[str, Path]) -> dict[str, Path]:
    """Shorten stems such as "1.jpg" of targets that have the full name of their image, as in `1.jpg.png`."""
    names = {f"{stem}{file.suffix}": stem for stem, file in images.items() if stem not in targets}
    return {stem if stem in images else names.get(stem, stem): file for stem, file in targets.items()}


def _unpaired(side: dict[str, Path], other: Collection[str], problem: str) -> Iterator[str]:
    return (f"{file}: {problem}" for stem, file in sorted(side.items()) if stem not in other)


def _without_common_words(side: dict[str, Path]) -> dict[str, Path]:
    """Remove the words at the end that all file stems share, unless the shortened stems are no longer unique."""
    words = [stem.split("_")[:0:-1] for stem in side]  # words of each stem from last to second
    common = sum(1 for _ in takewhile(lambda same: len(set(same)) == 1, zip(*words, strict=False)))
    cut = {stem.rsplit("_", common)[0]: file for stem, file in side.items()}
    return cut if len(cut) == len(side) else side
