"""Reader of boxes and keypoints in dataset columns.

Shapes: I images, N objects, K keypoints.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, LargeList, List, Value

from .columns import LABEL_NAMES, USUAL_NAMES, SourceOptions, can_hold_images, take_columns
from .files import image_headers, joined, raise_faults
from .hub import class_folder
from .keypoints import KeypointNames
from .objects import WHOLE_IMAGE, BoxFormat, ObjectData, ObjectTable, corners, table_of, wrong_boxes
from .orientation import upright_sizes


TEXT_TYPES = (Value("string"), Value("large_string"))
# Common field names of an object, by standard name
FIELDS = {
    "box": ("bbox", "bboxes", "box", "boxes"),
    "label": ("category", "categories", "category_id", "category_ids", *LABEL_NAMES, "class", "classes", "class_id"),
    "keypoints": ("keypoints", "keypoint", "landmarks"),
    "area": ("area", "areas"),
    "crowd": ("iscrowd", "is_crowd"),
}


@dataclass(frozen=True)
class ObjectColumns:
    """The images and objects of a split, with the objects of all images in one list.

    Args:
        split: Name of the split.
        images: I rows with the column `image`.
        sizes: (I, 2) int64, values of the columns `width` and `height`; 0 if there are no such columns.
        image_numbers: (N,) int64, index of the image of each object, ascending.
        names: Names of the N objects in error messages.
        values: N values for each available field of `FIELDS`.
        label_type: Feature type of the labels.
    """

    split: str
    images: Dataset
    sizes: np.ndarray
    image_numbers: np.ndarray
    names: list[str]
    values: dict[str, list[Any]]
    label_type: Any

    def boxes(self) -> np.ndarray:
        """Return the boxes (N, 4) float64 in their original format."""
        boxes = self.values["box"]
        is_wrong = [not isinstance(box, list) or len(box) != 4 for box in boxes]
        faults = [f"{self.names[place]}: {boxes[place]}" for place in np.flatnonzero(is_wrong)]
        raise_faults(faults, "boxes are not 4 numbers")
        return np.array(boxes, float).reshape(-1, 4)

    def keypoints(self) -> np.ndarray:
        """Return x, y and visibility of keypoints (N, K, 3); the visibility is 2 if only x and y are given."""
        try:
            keypoints = np.array(self.values["keypoints"], float)
            if keypoints.ndim != 3:
                keypoints = keypoints.reshape(len(keypoints), -1, 3)
            elif keypoints.shape[2] not in (2, 3):
                raise ValueError(f"a keypoint has {keypoints.shape[2]} numbers instead of 2 or 3")
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"All objects of {self.split!r} must have the same number of keypoints, each with x, y and optionally "
                f"visibility: {error}."
            ) from error
        if keypoints.shape[2] == 2:
            is_known = np.isfinite(keypoints).all(axis=2, keepdims=True)
            keypoints = np.concatenate([keypoints, 2.0 * is_known], axis=2)
        return keypoints

    def table(self, boxes: np.ndarray, **columns: Any) -> ObjectTable:
        """Return the objects as a table with the given boxes (N, 4) and other columns."""
        areas = np.array([area or 0 for area in self.values["area"]], float) if "area" in self.values else None
        return table_of(
            self.split, self.images, self.sizes, self.image_numbers, boxes, self.names, areas=areas, **columns
        )


def read_objects(dataset: Dataset, split: str, needed: tuple[str, ...], options: SourceOptions) -> ObjectColumns:
    """Read the objects of a split from a list of structs, a struct of lists, or separate columns of lists.

    Args:
        dataset: Rows of the split.
        split: Name of the split.
        needed: Required fields of an object, keys of `FIELDS`. The first one determines the number of objects.
        options: Names of the columns.
    """
    types = dict(dataset.features)
    lower = {name.lower() for name in types}
    if options.target_column is None and not lower & {*USUAL_NAMES["objects"]} and lower & {*FIELDS[needed[0]]}:
        lists = dataset.select_columns([name for name, feature in types.items() if _is_list(feature)])[:]
    else:
        column = options.choose("objects", list(types), f"The split {split!r}")
        types, lists = _fields_in(types[column], dataset[column][:], f"{column!r} of {split!r}")
    names = {field: next((name for name in lists if name.lower() in usual), None) for field, usual in FIELDS.items()}
    for field in needed:
        if names[field] is None:
            raise ValueError(
                f"The objects of {split!r} have no {field}. Their fields are {joined(list(lists))}. Rename the field "
                f"to one of {', '.join(FIELDS[field])}."
            )
    found = {field: lists[name] for field, name in names.items() if name is not None}
    lengths = np.array([len(own or ()) for own in found[needed[0]]], np.int64)
    for field, values in found.items():
        raise_faults(
            [
                f"image {number} of {split}: {length} and {len(own or ())}"
                for number, (length, own) in enumerate(zip(lengths, values, strict=True))
                if len(own or ()) != length
            ],
            f"images do not have the same number of values of {needed[0]} and of {field}",
        )
    candidates = [name for name, feature in dataset.features.items() if can_hold_images(feature)]
    image = options.choose("image", dataset.column_names, f"The split {split!r}", candidates)
    label_type: Any = types.get(names["label"] or "")
    return ObjectColumns(
        split,
        take_columns(dataset, {image: "image"}),
        _given_sizes(dataset),
        np.repeat(np.arange(len(lengths)), lengths),
        [
            f"object {place} of image {image} of {split}"
            for image, length in enumerate(lengths)
            for place in range(1, length + 1)
        ],
        {field: [value for own in values for value in own or ()] for field, values in found.items()},
        label_type.feature if _is_list(label_type) else label_type,
    )


def _fields_in(feature: Any, rows: list[Any], where: str) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Return the types and values of the fields of objects, with one list of values per image."""
    if isinstance(feature, dict):  # the objects of an image are stored as a struct of lists
        fields = {name: own for name, own in feature.items() if _is_list(own)}
        return fields, {name: [row and row[name] for row in rows] for name in fields}
    inner = feature.feature if _is_list(feature) else None
    if not isinstance(inner, dict):
        raise ValueError(
            f"The column {where} has the type {feature}, but objects must be a list of structs or a struct of lists. "
            "Set objects_column_name to the right column."
        )
    return inner, {name: [[entry[name] for entry in row or ()] for row in rows] for name in inner}


def _is_list(feature: object) -> bool:
    return isinstance(feature, List | LargeList)


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
) -> ObjectData:
    """Read boxes and class names from dataset columns.

    An object has a box, a class and optionally `area` and `iscrowd`, see `read_objects` and `FIELDS`. Boxes have the
    format `bbox_format`, see `corners`. The default is "coco", which raises an error if other formats fit equally well
    or better. If classes are numbers, their names come from `class_names` or from a file of class names in the data
    source.
    """
    objects = [read_objects(dataset, split, ("box", "label"), options) for split, dataset in splits.items()]
    boxes = [found.boxes() for found in objects]
    if bbox_format not in (None, *get_args(BoxFormat)):
        raise ValueError(
            f"bbox_format={bbox_format!r} is unknown. Use one of {', '.join(map(repr, get_args(BoxFormat)))}."
        )
    written = bbox_format or _choose_format(objects, np.concatenate(boxes))
    tables = [
        found.table(
            corners(own, written),
            is_share=written == "yolo",
            labels=_labels(found, objects[0].label_type),
            is_crowd=found.values.get("crowd"),
        )
        for found, own in zip(objects, boxes, strict=True)
    ]
    kind = objects[0].label_type
    names = tuple(kind.names) if isinstance(kind, ClassLabel) else ()
    is_named = names or kind in TEXT_TYPES
    folders = () if is_named else (class_folder(options, class_names),)
    return ObjectData(tables, options.path, names, folders)


def _labels(objects: ObjectColumns, kind: Any) -> np.ndarray:
    """Return class names (N,) object, or class numbers (N,) int64; `kind` is the feature type in the first split."""
    if objects.label_type != kind:
        raise ValueError(
            f"The classes of the split {objects.split!r} differ from those of other splits in type or name. Use equal "
            "classes in all splits."
        )
    values = objects.values["label"]
    if None in values:
        raise ValueError(f"Some objects in {objects.split!r} have no class. Add their classes, or remove the objects.")
    return np.array(values, object if kind in TEXT_TYPES else np.int64)


def _upright_sizes(objects: ObjectColumns) -> np.ndarray:
    """Return the given image sizes (I, 2). If any is missing, read the sizes of the upright images instead."""
    if objects.sizes.all():
        return objects.sizes
    headers = image_headers(objects.images, is_needed=True)
    return upright_sizes(headers[:, :2], headers[:, 2])


def _choose_format(objects: Sequence[ObjectColumns], boxes: np.ndarray) -> BoxFormat:
    """Return "coco" if more boxes (N, 4) are valid in this format than in any other; raise `ValueError` otherwise."""
    sizes = np.concatenate([_upright_sizes(found)[found.image_numbers] for found in objects])
    # If most values are at most 1, boxes are fractions of the image size: in pixels, they would be implausibly small.
    is_share = bool(len(boxes)) and np.nanmedian(boxes) <= 1
    num_right = {
        name: int((~wrong_boxes(corners(boxes, name, sizes), sizes)).sum()) if (name == "yolo") == is_share else 0
        for name in get_args(BoxFormat)
    }
    if not len(boxes) or [name for name, count in num_right.items() if count == max(num_right.values())] == ["coco"]:
        return "coco"
    counts = "; ".join(f"{count} of {len(boxes)} as {name!r}" for name, count in num_right.items())
    raise ValueError(
        f"The format of boxes is ambiguous. Numbers of valid boxes by format: {counts}. Set bbox_format to 'coco' (x, "
        "y, width, height in pixels), 'voc' (x1, y1, x2, y2 in pixels) or 'yolo' (center x, y, width, height as "
        "fractions of the image size)."
    )


def load_keypoint_columns(splits: DatasetDict, options: SourceOptions) -> ObjectData:
    """Read keypoints from dataset columns.

    The field `keypoints` of an object is a flat list of x, y and visibility, or a list of (x, y) or (x, y, visibility)
    per keypoint. Boxes are optional and in COCO format. The names of the keypoints are their indices.
    """
    tables = []
    for split, dataset in splits.items():
        found = read_objects(dataset, split, ("keypoints",), options)
        has_boxes = "box" in found.values
        boxes = found.boxes() if has_boxes else np.tile(WHOLE_IMAGE, (len(found.image_numbers), 1))
        tables.append(found.table(corners(boxes, "coco"), is_share=not has_boxes, keypoints=found.keypoints()))
    counts = {table.keypoints.shape[1] for table in tables}
    if len(counts) > 1:
        raise ValueError(
            f"The splits have different numbers of keypoints per object: {joined(sorted(counts))}. Use equal numbers."
        )
    names = KeypointNames(tuple(str(number) for number in range(counts.pop())))
    return ObjectData(tables, options.path, keypoints=names)
