"""Columns of datasets that hold objects: a column of lists, or several of what is known of them.

Shapes: I images, N objects.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Image, LargeList, List

from .columns import USUAL_NAMES, can_hold_images, choose_column
from .image_headers import image_sizes
from .wording import MAX_NAMED, in_lines, listed


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
    """The objects of a split, one after the other.

    Args:
        image_numbers: (N,) int64, the image of each, ascending.
        places: (N,) int64, which of its image's objects each is, from 1.
        values: The Arrow array of those of the fields in `FIELDS` that there are, of length N.
        label_type: Type of the labels, of `datasets`.
        split: Name of the split.
    """

    image_numbers: np.ndarray
    places: np.ndarray
    values: dict[str, pa.Array]
    label_type: Any
    split: str

    def describe(self, place: int) -> str:
        """Says which object stands at a place from 0."""
        return f"object {self.places[place]} of image {self.image_numbers[place]} of {self.split}"


def images_of(dataset: Dataset, split: str, given: str | None) -> Dataset:
    """Returns the column of images alone, as `image`.

    Raises:
        ValueError: if there is none, or several could be it.
    """
    candidates = [name for name, feature in dataset.features.items() if can_hold_images(feature)]
    column = choose_column("image_column_name", given, dataset.column_names, f"The split {split!r}", candidates)
    images = dataset.select_columns([column]).rename_columns({column: "image"})
    return images if images.features["image"] == Image() else images.cast_column("image", Image())


def sizes_of(dataset: Dataset, images: Dataset) -> np.ndarray:
    """Returns (I, 2) int64, width and height, from columns of these names or else from the headers of images.

    Raises:
        OSError: if an image cannot be opened.
    """
    if {"width", "height"} <= set(dataset.column_names):
        sizes = np.array([dataset["width"][:], dataset["height"][:]], float).T
        if (sizes > 0).all():
            return sizes.astype(np.int64)
    return image_sizes(images)


def read_objects(dataset: Dataset, split: str, needed: tuple[str, ...], given: str | None) -> ObjectColumns:
    """Reads the objects of a split.

    Args:
        dataset: Has a column of objects, a list of structs or a struct of lists, or these lists as columns.
        split: Its name.
        needed: The fields that objects must have; the first one is what makes it an object.
        given: The column of objects, if it has no usual name.

    Raises:
        ValueError: if a column or field is missing, of another type, or not as long as the others.
    """
    usual = [name for name in dataset.column_names if name.lower() in USUAL_NAMES["objects_column_name"]]
    if given is None and not usual and any(name.lower() in FIELDS[needed[0]] for name in dataset.column_names):
        return _from_fields(_items(dataset.features), _arrow(dataset, dataset.column_names), split, needed)
    column = choose_column("objects_column_name", given, dataset.column_names, f"The split {split!r}")
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


def is_list(values: pa.Array) -> bool:
    """Returns whether an Arrow array holds lists."""
    types = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_type(values.type) for is_type in types)


def lengths_of(lists: pa.Array) -> np.ndarray:
    """Returns how long each list of an Arrow array is."""
    return pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)


def _offsets(lists: pa.Array) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(lengths_of(lists))]), pa.int32())


def _from_fields(
    features: dict[str, Any], columns: dict[str, pa.Array], split: str, needed: tuple[str, ...]
) -> ObjectColumns:
    """Returns the objects from a list of values for each image in each column, of items of the types `features`."""
    names = {
        field: next((name for name in columns if name.lower() in usual and is_list(columns[name])), None)
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
    """Returns the types of the items of columns that are lists."""
    return {name: feature.feature for name, feature in features.items() if isinstance(feature, List | LargeList)}


def boxes_of(objects: ObjectColumns) -> np.ndarray:
    """Returns boxes (N, 4) float64 as they are written.

    Raises:
        ValueError: if they are not 4 numbers each.
    """
    boxes = objects.values["box"]
    if not is_list(boxes):
        raise ValueError(f"The boxes of {objects.split!r} are of type {boxes.type}, but each is a list of 4 numbers.")
    if wrong := np.flatnonzero(lengths_of(boxes) != 4).tolist():
        faults = [f"{objects.describe(place)}: {boxes[place].as_py()}" for place in wrong]
        raise ValueError(f"{len(faults)} boxes are not 4 numbers:{in_lines(faults, MAX_NAMED)}")
    return boxes.flatten().cast(pa.float64()).to_numpy(zero_copy_only=False).reshape(-1, 4)


def numbers_of(objects: ObjectColumns, field: str) -> np.ndarray | None:
    """Returns the numbers (N,) of a field, 0 where there is none; `None` if objects do not have it."""
    values = objects.values.get(field)
    return None if values is None else pc.fill_null(values.cast(pa.float64()), 0).to_numpy(zero_copy_only=False)
