"""Folders of images at any depth, without annotations."""

from pathlib import Path

from datasets import DatasetDict

from ..reading.files import (
    IMAGE_FOLDERS,
    NO_IMAGE,
    TARGETS,
    files_below,
    images_at,
    is_image,
    subfolders,
    warn_ignored,
)
from ..reading.match import Match, Target
from ..reading.splits import find_split_folders


FOLDER = "folder"  # column of the first subfolder in the path of each image, which may be its class


def detect(path: Path, target: Target) -> Match | None:
    """Find a folder, whatever it contains."""
    return Match(path, "images", rank=4) if path.is_dir() else None


def read(match: Match) -> DatasetDict:
    """List the images in a folder without opening them, with the column `FOLDER` if they are in class folders.

    The subfolders `train/`, `validation/`, `test/`, or their usual aliases are the splits. Without `train/`, all
    images are "train".
    """
    folder = match.path.absolute()  # absolute paths stay valid if the working directory changes
    roots = _split_roots(folder)
    found = {name: _images_below(root) for name, root in roots.items()}
    if not found.get("train"):
        raise ValueError(f"{folder} {NO_IMAGE}")
    splits = DatasetDict(
        {name: images_at([str(file) for file in files], name) for name, files in found.items() if files}
    )
    # The class is the first subfolder in the path of an image. A single subfolder for all images is not a class.
    classes = {name: [(*file.relative_to(roots[name]).parts[:-1], "")[0] for file in found[name]] for name in splits}
    if "" in classes["train"] or len(set(classes["train"])) < 2:
        return splits
    return DatasetDict({name: split.add_column(FOLDER, classes[name]) for name, split in splits.items()})


def _split_roots(folder: Path) -> dict[str, Path]:
    """Return the folders of the splits, such as `train/` or `images/train/`."""
    for place in (folder, *(sub for sub in subfolders(folder) if sub.name.lower() in IMAGE_FOLDERS)):
        found = find_split_folders(place)
        if "train" in found.folders:
            for ignored in found.ignored(place):
                warn_ignored(*ignored)
            return found.folders
    return {"train": folder}


def _images_below(root: Path) -> list[Path]:
    """List the images below a folder, without masks and other targets stored as images."""
    images = [file for file in files_below(root) if is_image(file)]
    folders = {parent for file in images for parent in file.relative_to(root).parents}
    places = {inside.parent for inside in folders if inside.name.lower() in IMAGE_FOLDERS}
    targets = {inside for inside in folders if inside.name.lower() in TARGETS and inside.parent in places}
    warn_ignored(f"folders in {root}", "they contain targets of images", sorted(map(str, targets)))
    return [file for file in images if not targets & set(file.relative_to(root).parents)]
