"""Boxes and keypoints in the columns of datasets.

Shapes: I images, N objects, K keypoints.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import ClassLabel, Dataset, DatasetDict, LargeList, List, Value

from .columns import LABEL_NAMES, USUAL_NAMES, SourceOptions, can_hold_images, take_columns
from .files import image_headers, listed, raise_faults
from .keypoints import KeypointNames
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
from .stored import class_folder


# Usual names of the fields of an object
FIELDS = {
    "box": ("bbox", "bboxes", "box", "boxes"),
    "label": ("category", "categories", "category_id", "category_ids", *LABEL_NAMES, "class", "classes", "class_id"),
    "keypoints": ("keypoints", "keypoint", "landmarks"),
    "area": ("area", "areas"),
    "crowd": ("iscrowd", "is_crowd"),
}


@dataclass(frozen=True)
class ObjectColumns:
    """The images of a split, and its objects one after the other."""

    split: str
    images: Dataset  # the column `image`, I rows
    sizes: np.ndarray  # (I, 2) int64, width and height from columns of these names; 0 without them
    image_numbers: np.ndarray  # (N,) int64, the image of each object, ascending
    values: dict[str, pa.Array]  # by field of `FIELDS`, if present: the Arrow array of length N
    label_type: Any  # type of the labels, of `datasets`

    def describe(self, place: int) -> str:
        """Return the name of the object at a place from 0, for error messages."""
        image = self.image_numbers[place]
        first = int(np.searchsorted(self.image_numbers, image))
        return f"object {place - first + 1} of image {image} of {self.split}"

    def numbers(self, field: str) -> np.ndarray | None:
        """Return the numbers (N,) of a field, 0 for missing ones; `None` if objects do not have it."""
        values = self.values.get(field)
        return None if values is None else pc.fill_null(values.cast(pa.float64()), 0).to_numpy(zero_copy_only=False)

    def boxes(self) -> np.ndarray:
        """Return boxes (N, 4) float64 as they are written."""
        boxes = self.values["box"]
        if not _is_list(boxes):
            raise ValueError(f"The boxes of {self.split!r} are of type {boxes.type}, but each is a list of 4 numbers.")
        wrong = np.flatnonzero(_lengths(boxes) != 4).tolist()
        raise_faults([f"{self.describe(place)}: {boxes[place].as_py()}" for place in wrong], "boxes are not 4 numbers")
        return boxes.flatten().cast(pa.float64()).to_numpy(zero_copy_only=False).reshape(-1, 4)

    def keypoints(self) -> np.ndarray:
        """Return (N, K, 3) x, y and visibility, which is 2 if only x and y are given."""
        lists = self.values["keypoints"]
        values, widths, counts = lists.flatten(), {3}, _lengths(lists) / 3
        if _is_list(values):
            widths, counts, values = set(_lengths(values).tolist()), _lengths(lists), values.flatten()
        numbers = set(counts.tolist())
        if len(numbers) != 1 or not all(float(number).is_integer() for number in numbers) or widths not in ({2}, {3}):
            raise ValueError(
                f"The objects of {self.split!r} have {listed(sorted(numbers))} keypoints of {listed(sorted(widths))} "
                "numbers. All need as many, of x, y and maybe visibility."
            )
        keypoints = values.cast(pa.float64()).to_numpy(zero_copy_only=False).reshape(len(lists), -1, widths.pop())
        if keypoints.shape[2] == 3:
            return keypoints
        return np.concatenate([keypoints, 2.0 * np.isfinite(keypoints).all(axis=2, keepdims=True)], axis=2)

    def table(self, boxes: np.ndarray, **columns: Any) -> ObjectTable:
        """Return the table of these objects with boxes (N, 4) and other columns."""
        areas = self.numbers("area")
        return table_of(
            self.split, self.images, self.sizes, self.image_numbers, boxes, self.describe, areas=areas, **columns
        )


def read_objects(dataset: Dataset, split: str, needed: tuple[str, ...], options: SourceOptions) -> ObjectColumns:
    """Read the objects of a split: a list of structs, a struct of lists, or these lists as columns."""
    # Objects must have the fields that are needed; the first one is what makes it an object.
    lower = {name.lower() for name in dataset.column_names}
    if options.target_column is None and not lower & {*USUAL_NAMES["objects"]} and lower & {*FIELDS[needed[0]]}:
        types, lists = {**dataset.features}, _arrow(dataset, dataset.column_names)
    else:
        column = options.choose("objects", dataset.column_names, f"The split {split!r}")
        types, lists = _lists_in(
            dataset.features[column], _arrow(dataset, [column])[column], f"{column!r} of {split!r}"
        )
    names = {
        field: next((name for name in lists if name.lower() in usual and _is_list(lists[name])), None)
        for field, usual in FIELDS.items()
    }
    for field in needed:
        if names[field] is None:
            raise ValueError(
                f"The objects of {split!r} have no {field}: of {listed(list(lists))} none is a list of a usual name "
                f"({', '.join(FIELDS[field])}). Rename it."
            )
    found = {field: lists[name] for field, name in names.items() if name is not None}
    lengths = _lengths(found[needed[0]])
    for field, values in found.items():
        others = _lengths(values)
        raise_faults(
            [
                f"image {i} of {split}: {lengths[i]} and {others[i]}"
                for i in np.flatnonzero(others != lengths).tolist()
            ],
            f"images have not as many values of {needed[0]} as of {field}",
        )
    candidates = [name for name, feature in dataset.features.items() if can_hold_images(feature)]
    image = options.choose("image", dataset.column_names, f"The split {split!r}", candidates)
    label_type = types.get(names["label"] or "")
    return ObjectColumns(
        split,
        take_columns(dataset, {image: "image"}),
        _given_sizes(dataset),
        np.repeat(np.arange(len(lengths)), lengths),
        {field: values.flatten() for field, values in found.items()},
        label_type.feature if isinstance(label_type, List | LargeList) else label_type,
    )


def _lists_in(feature: Any, values: pa.Array, where: str) -> tuple[dict[str, Any], dict[str, pa.Array]]:
    """Return the types and the lists of values of the fields of objects, one list per image."""
    if isinstance(feature, dict):  # a struct of lists
        return feature, dict(zip((field.name for field in values.type), values.flatten(), strict=True))
    inner = feature.feature if isinstance(feature, List | LargeList) else None
    if not isinstance(inner, dict):
        raise ValueError(
            f"The column {where} is of type {feature}, but objects are a list of structs, or a struct of lists. Name "
            "the right one with objects_column_name."
        )
    structs, offsets = values.flatten(), pa.array(np.cumsum([0, *_lengths(values)]), pa.int32())
    fields = zip((field.name for field in structs.type), structs.flatten(), strict=True)
    return inner, {name: pa.ListArray.from_arrays(offsets, part) for name, part in fields}


def _arrow(dataset: Dataset, columns: list[str]) -> dict[str, pa.Array]:
    kept = [name for name in columns if not can_hold_images(dataset.features[name])]
    table = dataset.select_columns(kept).with_format("arrow")[:]
    return {name: table.column(name).combine_chunks() for name in kept}


def _is_list(values: pa.Array) -> bool:
    types = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_type(values.type) for is_type in types)


def _lengths(lists: pa.Array) -> np.ndarray:
    return pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)


def _given_sizes(dataset: Dataset) -> np.ndarray:
    if {"width", "height"} <= set(dataset.column_names):
        sizes = np.array([dataset["width"][:], dataset["height"][:]], float).T
        if (sizes > 0).all():
            return sizes.astype(np.int64)
    return np.zeros((len(dataset), 2), np.int64)


def load_detection_columns(
    splits: DatasetDict,
    options: SourceOptions,
    bbox_format: BoxFormat | None = None,
    class_names: Sequence[str] | None = None,
) -> tuple[list[ObjectTable], tuple[str, ...]]:
    """Read the boxes of datasets."""
    # Objects are a list of structs or a struct of lists with a box, a class and maybe `area` and `iscrowd`, by any of
    # their usual names, or these are columns. Boxes are written in `bbox_format`, see `corners`, or else "coco" if
    # only this makes sense of them. Classes that are numbers are named in `class_names`, or in a file of the source.
    objects = [read_objects(dataset, split, ("box", "label"), options) for split, dataset in splits.items()]
    boxes = [found.boxes() for found in objects]
    if bbox_format not in (None, *get_args(BoxFormat)):
        raise ValueError(
            f"bbox_format={bbox_format!r} is unknown. Choose {', '.join(map(repr, get_args(BoxFormat)))}."
        )
    written = bbox_format or _choose_format(np.concatenate(boxes), np.concatenate(list(map(_sizes_of, objects))))
    labels, names = _labels(objects, options, class_names)
    tables = [
        found.table(
            corners(own, written),
            is_share=written == "yolo",
            labels=labels[found.split],
            is_crowd=found.values["crowd"].to_pylist() if "crowd" in found.values else None,
        )
        for found, own in zip(objects, boxes, strict=True)
    ]
    return tables, names


def _labels(
    objects: Sequence[ObjectColumns], options: SourceOptions, class_names: Sequence[str] | None
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    kind, values = objects[0].label_type, {found.split: found.values["label"] for found in objects}
    if any(other.label_type != kind for other in objects):
        raise ValueError(f"The splits {listed(list(values))} differ in their classes. Make them the same.")
    if missing := [split for split, found in values.items() if found.null_count]:
        raise ValueError(f"Objects of {listed(missing)} have no class. Label them, or leave them out.")
    if kind in (Value("string"), Value("large_string")):
        return numbered_words({split: found.to_pylist() for split, found in values.items()}, class_names)
    if isinstance(kind, ClassLabel):
        without_class_names(class_names, f"The column of classes ({listed(kind.names)})")
        names = tuple(kind.names)
    else:
        names = class_names_beside([class_folder(options, class_names)], class_names)
    numbers = {split: found.cast(pa.int64()).to_numpy(zero_copy_only=False) for split, found in values.items()}
    for found in objects:
        check_numbers(numbers[found.split], len(names), found.describe, found.split)
    return numbers, names


def _sizes_of(objects: ObjectColumns) -> np.ndarray:
    """Return (N, 2) width and height of the upright image of each object, from image headers if not given."""
    sizes = objects.sizes
    if not sizes.all():
        headers = image_headers(objects.images, is_needed=True)
        sizes = upright_sizes(headers[:, :2], headers[:, 2])
    return sizes[objects.image_numbers]


def _choose_format(boxes: np.ndarray, sizes: np.ndarray) -> BoxFormat:
    """Return "coco" if boxes (N, 4) make most sense so, in images of sizes (N, 2)."""
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


def load_keypoint_columns(splits: DatasetDict, options: SourceOptions) -> tuple[list[ObjectTable], KeypointNames]:
    """Read the keypoints of datasets."""
    # Objects have `keypoints`: x, y and visibility one after the other, or a list of x and y, or of all three, for
    # each. Boxes, if any, are written as COCO does. The names of the keypoints are their numbers from 0.
    tables = []
    for split, dataset in splits.items():
        found = read_objects(dataset, split, ("keypoints",), options)
        has_boxes = "box" in found.values
        boxes = found.boxes() if has_boxes else np.tile(WHOLE_IMAGE, (len(found.image_numbers), 1))
        tables.append(found.table(corners(boxes, "coco"), is_share=not has_boxes, keypoints=found.keypoints()))
    counts = {table.keypoints.shape[1] for table in tables}
    if len(counts) > 1:
        raise ValueError(f"The splits have objects of {listed(sorted(counts))} keypoints. Make them the same.")
    return tables, KeypointNames(tuple(str(number) for number in range(counts.pop())))
