"""Annotation files of COCO (JSON) with boxes, instance masks and keypoints.

Shapes: N objects, K keypoints.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers.utils import logging

from ..reading.coco_file import (
    CocoFile,
    Entry,
    check_entries,
    check_same,
    check_unique,
    find_files,
    has_segments,
    read_all,
    read_file,
)
from ..reading.files import images_at, joined, raise_faults
from ..reading.keypoints import KeypointNames
from ..reading.masks import mask_fault
from ..reading.match import Match, Target
from ..reading.objects import WHOLE_IMAGE, ObjectData, ObjectTable, corners, table_of


logger = logging.get_logger(__name__)


def detect(path: Path, target: Target) -> Match | None:
    """Find files such as `annotations/instances_train2017.json` or `train/_annotations.coco.json` by split."""
    kind = "keypoints" if target == "points" else "instances"
    files, ignored = find_files(path, [kind])
    files = {split: file for split, file in files.items() if kind in file.name or not has_segments(file)}
    return Match(files, joined([file.name for file in files.values()]), ignored=ignored) if files else None


def read(match: Match) -> ObjectData:
    """Read objects, and class names in the order of category ids. Open an image only if its size is not given."""
    files: dict[str, Path] = match.files
    if match.target == "points":
        return _read_points([read_file(split, file) for split, file in files.items()])
    contents = read_all(files)
    # Roboflow adds a category without objects that is only the supercategory of other categories. It is not a class.
    used = {annotation.get("category_id") for content in contents for annotation in content.annotations}
    all_categories = contents[0].categories
    headings = {entry.get("supercategory") for entry in all_categories if entry.get("supercategory") != entry["name"]}
    categories = [entry for entry in all_categories if entry["id"] in used or entry["name"] not in headings]
    numbers = {category["id"]: number for number, category in enumerate(categories)}
    read_table = _masks if match.target == "instances" else _boxes
    tables = [read_table(content, numbers) for content in contents]
    return ObjectData(tables, next(iter(files.values())), tuple(category["name"] for category in categories))


def _boxes(content: CocoFile, numbers: Mapping[Any, int]) -> ObjectTable:
    content.check_annotations("category_id", "bbox")
    return _table(content, numbers)


def _masks(content: CocoFile, numbers: Mapping[Any, int]) -> ObjectTable:
    annotations, images = content.annotations, content.images
    if not annotations:
        raise ValueError(f"{content.path} has no annotations. Add annotations.")
    check_entries(images, ("height", "width"), "images", content.path)
    content.check_annotations("category_id")
    shapes = {image["id"]: (image["height"], image["width"]) for image in images}
    masks = [annotation.get("segmentation") for annotation in annotations]
    faults = [
        f"annotation {annotation.get('id', 'without id')} {fault}"
        for annotation, mask in zip(annotations, masks, strict=True)
        if (fault := mask_fault(mask, *shapes[annotation["image_id"]]))
    ]
    finding = f"of {len(annotations)} annotations in {content.path} have no valid mask"
    raise_faults(faults, finding, "Repair or remove them.")
    return _table(content, numbers, masks=masks)


def _read_points(contents: Sequence[CocoFile]) -> ObjectData:
    check_same(contents, lambda content: _names_of(_keypoint_category(content)), "keypoints")
    tables = []
    for content in contents:
        content.check_annotations("category_id")
        category = _keypoint_category(content)
        ours = [annotation for annotation in content.annotations if annotation["category_id"] == category["id"]]
        if others := len(content.annotations) - len(ours):
            logger.warning("Ignored in %s: %d annotations of categories without keypoints.", content.path, others)
        # Objects without keypoints, such as crowds, get unlabeled keypoints.
        count = len(category["keypoints"])
        none = {"keypoints": [0] * (3 * count)}
        filled = [annotation if annotation.get("keypoints") else annotation | none for annotation in ours]
        content = replace(content, annotations=filled)
        keypoints = content.numbers("keypoints", 3 * count).reshape(-1, count, 3)
        tables.append(_table(content, {category["id"]: 0}, keypoints=keypoints))
    return ObjectData(tables, contents[0].path, keypoints=_names_of(_keypoint_category(contents[0])))


def _table(
    content: CocoFile,
    numbers: Mapping[Any, int],
    masks: Sequence[Any] | None = None,
    keypoints: np.ndarray | None = None,
) -> ObjectTable:
    """Return the table of a file. If there are masks, boxes and areas are not read."""
    annotations, images = content.annotations, content.images
    has_boxes = masks is None and any("bbox" in annotation for annotation in annotations)
    areas = None
    if masks is None:
        check_unique(annotations, "id", "annotations", content.path)
        areas = np.array([annotation.get("area") or 0 for annotation in annotations], float)
    places = {image["id"]: place for place, image in enumerate(images)}
    return table_of(
        content.split,
        images_at(content.image_paths(), content.split),
        np.array([[int(image.get(side) or 0) for side in ("width", "height")] for image in images]),
        np.array([places[annotation["image_id"]] for annotation in annotations], np.int64),
        corners(content.numbers("bbox", 4), "coco") if has_boxes else np.tile(WHOLE_IMAGE, (len(annotations), 1)),
        [content.describe(place) for place in range(len(annotations))],
        is_share=not has_boxes,
        labels=np.array([numbers[annotation["category_id"]] for annotation in annotations], np.int64),
        is_crowd=[annotation.get("iscrowd") for annotation in annotations],
        areas=areas,
        keypoints=keypoints,
        masks=masks,
    )


def _keypoint_category(content: CocoFile) -> Entry:
    found = [category for category in content.categories if category.get("keypoints")]
    if len(found) != 1:
        names = joined([category["name"] for category in found]) or "none"
        raise ValueError(
            f"{content.path} must have one category with a list of keypoints, but has {names}. Train one model per "
            "category, or give keypoints in a CSV file."
        )
    return found[0]


def _names_of(category: Entry) -> KeypointNames:
    skeleton = tuple((int(start) - 1, int(end) - 1) for start, end in category.get("skeleton") or ())
    return KeypointNames(tuple(map(str, category["keypoints"])), skeleton)
