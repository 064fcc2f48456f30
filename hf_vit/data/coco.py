"""Annotations in the JSON files of COCO: where they lie, and what all kinds of them have in common."""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .coco_checks import check_entries, check_unique
from .folders import subfolders
from .splits import one_per_split, split_named, split_within
from .wording import in_lines, listed


# What annotations of every kind have.
NEEDED = {"images": ("id", "file_name"), "annotations": ("image_id",), "categories": ("id", "name")}
# Besides files with a kind in their names, as COCO has them.
USUAL_FILES = ("annotations.json", "_annotations.coco.json")


def find_coco(path: Path, kinds: Sequence[str]) -> dict[str, Path]:
    """Finds the annotation files of a data set.

    Args:
        path: A folder with `annotations/instances_train2017.json`, `annotations/train.json`, `train/annotations.json`,
            or `train/_annotations.coco.json`, ..., or such a file.
        kinds: Which of "panoptic", "instances" and "keypoints" will do.

    Returns:
        The files by split; nothing if there are none.

    Raises:
        ValueError: if there are files of several of the kinds, or several for one split.
    """
    if path.is_file():
        return {_split_of(path) or "train": path} if path.suffix.lower() == ".json" else {}
    folders = [path, *subfolders(path)]
    files = [file for folder in folders for file in sorted(folder.glob("*.json")) if _is_annotation(file, kinds)]
    found = [kind for kind in kinds if any(kind in file.stem for file in files)]
    if len(found) > 1:
        raise ValueError(f"{path} has annotations of {' and '.join(found)}. Choose with annotations={found[0]!r}.")
    if len(files) == 1:
        return {_split_of(files[0]) or "train": files[0]}
    return one_per_split((split, file) for file in files if (split := _split_of(file)))


def _is_annotation(file: Path, kinds: Sequence[str]) -> bool:
    if file.name in USUAL_FILES or any(kind in file.stem for kind in kinds):
        return True
    return file.parent.name == "annotations" and split_named(file.stem) is not None


def _split_of(file: Path) -> str | None:
    return split_within(re.sub(r"\d+", " ", file.stem)) or split_named(file.parent.name)


def read_coco(file: Path) -> dict[str, Any]:
    """Reads a file of annotations, of which there may be none.

    Returns:
        Its content, with the lists "images", "annotations" and "categories", whose entries have what all kinds need.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is malformed, or has two images of one id.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no JSON object, as annotations of COCO are.")
    lacks = {key: not isinstance(content.get(key), list) or not content[key] for key in NEEDED}
    lacks["annotations"] = not isinstance(content.get("annotations"), list)  # of which an image may have none
    if missing := [key for key in NEEDED if lacks[key]]:
        raise ValueError(f"{file} has no {' and no '.join(missing)}, which annotations of COCO have.")
    for name, keys in NEEDED.items():
        check_entries(content[name], keys, name, file)
    check_unique(content["images"], "images", file)
    return content


def categories_of(contents: dict[str, dict[str, Any]], files: dict[str, Path]) -> list[dict[str, Any]]:
    """Returns `id`, `name` and `isthing` of the categories, by id.

    Args:
        contents: What `read_coco` returned, by split.
        files: Where it was read, by split.

    Raises:
        ValueError: if two categories have one name, or the files differ in their categories.
    """
    found = {split: _categories(content, files[split]) for split, content in contents.items()}
    check_same(found, files, "categories")
    return next(iter(found.values()))


def check_same(found: dict[str, Any], files: dict[str, Path], what: str) -> None:
    """Raises `ValueError` if what was found differs between splits."""
    first = next(iter(found))
    for split, other in found.items():
        if other != found[first]:
            raise ValueError(f"{files[first]} and {files[split]} differ in {what}. Make them the same.")


def _categories(content: dict[str, Any], file: Path) -> list[dict[str, Any]]:
    categories = sorted(content["categories"], key=lambda category: int(category["id"]))
    names = [str(category["name"]) for category in categories]
    if len(set(names)) < len(names):
        raise ValueError(f"{file} has categories of one name: {listed(sorted(names))}. Rename them.")
    return [
        {"id": category["id"], "name": name, "isthing": bool(category.get("isthing", 1))}
        for category, name in zip(categories, names, strict=True)
    ]


def check_references(content: dict[str, Any], file: Path) -> None:
    """Raises `ValueError` if annotations name images or categories that the file has not."""
    for key, name in (("image_id", "images"), ("category_id", "categories")):
        check_known(content["annotations"], key, {entry["id"] for entry in content[name]}, name, file)


def check_known(entries: Sequence[dict[str, Any]], key: str, known: Any, what: str, file: Path) -> None:
    """Raises `ValueError` if a value of `key` in some entries is not known."""
    if unknown := sorted({entry[key] for entry in entries} - set(known)):
        raise ValueError(f"{file} has annotations of {what} that are not in it: {listed(unknown)}.")


def image_paths(content: dict[str, Any], file: Path) -> list[str]:
    """Returns the path of every image: in `images/` beside the file, beside it, or in `../train2017/` as COCO has it.

    Raises:
        ValueError: if images do not exist.
    """
    above, word = file.parent.parent, file.stem.split("_")[-1]
    beside = [file.parent / "images", file.parent, above / word, above / "images", above / "images" / word]
    return paths_in(content["images"], [*beside, above], file)


def paths_in(entries: list[dict[str, Any]], folders: list[Path], file: Path) -> list[str]:
    """Returns the path of every entry, in the first folder that holds any of them.

    Raises:
        ValueError: if there is no such folder, or it lacks some.
    """
    names = [entry["file_name"] for entry in entries]
    folder = next((folder for folder in folders if any((folder / name).is_file() for name in names)), None)
    if folder is None:
        raise ValueError(f"{names[0]} of {file} lies in none of the folders:{in_lines(folders)}")
    paths = [str(folder.absolute() / name) for name in names]  # the dataset outlives the working directory
    if missing := [path for path in paths if not os.path.isfile(path)]:
        raise ValueError(f"{len(missing)} of {len(paths)} files of {file} do not exist:{in_lines(missing)}")
    return paths
