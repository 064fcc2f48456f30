"""Boxes and keypoints in the JSON files of COCO. Shapes: N objects, K keypoints."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers.utils import logging

from .coco import categories_of, check_references, check_same, image_paths, read_coco
from .coco_checks import check_entries, check_unique
from .files import images_at
from .image_headers import image_sizes
from .keypoint_table import KeypointNames, KeypointTable
from .object_table import ObjectTable, corners, table_of, whole_images
from .wording import MAX_NAMED, in_lines, listed


logger = logging.get_logger(__name__)

Content = dict[str, Any]


def load_coco_objects(files: dict[str, Path]) -> tuple[dict[str, ObjectTable], tuple[str, ...]]:
    """Reads the boxes of annotation files, without opening images whose size they give.

    A category without any box that is only the heading of others, as Roboflow writes one, is no class.

    Args:
        files: Paths by split.

    Returns:
        Objects by split, and the names of the classes in the order of their ids.

    Raises:
        OSError: if an image of unknown size cannot be opened.
        ValueError: if a file is malformed, has two entries of one id, or names images or categories that do not exist,
            or if the files differ in categories.
    """
    contents = {split: read_coco(file) for split, file in files.items()}
    headings = _unused_headings(contents)
    categories = [entry for entry in categories_of(contents, files) if entry["name"] not in headings]
    numbers = {category["id"]: number for number, category in enumerate(categories)}
    tables = {}
    for split, content in contents.items():
        _check_annotations(content, files[split], ("category_id", "bbox"))
        tables[split] = _table(content, files[split], split, numbers)
    return tables, tuple(category["name"] for category in categories)


def load_coco_keypoints(files: dict[str, Path]) -> tuple[dict[str, KeypointTable], KeypointNames]:
    """Reads the keypoints of annotation files, without opening images whose size they give.

    Args:
        files: Paths by split.

    Returns:
        Objects with keypoints by split, and what is known of the keypoints.

    Raises:
        OSError: if an image of unknown size cannot be opened.
        ValueError: as `load_coco_objects`, or if no category has keypoints, or several have, or an object has another
            number of them.
    """
    contents = {split: read_coco(file) for split, file in files.items()}
    found = {split: _keypoint_category(content, files[split]) for split, content in contents.items()}
    check_same({split: _names_of(category) for split, category in found.items()}, files, "keypoints")
    category = next(iter(found.values()))
    tables = {}
    for split, content in contents.items():
        file = files[split]
        _check_annotations(content, file, ("category_id",))
        ours = _of_category(content, found[split]["id"], file)
        keypoints = _keypoints(ours["annotations"], len(category["keypoints"]), file)
        tables[split] = KeypointTable.of(_table(ours, file, split, {found[split]["id"]: 0}), keypoints)
    return tables, _names_of(category)


def _unused_headings(contents: dict[str, Content]) -> list[str]:
    categories = [category for content in contents.values() for category in content["categories"]]
    used = {annotation.get("category_id") for content in contents.values() for annotation in content["annotations"]}
    headings = {
        category.get("supercategory") for category in categories if category.get("supercategory") != category["name"]
    }
    return [category["name"] for category in categories if category["id"] not in used and category["name"] in headings]


def _check_annotations(content: Content, file: Path, keys: tuple[str, ...]) -> None:
    check_entries(content["annotations"], keys, "annotations", file)
    check_unique(content["annotations"], "annotations", file)
    check_references(content, file)


def _table(content: Content, file: Path, split: str, numbers: dict[Any, int]) -> ObjectTable:
    annotations = content["annotations"]
    images = images_at(image_paths(content, file), split)
    sizes = np.array([_size(image) for image in content["images"]])
    unknown = np.flatnonzero((sizes <= 0).any(axis=1))
    sizes[unknown] = image_sizes(images.select(unknown))
    places = {image["id"]: place for place, image in enumerate(content["images"])}
    image_numbers = np.array([places[annotation["image_id"]] for annotation in annotations], np.int64)
    sizes_of_objects = sizes[image_numbers]
    if any("bbox" in annotation for annotation in annotations):
        boxes = corners(_numbers(annotations, "bbox", 4, file), "coco", sizes_of_objects)
    else:  # keypoints alone
        boxes = whole_images(sizes_of_objects)
    return table_of(
        images,
        sizes,
        image_numbers,
        boxes,
        partial(_describe, annotations, file),
        labels=np.array([numbers[annotation["category_id"]] for annotation in annotations], np.int64),
        is_crowd=np.array([bool(annotation.get("iscrowd")) for annotation in annotations]),
        areas=np.array([annotation.get("area") or 0 for annotation in annotations], float),
    )


def _size(image: dict[str, Any]) -> tuple[int, int]:
    """Returns width and height, 0 where they are not given."""
    return int(image.get("width") or 0), int(image.get("height") or 0)


def _describe(annotations: list[dict[str, Any]], file: Path, place: int) -> str:
    entry = annotations[place]
    return f"annotation {entry.get('id', f'at place {place}')} of {file}"


def _numbers(annotations: list[dict[str, Any]], key: str, count: int, file: Path) -> np.ndarray:
    """Returns (N, count) float64 from lists of so many numbers."""
    faults = [
        f"{_describe(annotations, file, place)}: {_in_short(annotation.get(key))}"
        for place, annotation in enumerate(annotations)
        if not _are_numbers(annotation.get(key), count)
    ]
    if faults:
        raise ValueError(
            f"{len(faults)} of {len(annotations)} annotations have no {key} of {count} numbers:"
            f"{in_lines(faults, MAX_NAMED)}"
        )
    return np.array([annotation[key] for annotation in annotations], float).reshape(-1, count)


def _in_short(values: Any) -> str:
    return f"{len(values)} numbers" if isinstance(values, list) and len(values) > 8 else repr(values)


def _are_numbers(values: Any, count: int) -> bool:
    return (
        isinstance(values, list) and len(values) == count and all(isinstance(value, int | float) for value in values)
    )


def _keypoint_category(content: Content, file: Path) -> dict[str, Any]:
    found = [category for category in content["categories"] if category.get("keypoints")]
    if not found:
        raise ValueError(f"{file} has no category with a list of keypoints. Add one, or give keypoints in a CSV.")
    if len(found) > 1:
        names = listed([category["name"] for category in found])
        raise ValueError(
            f"{file} has several categories with keypoints: {names}. Leave one, and train one model each."
        )
    return found[0]


def _names_of(category: dict[str, Any]) -> KeypointNames:
    skeleton = tuple((int(start) - 1, int(end) - 1) for start, end in category.get("skeleton") or ())
    return KeypointNames(tuple(map(str, category["keypoints"])), skeleton)


def _of_category(content: Content, number: Any, file: Path) -> Content:
    """Returns content with the annotations of one category alone."""
    ours = [annotation for annotation in content["annotations"] if annotation["category_id"] == number]
    if others := len(content["annotations"]) - len(ours):
        logger.warning("Left out of %s: %d annotations of categories without keypoints.", file, others)
    return {**content, "annotations": ours}


def _keypoints(annotations: list[dict[str, Any]], count: int, file: Path) -> np.ndarray:
    """Returns (N, K, 3) x, y and visibility, unlabelled where an object, as a crowd, has none."""
    none = {"keypoints": [0] * (3 * count)}
    filled = [annotation if annotation.get("keypoints") else annotation | none for annotation in annotations]
    return _numbers(filled, "keypoints", 3 * count, file).reshape(-1, count, 3)
