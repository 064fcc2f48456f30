"""Masks in the JSON files of COCO: panoptic segments, and instances as polygons or run lengths."""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, Features, Image, List, NamedSplit, Value
from transformers.utils import logging

from .coco import categories_of, check_known, check_references, check_same, image_paths, paths_in, read_coco
from .coco_checks import check_entries, check_instances
from .wording import listed


logger = logging.get_logger(__name__)

KINDS = ("panoptic", "instances")


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


def load_coco_masks(files: dict[str, Path]) -> CocoData:
    """Reads annotation files, without opening images.

    Images lie where `image_paths` looks for them; panoptic masks in the folder called like their file, `panoptic/` or
    `masks/`.

    Args:
        files: Paths by split.

    Raises:
        ValueError: if a file is malformed, lacks masks, or names images or categories that do not exist, or if the
            files differ in kind or categories.
    """
    contents = {split: read_coco(file) for split, file in files.items()}
    kinds = {split: _kind(content, files[split]) for split, content in contents.items()}
    check_same(kinds, files, "kind")
    categories = categories_of(contents, files)
    kind = next(iter(kinds.values()))
    numbers = {category["id"]: number for number, category in enumerate(categories)}
    rows = _panoptic_rows if kind == "panoptic" else _instance_rows
    return CocoData(
        kind,
        DatasetDict({split: rows(contents[split], file, numbers, split) for split, file in files.items()}),
        tuple(category["name"] for category in categories),
        tuple(numbers[category["id"]] for category in categories if kind == "instances" or category["isthing"]),
    )


def _kind(content: dict[str, Any], file: Path) -> str:
    if not content["annotations"]:
        raise ValueError(f"{file} has no annotations, which annotations of COCO have.")
    return "panoptic" if "segments_info" in content["annotations"][0] else "instances"


def _panoptic_rows(content: dict[str, Any], file: Path, numbers: dict[int, int], split: str) -> Dataset:
    annotations = content["annotations"]
    check_entries(annotations, ("file_name", "segments_info"), "annotations", file)
    listed_segments = [segment for annotation in annotations for segment in annotation["segments_info"]]
    check_entries(listed_segments, ("id", "category_id"), "segments_info", file)
    images = image_paths(content, file)
    by_id = {image["id"]: path for image, path in zip(content["images"], images, strict=True)}
    folders = [file.with_suffix(""), file.parent / "panoptic", file.parent / "masks"]
    masks = paths_in(annotations, folders, file)
    segments = [annotation["segments_info"] for annotation in annotations]
    check_known(annotations, "image_id", by_id, "images", file)
    check_known(listed_segments, "category_id", numbers, "categories", file)
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
    check_references(content, file)
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
            "image": image_paths(content, file),
            "objects": [json.dumps(by_image[image["id"]]) for image in images],
            "height": [image["height"] for image in images],
            "width": [image["width"] for image in images],
        },
        features=Features(
            {"image": Image(), "objects": Value("string"), "height": Value("int64"), "width": Value("int64")}
        ),
        split=NamedSplit(split),
    )


def _warn_of_bare(ids: set[Any], file: Path) -> None:
    if ids:
        logger.warning("Left out of %s, as they have no annotation: the images %s.", file, listed(sorted(ids)))
