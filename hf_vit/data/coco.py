"""Annotations in the JSON files of COCO: panoptic segments, and instances as polygons or run lengths."""

import json
import os
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, Features, Image, List, NamedSplit, Value
from transformers.utils import logging

from .coco_checks import check_entries, check_instances
from .folders import subfolders
from .splits import one_per_split, split_named, split_within
from .wording import in_lines, listed


logger = logging.get_logger(__name__)

KINDS = ("panoptic", "instances")
# What annotations of either kind have.
NEEDED = {"images": ("id", "file_name"), "annotations": ("image_id",), "categories": ("id", "name")}
# Besides files with one of the kinds in their names, as COCO has them.
USUAL_FILES = ("annotations.json", "_annotations.coco.json")


@dataclass(frozen=True)
class CocoData:
    """What a data set in the format of COCO holds.

    Args:
        kind: "panoptic" or "instances".
        splits: Rows with the columns `image` and, of the kind, `panoptic` (`datasets.Image`, not decoded) and
            `segments` (`id`, `label`, `iscrowd`), or `objects` (JSON: a list of `id`, `label`, `iscrowd` and
            `segmentation`), `height` and `width`.
        names: Names of the classes, in the order of their ids.
        thing_ids: Numbers of the classes that are things.
    """

    kind: str
    splits: DatasetDict
    names: tuple[str, ...]
    thing_ids: tuple[int, ...]


def find_coco(path: Path, kind: str | None) -> dict[str, Path]:
    """Finds the annotation files of a data set.

    Args:
        path: A folder with `annotations/instances_train2017.json`, or `train/annotations.json`, ..., or such a file.
        kind: "panoptic" or "instances", where there are both.

    Returns:
        The files by split; nothing if there are none.

    Raises:
        ValueError: if there are files of both kinds, or several for one split.
    """
    if path.is_file():
        return {_split_of(path) or "train": path} if path.suffix.lower() == ".json" else {}
    folders = [path, *subfolders(path)]
    files = [file for folder in folders for file in sorted(folder.glob("*.json")) if _is_annotation(file)]
    kinds = [word for word in KINDS if any(word in file.stem for file in files)]
    if kind is not None:
        files = [file for file in files if kind in file.stem or file.name in USUAL_FILES]
    elif len(kinds) > 1:
        raise ValueError(f"{path} has annotations of {' and '.join(kinds)}. Choose with annotations={kinds[0]!r}.")
    if len(files) == 1:
        return {_split_of(files[0]) or "train": files[0]}
    return one_per_split((split, file) for file in files if (split := _split_of(file)))


def _is_annotation(file: Path) -> bool:
    return file.name in USUAL_FILES or any(word in file.stem for word in KINDS)


def _split_of(file: Path) -> str | None:
    return split_within(re.sub(r"\d+", " ", file.stem)) or split_named(file.parent.name)


def load_coco(files: dict[str, Path]) -> CocoData:
    """Reads annotation files, without opening images.

    Images lie in `images/` beside their file, beside it, or as COCO has them, in `../train2017/`; panoptic masks in
    the folder called like their file, `panoptic/` or `masks/`.

    Args:
        files: Paths by split.

    Raises:
        ValueError: if a file is malformed, lacks masks, or names images or categories that do not exist, or if the
            files differ in kind or categories.
    """
    contents = {split: _read(file) for split, file in files.items()}
    first = next(iter(files))
    categories = _categories(contents[first], files[first])
    kind = _kind(contents[first])
    for split, content in contents.items():
        if _kind(content) != kind or _categories(content, files[split]) != categories:
            raise ValueError(f"{files[first]} and {files[split]} differ in kind or categories. Make them the same.")
    numbers = {category["id"]: number for number, category in enumerate(categories)}
    rows = _panoptic_rows if kind == "panoptic" else _instance_rows
    return CocoData(
        kind,
        DatasetDict({split: rows(contents[split], file, numbers, split) for split, file in files.items()}),
        tuple(category["name"] for category in categories),
        tuple(numbers[category["id"]] for category in categories if kind == "instances" or category["isthing"]),
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no JSON object, as annotations of COCO are.")
    if missing := [key for key in NEEDED if not content.get(key)]:
        raise ValueError(f"{file} has no {' and no '.join(missing)}, which annotations of COCO have.")
    for name, keys in NEEDED.items():
        check_entries(content[name], keys, name, file)
    return content


def _kind(content: dict[str, Any]) -> str:
    return "panoptic" if "segments_info" in content["annotations"][0] else "instances"


def _categories(content: dict[str, Any], file: Path) -> list[dict[str, Any]]:
    categories = sorted(content["categories"], key=lambda category: int(category["id"]))
    names = [str(category["name"]) for category in categories]
    if len(set(names)) < len(names):
        raise ValueError(f"{file} has categories of one name: {listed(sorted(names))}. Rename them.")
    return [
        {"id": category["id"], "name": name, "isthing": bool(category.get("isthing", 1))}
        for category, name in zip(categories, names, strict=True)
    ]


def _panoptic_rows(content: dict[str, Any], file: Path, numbers: dict[int, int], split: str) -> Dataset:
    annotations = content["annotations"]
    check_entries(annotations, ("file_name", "segments_info"), "annotations", file)
    listed_segments = [segment for annotation in annotations for segment in annotation["segments_info"]]
    check_entries(listed_segments, ("id", "category_id"), "segments_info", file)
    images = _paths(content["images"], _image_folders(file), file)
    by_id = {image["id"]: path for image, path in zip(content["images"], images, strict=True)}
    folders = [file.with_suffix(""), file.parent / "panoptic", file.parent / "masks"]
    masks = _paths(annotations, folders, file)
    segments = [annotation["segments_info"] for annotation in annotations]
    _check_known([annotation["image_id"] for annotation in annotations], by_id, "images", file)
    _check_known([segment["category_id"] for segment in listed_segments], numbers, "categories", file)
    _warn_of_bare(by_id.keys() - {annotation["image_id"] for annotation in annotations}, file)
    return Dataset.from_dict(
        {
            "image": [by_id[annotation["image_id"]] for annotation in annotations],
            "panoptic": masks,
            "segments": [
                [
                    {
                        "id": segment["id"],
                        "label": numbers[segment["category_id"]],
                        "iscrowd": bool(segment.get("iscrowd", 0)),
                    }
                    for segment in found
                ]
                for found in segments
            ],
        },
        features=Features(
            {
                "image": Image(),
                "panoptic": Image(decode=False),
                "segments": List({"id": Value("int64"), "label": Value("int64"), "iscrowd": Value("bool")}),
            }
        ),
        split=NamedSplit(split),
    )


def _instance_rows(content: dict[str, Any], file: Path, numbers: dict[int, int], split: str) -> Dataset:
    images, annotations = content["images"], content["annotations"]
    check_entries(images, ("height", "width"), "images", file)
    check_entries(annotations, ("category_id",), "annotations", file)
    ids = {image["id"] for image in images}
    _check_known([annotation["image_id"] for annotation in annotations], ids, "images", file)
    _check_known([annotation["category_id"] for annotation in annotations], numbers, "categories", file)
    check_instances(annotations, images, file)
    by_image = defaultdict(list)
    for annotation in annotations:
        by_image[annotation["image_id"]].append(
            {
                "id": annotation.get("id"),
                "label": numbers[annotation["category_id"]],
                "iscrowd": bool(annotation.get("iscrowd", 0)),
                "segmentation": annotation["segmentation"],
            }
        )
    return Dataset.from_dict(
        {
            "image": _paths(images, _image_folders(file), file),
            "objects": [json.dumps(by_image[image["id"]]) for image in images],
            "height": [image["height"] for image in images],
            "width": [image["width"] for image in images],
        },
        features=Features(
            {"image": Image(), "objects": Value("string"), "height": Value("int64"), "width": Value("int64")}
        ),
        split=NamedSplit(split),
    )


def _check_known(used: list[Any], known: Any, what: str, file: Path) -> None:
    if unknown := sorted(set(used) - set(known)):
        raise ValueError(f"{file} has annotations of {what} that are not in it: {listed(unknown)}.")


def _warn_of_bare(ids: set[Any], file: Path) -> None:
    if ids:
        logger.warning("Left out of %s, as they have no annotation: the images %s.", file, listed(sorted(ids)))


def _image_folders(file: Path) -> list[Path]:
    beside = [file.parent / "images", file.parent]
    return [*beside, *(file.parent.parent / place for place in (file.stem.split("_")[-1], "images"))]


def _paths(entries: list[dict[str, Any]], folders: list[Path], file: Path) -> list[str]:
    """Returns the path of every entry, in the first folder that holds the first of them."""
    names = [entry["file_name"] for entry in entries]
    folder = next((folder for folder in folders if (folder / names[0]).is_file()), None)
    if folder is None:
        raise ValueError(f"{names[0]} of {file} lies in none of the folders:{in_lines(folders)}")
    paths = [str(folder.absolute() / name) for name in names]  # the dataset outlives the working directory
    if missing := [path for path in paths if not os.path.isfile(path)]:
        raise ValueError(f"{len(missing)} of {len(paths)} files of {file} do not exist:{in_lines(missing)}")
    return paths
