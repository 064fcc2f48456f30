"""Reader of COCO annotation files (JSON): boxes, keypoints, instance masks and panoptic masks.

Shapes: N objects, K keypoints.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict, Image, List, Value
from transformers.utils import logging

from ..datasets import TargetData
from ..targets import instances_target, panoptic_target
from .columns import SourceOptions
from .files import (
    add_file_column,
    by_unique_split,
    check_exist,
    images_at,
    in_lines,
    joined,
    parse_flag,
    parse_json,
    raise_faults,
    read_text,
    split_from_alias,
    split_in_name,
    subfolders,
    visible,
)
from .keypoints import KeypointNames
from .objects import WHOLE_IMAGE, ObjectTable, check_no_class_names, corners, table_of
from .orientation import AnnotationOrientation, add_turn_column


logger = logging.get_logger(__name__)
Entry = dict[str, Any]
KINDS = ("panoptic", "instances")  # Kinds of COCO annotation files that contain masks.
# Lists that each annotation file must contain, with the required keys of their entries.
NEEDED = {"images": ("id", "file_name"), "annotations": ("image_id",), "categories": ("id", "name")}
# Usual file names that do not contain the kind of annotations, such as "keypoints".
USUAL_FILES = ("annotations.json", "_annotations.coco.json")


def find_coco(path: Path, kinds: Sequence[str]) -> dict[str, Path]:
    """Find annotation files by split. `kinds` lists the accepted kinds: "panoptic", "instances" or "keypoints".

    The path is an annotation file, or a folder with `annotations/instances_train2017.json`, `annotations/train.json`,
    `train/annotations.json`, or `train/_annotations.coco.json`, ...
    """
    if path.is_file():
        return {_split_of(path) or "train": path} if path.suffix.lower() == ".json" else {}
    folders = [path, *subfolders(path)]
    files = [file for folder in folders for file in visible(folder.glob("*.json")) if _is_annotation(file, kinds)]
    found = [kind for kind in kinds if any(kind in file.stem for file in files)]
    if len(found) > 1:
        raise ValueError(
            f"{path} has annotation files of {' and '.join(found)}. Choose one kind, as in annotations={found[0]!r}."
        )
    if len(files) == 1:
        return {_split_of(files[0]) or "train": files[0]}
    return by_unique_split((split, file) for file in files if (split := _split_of(file)))


def _is_annotation(file: Path, kinds: Sequence[str]) -> bool:
    if file.name in USUAL_FILES or any(kind in file.stem for kind in kinds):
        return True
    return file.parent.name == "annotations" and split_from_alias(file.stem) is not None


def _split_of(file: Path) -> str | None:
    return split_in_name(re.sub(r"\d+", " ", file.stem)) or split_from_alias(file.parent.name)


@dataclass(frozen=True)
class CocoFile:
    """The annotation file of a split. Its categories are sorted by `id`, and all of them have the key `isthing`."""

    split: str
    path: Path
    images: list[Entry]
    annotations: list[Entry]
    categories: list[Entry]

    def check_annotations(self, *keys: str) -> None:
        """Raise `ValueError` if a given key is missing in an annotation, or if a given "category_id" is unknown."""
        _check_entries(self.annotations, keys, "annotations", self.path)
        if "category_id" in keys:
            self.check_known(self.annotations, "category_id")

    def check_known(self, entries: Sequence[Entry], key: str) -> None:
        """Raise `ValueError` if the "image_id" or "category_id" of an entry does not exist in the file."""
        name, known = ("images", self.images) if key == "image_id" else ("categories", self.categories)
        if unknown := sorted({entry[key] for entry in entries} - {entry["id"] for entry in known}):
            raise ValueError(
                f"{self.path} has annotations of {name} that the file does not define: {joined(unknown)}. Define "
                "them, or remove their annotations."
            )

    def describe(self, place: int) -> str:
        """Return the name of an annotation, for error messages."""
        return f"annotation {self.annotations[place].get('id', f'at place {place}')} of {self.path}"

    def image_paths(self) -> list[str]:
        """Return the paths of images in `images/`, in the folder of the file, or in `../train2017/` as in COCO."""
        folder, word = self.path.parent, self.path.stem.split("_")[-1]
        above = folder.parent
        folders = [folder / "images", folder, above / word, above / "images", above / "images" / word, above]
        return self.paths_in(self.images, folders)

    def paths_in(self, entries: list[Entry], folders: list[Path]) -> list[str]:
        """Return the paths of the files named in entries, in the first folder that contains any of them."""
        names = [entry["file_name"] for entry in entries]
        folder = next((folder for folder in folders if any((folder / name).is_file() for name in names)), None)
        if folder is None:
            raise ValueError(
                f"{names[0]}, listed in {self.path}, is in none of the folders:{in_lines(folders)}\nMove the file to "
                "one of them."
            )
        # Absolute paths stay valid if the working directory changes.
        paths = [str(folder.absolute() / name) for name in names]
        check_exist(paths, f"of {self.path} do not exist")
        return paths

    def numbers(self, key: str, count: int) -> np.ndarray:
        """Return the value of `key` in all annotations, each a list of `count` numbers, as (N, count) float64."""
        faults = []
        for place, annotation in enumerate(self.annotations):
            found: Any = annotation.get(key)
            is_list = isinstance(found, list) and len(found) == count
            if not (is_list and all(isinstance(value, int | float) for value in found)):
                short = f"{len(found)} numbers" if isinstance(found, list) and len(found) > 8 else repr(found)
                faults.append(f"{self.describe(place)}: {short}")
        raise_faults(faults, f"of {len(self.annotations)} annotations have no {key} of {count} numbers")
        return np.array([annotation[key] for annotation in self.annotations], float).reshape(-1, count)


def _read_all(files: Mapping[str, Path]) -> list[CocoFile]:
    """Read the annotation file of each split; raise `ValueError` if their categories differ."""
    contents = [_read_coco(split, file) for split, file in files.items()]
    keys = ("id", "name", "isthing")
    _check_same(contents, lambda content: [[entry[key] for key in keys] for entry in content.categories], "categories")
    return contents


def _read_coco(split: str, file: Path) -> CocoFile:
    """Read the images, categories and annotations of a file and check the keys that every kind of file needs."""
    try:
        content = parse_json(read_text(file))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}. Correct the file.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} does not contain a JSON object, so it is not a COCO annotation file.")
    missing = [key for key in NEEDED if not isinstance(content.get(key), list)]
    missing += [key for key in ("images", "categories") if content.get(key) == []]
    if missing:
        raise ValueError(f"{file} has no {' and no '.join(missing)}, which COCO annotation files need. Add them.")
    for name, keys in NEEDED.items():
        _check_entries(content[name], keys, name, file)
    for key in NEEDED["images"]:
        _check_unique(content["images"], key, "images", file)
    found = CocoFile(split, file, content["images"], content["annotations"], _categories(content["categories"], file))
    found.check_known(found.annotations, "image_id")
    return found


def _check_entries(entries: Sequence[Any], keys: Iterable[str], what: str, file: Path) -> None:
    lacking = []
    for place, entry in enumerate(entries):
        if not isinstance(entry, dict):
            lacking.append(f"entry {place} is {entry!r} instead of an object")
        elif missing := [key for key in keys if key not in entry]:
            name = f"id {entry['id']}" if "id" in entry else f"entry {place}"
            lacking.append(f"{name} has no {', '.join(missing)}")
    raise_faults(lacking, f"of {len(entries)} {what} in {file} are incomplete")


def _check_unique(entries: Sequence[Entry], key: str, what: str, file: Path) -> None:
    counts = Counter(entry[key] for entry in entries if key in entry)
    raise_faults(
        [f"{key} {name}: {count} times" for name, count in counts.items() if count > 1],
        f"{key}s of {what} in {file} occur more than once",
        f"Give each entry a unique {key}, or merge duplicate entries.",
    )


def _check_same(contents: Sequence[CocoFile], value_of: Callable[[CocoFile], Any], what: str) -> None:
    first = contents[0]
    for other in contents:
        if value_of(other) != value_of(first):
            raise ValueError(
                f"{first.path} and {other.path} differ in {what}, which must be equal. Correct one of the files."
            )


def _categories(entries: Sequence[Entry], file: Path) -> list[Entry]:
    categories = sorted(entries, key=lambda category: int(category["id"]))
    names = [str(category["name"]) for category in categories]
    if len(set(names)) < len(names):
        raise ValueError(f"{file} has categories with the same name: {joined(sorted(names))}. Rename them.")
    is_thing = [parse_flag(entry.get("isthing", 1), f"isthing of {entry['name']!r} in {file}") for entry in categories]
    return [
        {**entry, "name": name, "isthing": thing}
        for entry, name, thing in zip(categories, names, is_thing, strict=True)
    ]


def load_coco_masks(files: Mapping[str, Path], orientation: AnnotationOrientation) -> TargetData:
    """Read annotations with masks, without decoding images.

    Panoptic masks are in a folder named like the annotation file, in `panoptic/`, or in `masks/`. Rows with panoptic
    annotations have the columns `panoptic` (undecoded `datasets.Image`) and `segments` (lists of `id`, `label`, and
    `iscrowd`). Rows with instance annotations have the columns `height`, `width`, and `objects` (lists of `id`,
    `label`, `iscrowd` and `segmentation`, as JSON).
    """
    contents = _read_all(files)
    _check_same(contents, _is_panoptic, "kind")
    is_panoptic, categories = _is_panoptic(contents[0]), contents[0].categories
    numbers = {category["id"]: number for number, category in enumerate(categories)}
    read = _panoptic_rows if is_panoptic else _instance_rows
    rows = DatasetDict({content.split: read(content, numbers) for content in contents})
    return TargetData(
        add_turn_column(add_file_column(rows), "panoptic" if is_panoptic else None, orientation),
        panoptic_target if is_panoptic else instances_target,
        tuple(category["name"] for category in categories),
        tuple(numbers[category["id"]] for category in categories if category["isthing"] or not is_panoptic),
    )


def _is_panoptic(content: CocoFile) -> bool:
    if not content.annotations:
        raise ValueError(f"{content.path} has no annotations. Add annotations.")
    return "segments_info" in content.annotations[0]


def _panoptic_rows(content: CocoFile, numbers: dict[int, int]) -> Dataset:
    file, annotations = content.path, content.annotations
    content.check_annotations("file_name", "segments_info")
    all_segments = [segment for annotation in annotations for segment in annotation["segments_info"]]
    _check_entries(all_segments, ("id", "category_id"), "segments_info", file)
    content.check_known(all_segments, "category_id")
    by_id = {image["id"]: path for image, path in zip(content.images, content.image_paths(), strict=True)}
    masks = content.paths_in(annotations, [file.with_suffix(""), file.parent / "panoptic", file.parent / "masks"])
    if bare := by_id.keys() - {annotation["image_id"] for annotation in annotations}:
        logger.warning("Ignored images in %s because they have no annotation, by id: %s.", file, joined(sorted(bare)))
    segments = [
        [_labeled(segment, numbers, file) for segment in annotation["segments_info"]] for annotation in annotations
    ]
    kind = List({"id": Value("int64"), "label": Value("int64"), "iscrowd": Value("bool")})
    paths = [by_id[annotation["image_id"]] for annotation in annotations]
    return images_at(paths, content.split, panoptic=(masks, Image(decode=False)), segments=(segments, kind))


def _instance_rows(content: CocoFile, numbers: dict[int, int]) -> Dataset:
    images, file = content.images, content.path
    _check_entries(images, ("height", "width"), "images", file)
    content.check_annotations("category_id")
    shapes = {image["id"]: (image["height"], image["width"]) for image in images}
    faults, by_image = [], defaultdict(list)
    for annotation in content.annotations:
        if fault := _mask_fault(annotation.get("segmentation"), *shapes[annotation["image_id"]]):
            faults.append(f"annotation {annotation.get('id', 'without id')} {fault}")
        found = {**_labeled(annotation, numbers, file), "segmentation": annotation.get("segmentation")}
        by_image[annotation["image_id"]].append(found)
    finding = f"of {len(content.annotations)} annotations in {file} have no valid mask"
    raise_faults(faults, finding, "Repair or remove them.")
    objects = [json.dumps(by_image[image["id"]]) for image in images]
    sizes = {side: ([image[side] for image in images], Value("int64")) for side in ("height", "width")}
    return images_at(content.image_paths(), content.split, objects=(objects, Value("string")), **sizes)


def _labeled(entry: Entry, numbers: Mapping[int, int], file: Path) -> Entry:
    number, label = entry.get("id"), numbers[entry["category_id"]]
    return {
        "id": number,
        "label": label,
        "iscrowd": parse_flag(entry.get("iscrowd"), f"iscrowd of {number} in {file}"),
    }


def _mask_fault(segmentation: Any, height: int, width: int) -> str | None:
    """Return a description of the error in an encoded mask, or `None` if none is found without decoding it."""
    if isinstance(segmentation, dict) and {"counts", "size"} <= segmentation.keys():
        return None
    if not isinstance(segmentation, list) or not segmentation:
        return "has no segmentation (polygons or run-length encoding), which masks require in addition to boxes"
    if not all(isinstance(points, list) and len(points) >= 6 and len(points) % 2 == 0 for points in segmentation):
        return "has no polygons of at least three points x, y"
    values = np.array([value for points in segmentation for value in points])
    if values.dtype.kind not in "iuf" or not np.isfinite(values).all():
        return "has a polygon with values that are not finite numbers"
    places = values.reshape(-1, 2)  # x and y of all polygon points
    # Points far outside the image are errors, and drawing them could exhaust the memory.
    if (abs(places) > 2 * max(height, width)).any():
        return f"has a polygon far outside the image of {height} x {width} pixels"
    polygons = np.split(places, np.cumsum([len(points) // 2 for points in segmentation])[:-1])
    size = (width, height)
    if not any((polygon.max(axis=0) > 0).all() and (polygon.min(axis=0) < size).all() for polygon in polygons):
        return f"lies completely outside the image of {height} x {width} pixels"
    return None


def load_coco_objects(
    files: Mapping[str, Path], class_names: Sequence[str] | None
) -> tuple[list[ObjectTable], tuple[str, ...]]:
    """Read boxes, and class names in the order of category ids. Open an image only if its size is not given."""
    check_no_class_names(class_names, next(iter(files.values())))
    # Roboflow adds a category that has no boxes and is only the supercategory of other categories. It is not a class.
    contents = _read_all(files)
    used = {annotation.get("category_id") for content in contents for annotation in content.annotations}
    all_categories = contents[0].categories
    headings = {entry.get("supercategory") for entry in all_categories if entry.get("supercategory") != entry["name"]}
    categories = [entry for entry in all_categories if entry["id"] in used or entry["name"] not in headings]
    numbers = {category["id"]: number for number, category in enumerate(categories)}
    tables = []
    for content in contents:
        content.check_annotations("category_id", "bbox")
        tables.append(_table(content, numbers))
    return tables, tuple(category["name"] for category in categories)


def load_coco_keypoints(files: Mapping[str, Path], _: SourceOptions) -> tuple[list[ObjectTable], KeypointNames]:
    """Read objects with keypoints, and the keypoint names. Open an image only if its size is not given."""
    contents = [_read_coco(split, file) for split, file in files.items()]
    _check_same(contents, lambda content: _names_of(_keypoint_category(content)), "keypoints")
    tables = []
    for content in contents:
        content.check_annotations("category_id")
        number = _keypoint_category(content)["id"]
        ours = [annotation for annotation in content.annotations if annotation["category_id"] == number]
        if others := len(content.annotations) - len(ours):
            logger.warning("Ignored in %s: %d annotations of categories without keypoints.", content.path, others)
        tables.append(
            _table(replace(content, annotations=ours), {number: 0}, _keypoint_category(content)["keypoints"])
        )
    return tables, _names_of(_keypoint_category(contents[0]))


def _table(content: CocoFile, numbers: dict[Any, int], keypoint_names: Sequence[str] = ()) -> ObjectTable:
    annotations, images = content.annotations, content.images
    _check_unique(annotations, "id", "annotations", content.path)
    places = {image["id"]: place for place, image in enumerate(images)}
    has_boxes = any("bbox" in annotation for annotation in annotations)
    keypoints = None
    if keypoint_names:  # objects without keypoints, such as crowds, get unlabeled keypoints
        none = {"keypoints": [0] * (3 * len(keypoint_names))}
        filled = [annotation if annotation.get("keypoints") else annotation | none for annotation in annotations]
        keypoints = replace(content, annotations=filled).numbers("keypoints", 3 * len(keypoint_names))
        keypoints = keypoints.reshape(-1, len(keypoint_names), 3)
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
        areas=np.array([annotation.get("area") or 0 for annotation in annotations], float),
        keypoints=keypoints,
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
