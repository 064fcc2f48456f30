"""Boxes and keypoints in the columns of datasets.

Shapes: I images, N objects, K keypoints.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import ClassLabel, Dataset, DatasetDict, LargeList, List, Value

from .columns import USUAL_NAMES, SourceOptions, can_hold_images, take_columns
from .files import MAX_NAMED, image_headers, in_lines, listed
from .keypoints import KeypointNames, KeypointTable
from .objects import (
    WHOLE_IMAGE,
    BoxFormat,
    ObjectTable,
    check_numbers,
    class_names_beside,
    corners,
    numbered_words,
    table_of,
    without_class_names,
    wrong_boxes,
)
from .orientation import upright_sizes


# How the fields of an object are called.
FIELDS = {
    "box": ("bbox", "bboxes", "box", "boxes"),
    "label": (
        "category",
        "categories",
        "category_id",
        "category_ids",
        "label",
        "labels",
        "class",
        "classes",
        "class_id",
    ),
    "keypoints": ("keypoints", "keypoint", "landmarks"),
    "area": ("area", "areas"),
    "crowd": ("iscrowd", "is_crowd"),
}


@dataclass(frozen=True)
class ObjectColumns:
    """The objects of a split, one after the other."""

    image_numbers: np.ndarray  # (N,) int64, the image of each, ascending
    places: np.ndarray  # (N,) int64, which of its image's objects each is, from 1
    values: dict[str, pa.Array]  # the Arrow array of those of the fields in `FIELDS` that there are, of length N
    label_type: Any  # type of the labels, of `datasets`
    split: str  # name of the split

    def describe(self, place: int) -> str:
        """Returns which object stands at a place from 0, for errors."""
        return f"object {self.places[place]} of image {self.image_numbers[place]} of {self.split}"


def images_of(dataset: Dataset, split: str, options: SourceOptions) -> Dataset:
    """Returns the column of images alone, as `image`."""
    candidates = [name for name, feature in dataset.features.items() if can_hold_images(feature)]
    column = options.choose("image", dataset.column_names, f"The split {split!r}", candidates)
    return take_columns(dataset, {column: "image"})


def given_sizes(dataset: Dataset) -> np.ndarray:
    """Returns (I, 2) int64, width and height, from columns of these names; 0 without them."""
    if {"width", "height"} <= set(dataset.column_names):
        sizes = np.array([dataset["width"][:], dataset["height"][:]], float).T
        if (sizes > 0).all():
            return sizes.astype(np.int64)
    return np.zeros((len(dataset), 2), np.int64)


def sizes_of(sizes: np.ndarray, images: Dataset) -> np.ndarray:
    """Returns (I, 2) sizes that are given, or else those of upright images from their headers."""
    if sizes.all():
        return sizes
    headers = image_headers(images, is_needed=True)
    return upright_sizes(headers[:, :2], headers[:, 2])


def read_objects(dataset: Dataset, split: str, needed: tuple[str, ...], options: SourceOptions) -> ObjectColumns:
    """Reads the objects of a split: a list of structs, a struct of lists, or these lists as columns."""
    # Objects must have the fields that are needed; the first one is what makes it an object.
    lower = {name.lower() for name in dataset.column_names}
    if options.target_column is None and not lower & {*USUAL_NAMES["objects"]} and lower & {*FIELDS[needed[0]]}:
        return _from_fields(_items(dataset.features), _arrow(dataset, dataset.column_names), split, needed)
    column = options.choose("objects", dataset.column_names, f"The split {split!r}")
    feature, values = dataset.features[column], _arrow(dataset, [column])[column]
    if isinstance(feature, dict):  # a struct of lists
        names = [field.name for field in values.type]
        return _from_fields(_items(feature), dict(zip(names, values.flatten(), strict=True)), split, needed)
    inner = feature.feature if isinstance(feature, List | LargeList) else None
    if not isinstance(inner, dict):
        raise ValueError(
            f"The column {column!r} of {split!r} is of type {feature}, but objects are a list of structs, or a struct "
            "of lists. Name the right one with objects_column_name."
        )
    structs, offsets = values.flatten(), _offsets(values)
    lists = {
        field.name: pa.ListArray.from_arrays(offsets, part)
        for field, part in zip(structs.type, structs.flatten(), strict=True)
    }
    return _from_fields(inner, lists, split, needed)


def _arrow(dataset: Dataset, columns: list[str]) -> dict[str, pa.Array]:
    kept = [name for name in columns if not can_hold_images(dataset.features[name])]
    table = dataset.select_columns(kept).with_format("arrow")[:]
    return {name: table.column(name).combine_chunks() for name in kept}


def _is_list(values: pa.Array) -> bool:
    types = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_type(values.type) for is_type in types)


def _lengths(lists: pa.Array) -> np.ndarray:
    return pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)


def _offsets(lists: pa.Array) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(_lengths(lists))]), pa.int32())


def _from_fields(
    features: dict[str, Any], columns: dict[str, pa.Array], split: str, needed: tuple[str, ...]
) -> ObjectColumns:
    """Returns the objects from a list of values for each image in each column, of items of the types `features`."""
    names = {
        field: next((name for name in columns if name.lower() in usual and _is_list(columns[name])), None)
        for field, usual in FIELDS.items()
    }
    for field in needed:
        if names[field] is None:
            raise ValueError(
                f"The objects of {split!r} have no {field}: of {listed(list(columns))} none is a list of a usual name "
                f"({', '.join(FIELDS[field])}). Rename it."
            )
    found = {field: columns[name] for field, name in names.items() if name is not None}
    offsets = {field: _offsets(lists).to_numpy() for field, lists in found.items()}
    lengths = np.diff(offsets[needed[0]])
    for field, other in offsets.items():
        if differs := np.flatnonzero(np.diff(other) != lengths).tolist():
            faults = [f"image {i} of {split}: {lengths[i]} and {np.diff(other)[i]}" for i in differs]
            raise ValueError(
                f"{len(faults)} images have not as many values of {needed[0]} as of {field}:"
                f"{in_lines(faults, MAX_NAMED)}"
            )
    return ObjectColumns(
        np.repeat(np.arange(len(lengths)), lengths),
        np.arange(lengths.sum()) - np.repeat(offsets[needed[0]][:-1], lengths) + 1,
        {field: lists.flatten() for field, lists in found.items()},
        features.get(names["label"] or ""),
        split,
    )


def _items(features: dict[str, Any]) -> dict[str, Any]:
    return {name: feature.feature for name, feature in features.items() if isinstance(feature, List | LargeList)}


def boxes_of(objects: ObjectColumns) -> np.ndarray:
    """Returns boxes (N, 4) float64 as they are written."""
    boxes = objects.values["box"]
    if not _is_list(boxes):
        raise ValueError(f"The boxes of {objects.split!r} are of type {boxes.type}, but each is a list of 4 numbers.")
    if wrong := np.flatnonzero(_lengths(boxes) != 4).tolist():
        faults = [f"{objects.describe(place)}: {boxes[place].as_py()}" for place in wrong]
        raise ValueError(f"{len(faults)} boxes are not 4 numbers:{in_lines(faults, MAX_NAMED)}")
    return boxes.flatten().cast(pa.float64()).to_numpy(zero_copy_only=False).reshape(-1, 4)


def numbers_of(objects: ObjectColumns, field: str) -> np.ndarray | None:
    """Returns the numbers (N,) of a field, 0 where there is none; `None` if objects do not have it."""
    values = objects.values.get(field)
    return None if values is None else pc.fill_null(values.cast(pa.float64()), 0).to_numpy(zero_copy_only=False)


def load_detection_columns(
    splits: DatasetDict,
    options: SourceOptions,
    folder: Path,
    bbox_format: BoxFormat | None = None,
    class_names: Sequence[str] | None = None,
) -> tuple[dict[str, ObjectTable], tuple[str, ...]]:
    """Reads the boxes of datasets."""
    # Objects are a list of structs or a struct of lists with a box, a class and maybe `area` and `iscrowd`, by any of
    # their usual names, or these are columns. Boxes are written in `bbox_format`, see `corners`, or else "coco" if
    # only this makes sense of them. Classes that are numbers are named in `class_names`, or in a file in `folder`.
    needed = ("box", "label")
    objects = {split: read_objects(dataset, split, needed, options) for split, dataset in splits.items()}
    images = {split: images_of(dataset, split, options) for split, dataset in splits.items()}
    sizes = {split: given_sizes(dataset) for split, dataset in splits.items()}
    raw = {split: boxes_of(found) for split, found in objects.items()}
    if bbox_format not in (None, *get_args(BoxFormat)):
        raise ValueError(
            f"bbox_format={bbox_format!r} is unknown. Choose {', '.join(map(repr, get_args(BoxFormat)))}."
        )
    if bbox_format is None:
        of_objects = [sizes_of(sizes[split], images[split])[found.image_numbers] for split, found in objects.items()]
        bbox_format = _choose_format(np.concatenate(list(raw.values())), np.concatenate(of_objects))
    labels, names = _labels(objects, folder, class_names)
    tables = {
        split: table_of(
            images[split],
            sizes[split],
            found.image_numbers,
            corners(raw[split], bbox_format, np.ones((1, 2))),
            found.describe,
            is_share=bbox_format == "yolo",
            labels=labels[split],
            is_crowd=found.values["crowd"].to_pylist() if "crowd" in found.values else None,
            areas=numbers_of(found, "area"),
        )
        for split, found in objects.items()
    }
    return tables, names


def _labels(
    objects: dict[str, ObjectColumns], folder: Path, class_names: Sequence[str] | None
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    types = [found.label_type for found in objects.values()]
    if any(other != types[0] for other in types):
        raise ValueError(f"The splits {listed(list(objects))} differ in their classes. Make them the same.")
    values = {split: found.values["label"] for split, found in objects.items()}
    if missing := [split for split, found in values.items() if found.null_count]:
        raise ValueError(f"Objects of {listed(missing)} have no class. Label them, or leave them out.")
    if types[0] in (Value("string"), Value("large_string")):
        return numbered_words({split: found.to_pylist() for split, found in values.items()}, class_names)
    if isinstance(types[0], ClassLabel):
        without_class_names(class_names, f"The column of classes ({listed(types[0].names)})")
        names = tuple(types[0].names)
    else:
        names = class_names_beside([folder], class_names)
    numbers = {split: found.cast(pa.int64()).to_numpy(zero_copy_only=False) for split, found in values.items()}
    for split, found in numbers.items():
        check_numbers(found, len(names), objects[split].describe, split)
    return numbers, names


def _choose_format(boxes: np.ndarray, sizes: np.ndarray) -> BoxFormat:
    """Returns "coco" if boxes (N, 4) make most sense so, in images of sizes (N, 2)."""
    is_share = bool(len(boxes)) and np.nanmedian(boxes) <= 1  # which would be a small box in pixels too
    num_right = {
        name: int((~wrong_boxes(corners(boxes, name, sizes), sizes)).sum()) if (name == "yolo") == is_share else 0
        for name in get_args(BoxFormat)
    }
    if not len(boxes) or [name for name, count in num_right.items() if count == max(num_right.values())] == ["coco"]:
        return "coco"
    counts = "; ".join(f"{count} of {len(boxes)} as {name!r}" for name, count in num_right.items())
    raise ValueError(
        f"It is not clear how boxes are written. With an area and inside of their images lie {counts}. Set "
        "bbox_format: 'coco' (x, y, width, height in pixels), 'voc' (x1, y1, x2, y2) or 'yolo' (center x, y, width, "
        "height as shares of the image)."
    )


def load_keypoint_columns(
    splits: DatasetDict, options: SourceOptions
) -> tuple[dict[str, KeypointTable], KeypointNames]:
    """Reads the keypoints of datasets."""
    # Objects have `keypoints`: x, y and visibility one after the other, or a list of x and y, or of all three, for
    # each. Boxes, if any, are written as COCO does. The names of the keypoints are their numbers from 0.
    tables = {}
    for split, dataset in splits.items():
        found = read_objects(dataset, split, ("keypoints",), options)
        images = images_of(dataset, split, options)
        sizes, has_boxes, numbers = given_sizes(dataset), "box" in found.values, found.image_numbers
        boxes = boxes_of(found) if has_boxes else np.tile(WHOLE_IMAGE, (len(numbers), 1))
        boxes, areas = corners(boxes, "coco", np.ones((1, 2))), numbers_of(found, "area")
        objects = table_of(images, sizes, numbers, boxes, found.describe, is_share=not has_boxes, areas=areas)
        tables[split] = KeypointTable.of(objects, _keypoints(found))
    counts = {table.keypoints.shape[1] for table in tables.values()}
    if len(counts) > 1:
        raise ValueError(f"The splits have objects of {listed(sorted(counts))} keypoints. Make them the same.")
    return tables, KeypointNames(tuple(str(number) for number in range(counts.pop())))


def _keypoints(objects: ObjectColumns) -> np.ndarray:
    """Returns (N, K, 3) x, y and visibility, which is 2 where only x and y are given."""
    lists = objects.values["keypoints"]
    values, widths = lists.flatten(), {3}
    if _is_list(values):
        widths, values = set(_lengths(values).tolist()), values.flatten()
    counts = {count if _is_list(lists.flatten()) else count / 3 for count in _lengths(lists).tolist()}
    if len(counts) != 1 or not all(float(count).is_integer() for count in counts) or widths not in ({2}, {3}):
        raise ValueError(
            f"The objects of {objects.split!r} have {listed(sorted(counts))} keypoints of {listed(sorted(widths))} "
            "numbers. All need as many, of x, y and maybe visibility."
        )
    keypoints = values.cast(pa.float64()).to_numpy(zero_copy_only=False).reshape(len(lists), -1, widths.pop())
    if keypoints.shape[2] == 3:
        return keypoints
    return np.concatenate([keypoints, 2.0 * np.isfinite(keypoints).all(axis=2, keepdims=True)], axis=2)
