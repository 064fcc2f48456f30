"""Annotations in the JSON files of COCO: boxes, keypoints, instances and panoptic segments.

Shapes: N objects, K keypoints.
"""

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict, Image, List, Value
from transformers.utils import logging

from ..datasets import TargetData
from ..targets import instances_target, panoptic_target
from .files import (
    MAX_NAMED,
    images_at,
    in_lines,
    listed,
    one_per_split,
    split_named,
    split_within,
    subfolders,
    visible,
    with_files,
)
from .keypoints import KeypointNames, KeypointTable
from .objects import WHOLE_IMAGE, ObjectTable, corners, table_of
from .orientation import AnnotationOrientation, with_turns
from .text import flag_of, parse_json, read_text


logger = logging.get_logger(__name__)
Entry = Mapping[str, Any]
Content = dict[str, Any]
KINDS = ("panoptic", "instances")  # of masks
# What annotations of every kind have.
NEEDED = {"images": ("id", "file_name"), "annotations": ("image_id",), "categories": ("id", "name")}
# Besides files with a kind in their names, as COCO has them.
USUAL_FILES = ("annotations.json", "_annotations.coco.json")


def _check_entries(entries: Sequence[Any], keys: Iterable[str], what: str, file: Path) -> None:
    lacking = []
    for place, entry in enumerate(entries):
        if not isinstance(entry, dict):
            lacking.append(f"entry {place} is no object but {entry!r}")
        elif missing := [key for key in keys if key not in entry]:
            name = f"id {entry['id']}" if "id" in entry else f"entry {place}"
            lacking.append(f"{name} has no {', '.join(missing)}")
    if lacking:
        raise ValueError(f"{len(lacking)} of {len(entries)} {what} in {file} are incomplete:{in_lines(lacking)}")


def _check_unique(entries: Sequence[Entry], key: str, what: str, file: Path) -> None:
    counts = Counter(entry[key] for entry in entries if key in entry)
    if several := [f"{key} {name}: {count} times" for name, count in counts.items() if count > 1]:
        raise ValueError(
            f"{len(several)} {key}s of {what} in {file} occur more than once:{in_lines(several, MAX_NAMED)}\nGive "
            f"each entry its own {key}, or join the entries that mean the same."
        )


def _labeled(entry: Entry, numbers: Mapping[int, int], file: Path) -> dict[str, Any]:
    number, label = entry.get("id"), numbers[entry["category_id"]]
    return {"id": number, "label": label, "iscrowd": flag_of(entry.get("iscrowd"), f"iscrowd of {number} in {file}")}


def _check_instances(annotations: Sequence[Entry], images: Iterable[Entry], file: Path) -> None:
    sizes = {image["id"]: (image["height"], image["width"]) for image in images}
    faults = [
        f"annotation {annotation.get('id', 'without id')} {fault}"
        for annotation in annotations
        if (fault := _fault(annotation.get("segmentation"), *sizes[annotation["image_id"]]))
    ]
    if faults:
        raise ValueError(
            f"{len(faults)} of {len(annotations)} annotations in {file} have no mask:{in_lines(faults)}\nRepair them, "
            "or leave them out."
        )


def _fault(segmentation: Any, height: int, width: int) -> str | None:
    """Returns what is wrong with a mask, if anything that shows without drawing it."""
    if isinstance(segmentation, dict) and {"counts", "size"} <= segmentation.keys():
        return None
    if not isinstance(segmentation, list) or not segmentation:
        return "has no segmentation (polygons or run lengths): boxes alone make no masks"
    if not all(isinstance(points, list) and len(points) >= 6 and len(points) % 2 == 0 for points in segmentation):
        return "has no polygons of at least three points x, y"
    values = np.array([value for points in segmentation for value in points])
    if values.dtype.kind not in "iuf" or not np.isfinite(values).all():
        return "has a polygon with something else than numbers"
    places = values.reshape(-1, 2)  # x and y
    # What is far out is a slip, and drawing it would take more memory than there is.
    if (abs(places) > 2 * max(height, width)).any():
        return f"has a polygon far outside the image of {height} x {width} pixels"
    polygons = np.split(places, np.cumsum([len(points) // 2 for points in segmentation])[:-1])
    size = (width, height)
    if not any((polygon.max(axis=0) > 0).all() and (polygon.min(axis=0) < size).all() for polygon in polygons):
        return f"lies wholly outside the image of {height} x {width} pixels"
    return None


def find_coco(path: Path, kinds: Sequence[str]) -> dict[str, Path]:
    """Finds annotation files by split, of any of `kinds`: "panoptic", "instances" and "keypoints"."""
    # In a folder with `annotations/instances_train2017.json`, `annotations/train.json`, `train/annotations.json`, or
    # `train/_annotations.coco.json`, ..., or at the path itself.
    if path.is_file():
        return {_split_of(path) or "train": path} if path.suffix.lower() == ".json" else {}
    folders = [path, *subfolders(path)]
    files = [file for folder in folders for file in visible(folder.glob("*.json")) if _is_annotation(file, kinds)]
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


def _read_coco(file: Path) -> Content:
    """Reads "images", "annotations", of which there may be none, and "categories" with what all kinds need."""
    try:
        content = parse_json(read_text(file))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no JSON object, as annotations of COCO are.")
    lacks = {key: not isinstance(content.get(key), list) or not content[key] for key in NEEDED}
    lacks["annotations"] = not isinstance(content.get("annotations"), list)  # of which an image may have none
    if missing := [key for key in NEEDED if lacks[key]]:
        raise ValueError(f"{file} has no {' and no '.join(missing)}, which annotations of COCO have.")
    for name, keys in NEEDED.items():
        _check_entries(content[name], keys, name, file)
    for key in NEEDED["images"]:
        _check_unique(content["images"], key, "images", file)
    return content


def _categories_of(contents: Mapping[str, Content], files: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Returns `id`, `name` and `isthing` of the categories, by id, from contents and files by split."""
    found = {split: _categories(content, files[split]) for split, content in contents.items()}
    _check_same(found, files, "categories")
    return next(iter(found.values()))


def _check_same(found: dict[str, Any], files: Mapping[str, Path], what: str) -> None:
    first = next(iter(found))
    for split, other in found.items():
        if other != found[first]:
            raise ValueError(f"{files[first]} and {files[split]} differ in {what}. Make them the same.")


def _categories(content: Content, file: Path) -> list[dict[str, Any]]:
    categories = sorted(content["categories"], key=lambda category: int(category["id"]))
    names = [str(category["name"]) for category in categories]
    if len(set(names)) < len(names):
        raise ValueError(f"{file} has categories of one name: {listed(sorted(names))}. Rename them.")
    return [
        {
            "id": category["id"],
            "name": name,
            "isthing": flag_of(category.get("isthing", 1), f"isthing of {name!r} in {file}"),
        }
        for category, name in zip(categories, names, strict=True)
    ]


def _check_references(content: Content, file: Path) -> None:
    for key, name in (("image_id", "images"), ("category_id", "categories")):
        _check_known(content["annotations"], key, {entry["id"] for entry in content[name]}, name, file)


def _check_known(entries: Sequence[dict[str, Any]], key: str, known: Any, what: str, file: Path) -> None:
    if unknown := sorted({entry[key] for entry in entries} - set(known)):
        raise ValueError(f"{file} has annotations of {what} that are not in it: {listed(unknown)}.")


def _image_paths(content: Content, file: Path) -> list[str]:
    """Looks for images in `images/` beside the file, beside it, or in `../train2017/` as COCO has it."""
    above, word = file.parent.parent, file.stem.split("_")[-1]
    beside = [file.parent / "images", file.parent, above / word, above / "images", above / "images" / word]
    return _paths_in(content["images"], [*beside, above], file)


def _paths_in(entries: list[dict[str, Any]], folders: list[Path], file: Path) -> list[str]:
    names = [entry["file_name"] for entry in entries]
    folder = next((folder for folder in folders if any((folder / name).is_file() for name in names)), None)
    if folder is None:
        raise ValueError(f"{names[0]} of {file} lies in none of the folders:{in_lines(folders)}")
    paths = [str(folder.absolute() / name) for name in names]  # the dataset outlives the working directory
    if missing := [path for path in paths if not os.path.isfile(path)]:
        raise ValueError(f"{len(missing)} of {len(paths)} files of {file} do not exist:{in_lines(missing)}")
    return paths


def load_coco_masks(files: Mapping[str, Path], orientation: AnnotationOrientation) -> TargetData:
    """Reads annotations with masks, without decoding images."""
    # Panoptic masks lie in the folder called like their file, `panoptic/` or `masks/`. Rows have the column `panoptic`
    # (`datasets.Image`, not decoded) with `segments` (`id`, `label`, `iscrowd`), or `objects` (JSON: a list of `id`,
    # `label`, `iscrowd` and `segmentation`) with `height` and `width`.
    contents = {split: _read_coco(file) for split, file in files.items()}
    kinds = {split: _kind(content, files[split]) for split, content in contents.items()}
    _check_same(kinds, files, "kind")
    categories = _categories_of(contents, files)
    is_panoptic = next(iter(kinds.values())) == "panoptic"
    numbers = {category["id"]: number for number, category in enumerate(categories)}
    read = _panoptic_rows if is_panoptic else _instance_rows
    rows = DatasetDict({split: read(contents[split], file, numbers, split) for split, file in files.items()})
    return TargetData(
        with_turns(with_files(rows), "panoptic" if is_panoptic else None, orientation),
        panoptic_target if is_panoptic else instances_target,
        tuple(category["name"] for category in categories),
        tuple(numbers[category["id"]] for category in categories if category["isthing"] or not is_panoptic),
    )


def _kind(content: Content, file: Path) -> str:
    if not content["annotations"]:
        raise ValueError(f"{file} has no annotations, which annotations of COCO have.")
    return "panoptic" if "segments_info" in content["annotations"][0] else "instances"


def _panoptic_rows(content: Content, file: Path, numbers: dict[int, int], split: str) -> Dataset:
    annotations = content["annotations"]
    _check_entries(annotations, ("file_name", "segments_info"), "annotations", file)
    listed_segments = [segment for annotation in annotations for segment in annotation["segments_info"]]
    _check_entries(listed_segments, ("id", "category_id"), "segments_info", file)
    images = _image_paths(content, file)
    by_id = {image["id"]: path for image, path in zip(content["images"], images, strict=True)}
    folders = [file.with_suffix(""), file.parent / "panoptic", file.parent / "masks"]
    masks = _paths_in(annotations, folders, file)
    _check_known(annotations, "image_id", by_id, "images", file)
    _check_known(listed_segments, "category_id", numbers, "categories", file)
    if bare := by_id.keys() - {annotation["image_id"] for annotation in annotations}:
        logger.warning("Left out of %s, as they have no annotation: the images %s.", file, listed(sorted(bare)))
    segments = [
        [_labeled(segment, numbers, file) for segment in annotation["segments_info"]] for annotation in annotations
    ]
    kind = List({"id": Value("int64"), "label": Value("int64"), "iscrowd": Value("bool")})
    paths = [by_id[annotation["image_id"]] for annotation in annotations]
    return images_at(paths, split, panoptic=(masks, Image(decode=False)), segments=(segments, kind))


def _instance_rows(content: Content, file: Path, numbers: dict[int, int], split: str) -> Dataset:
    images, annotations = content["images"], content["annotations"]
    _check_entries(images, ("height", "width"), "images", file)
    _check_entries(annotations, ("category_id",), "annotations", file)
    _check_references(content, file)
    _check_instances(annotations, images, file)
    by_image = defaultdict(list)
    for annotation in annotations:
        found = {**_labeled(annotation, numbers, file), "segmentation": annotation["segmentation"]}
        by_image[annotation["image_id"]].append(found)
    objects = [json.dumps(by_image[image["id"]]) for image in images]
    sizes = {side: ([image[side] for image in images], Value("int64")) for side in ("height", "width")}
    return images_at(_image_paths(content, file), split, objects=(objects, Value("string")), **sizes)


def load_coco_objects(files: Mapping[str, Path]) -> tuple[dict[str, ObjectTable], tuple[str, ...]]:
    """Reads boxes and the names of classes by id, without opening images whose size is given."""
    # A category without any box that is only the heading of others, as Roboflow writes one, is no class.
    contents = {split: _read_coco(file) for split, file in files.items()}
    headings = _unused_headings(contents)
    categories = [entry for entry in _categories_of(contents, files) if entry["name"] not in headings]
    numbers = {category["id"]: number for number, category in enumerate(categories)}
    tables = {}
    for split, content in contents.items():
        _check_annotations(content, files[split], ("category_id", "bbox"))
        tables[split] = _table(content, files[split], split, numbers)
    return tables, tuple(category["name"] for category in categories)


def load_coco_keypoints(files: Mapping[str, Path]) -> tuple[dict[str, KeypointTable], KeypointNames]:
    """Reads objects with keypoints by split, without opening images whose size is given."""
    contents = {split: _read_coco(file) for split, file in files.items()}
    found = {split: _keypoint_category(content, files[split]) for split, content in contents.items()}
    _check_same({split: _names_of(category) for split, category in found.items()}, files, "keypoints")
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
    _check_entries(content["annotations"], keys, "annotations", file)
    _check_unique(content["annotations"], "id", "annotations", file)
    _check_references(content, file)


def _table(content: Content, file: Path, split: str, numbers: dict[Any, int]) -> ObjectTable:
    annotations = content["annotations"]
    images = images_at(_image_paths(content, file), split)
    sizes = np.array([[int(image.get(side) or 0) for side in ("width", "height")] for image in content["images"]])
    places = {image["id"]: place for place, image in enumerate(content["images"])}
    image_numbers = np.array([places[annotation["image_id"]] for annotation in annotations], np.int64)
    has_boxes = any("bbox" in annotation for annotation in annotations)  # not if there are keypoints alone
    boxes = _numbers(annotations, "bbox", 4, file) if has_boxes else np.tile(WHOLE_IMAGE, (len(annotations), 1))
    return table_of(
        images,
        sizes,
        image_numbers,
        corners(boxes, "coco", sizes[image_numbers]),
        partial(_describe, annotations, file),
        is_share=not has_boxes,
        labels=np.array([numbers[annotation["category_id"]] for annotation in annotations], np.int64),
        is_crowd=[annotation.get("iscrowd") for annotation in annotations],
        areas=np.array([annotation.get("area") or 0 for annotation in annotations], float),
    )


def _describe(annotations: list[dict[str, Any]], file: Path, place: int) -> str:
    entry = annotations[place]
    return f"annotation {entry.get('id', f'at place {place}')} of {file}"


def _numbers(annotations: list[dict[str, Any]], key: str, count: int, file: Path) -> np.ndarray:
    """Returns (N, count) float64 from lists of so many numbers."""
    faults = []
    for place, annotation in enumerate(annotations):
        found: Any = annotation.get(key)
        is_list = isinstance(found, list) and len(found) == count
        if not (is_list and all(isinstance(value, int | float) for value in found)):
            short = f"{len(found)} numbers" if isinstance(found, list) and len(found) > 8 else repr(found)
            faults.append(f"{_describe(annotations, file, place)}: {short}")
    if faults:
        raise ValueError(
            f"{len(faults)} of {len(annotations)} annotations have no {key} of {count} numbers:"
            f"{in_lines(faults, MAX_NAMED)}"
        )
    return np.array([annotation[key] for annotation in annotations], float).reshape(-1, count)


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
    ours = [annotation for annotation in content["annotations"] if annotation["category_id"] == number]
    if others := len(content["annotations"]) - len(ours):
        logger.warning("Left out of %s: %d annotations of categories without keypoints.", file, others)
    return {**content, "annotations": ours}


def _keypoints(annotations: list[dict[str, Any]], count: int, file: Path) -> np.ndarray:
    """Returns (N, K, 3) x, y and visibility, unlabeled where an object, as a crowd, has none."""
    none = {"keypoints": [0] * (3 * count)}
    filled = [annotation if annotation.get("keypoints") else annotation | none for annotation in annotations]
    return _numbers(filled, "keypoints", 3 * count, file).reshape(-1, count, 3)
