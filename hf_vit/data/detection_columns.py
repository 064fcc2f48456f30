"""Boxes in the columns of datasets. Shapes: N objects."""

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow as pa
from datasets import ClassLabel, DatasetDict, Value

from .box_checks import wrong_boxes
from .object_classes import check_numbers, class_names_beside, numbered_words, without_class_names
from .object_columns import ObjectColumns, boxes_of, images_of, numbers_of, read_objects, sizes_of
from .object_table import BoxFormat, ObjectTable, corners, table_of
from .wording import listed


def load_detection_columns(
    splits: DatasetDict,
    folder: Path | None,
    bbox_format: BoxFormat | None = None,
    class_names: Sequence[str] | None = None,
    image_column_name: str | None = None,
    objects_column_name: str | None = None,
) -> tuple[dict[str, ObjectTable], tuple[str, ...]]:
    """Reads the boxes of datasets, and the headers of images if there are no columns `width` and `height`.

    Args:
        splits: Datasets with a column of images and one of objects, which are a list of structs or a struct of lists
            with a box, a class and maybe `area` and `iscrowd`, by any of their usual names; or with these columns.
        folder: Where a file may name classes that are numbers.
        bbox_format: How boxes are written, see `corners`; by default "coco" if only this makes sense of them.
        class_names: Names of the classes, where these are plain numbers or in another order than that of the alphabet.
        image_column_name: Which column holds the images, where that is not clear.
        objects_column_name: Which column holds the objects, where none has a usual name.

    Returns:
        Objects by split, and the names of the classes.

    Raises:
        OSError: if an image cannot be opened.
        ValueError: if columns are missing or of other types, or boxes are written in another way, or it is not clear
            in which.
    """
    needed = ("box", "label")
    objects = {split: read_objects(dataset, split, needed, objects_column_name) for split, dataset in splits.items()}
    images = {split: images_of(dataset, split, image_column_name) for split, dataset in splits.items()}
    sizes = {split: sizes_of(dataset, images[split]) for split, dataset in splits.items()}
    raw = {split: boxes_of(found) for split, found in objects.items()}
    of_objects = {split: sizes[split][found.image_numbers] for split, found in objects.items()}
    if bbox_format not in (None, *get_args(BoxFormat)):
        raise ValueError(
            f"bbox_format={bbox_format!r} is unknown. Choose {', '.join(map(repr, get_args(BoxFormat)))}."
        )
    box_format = bbox_format or _choose_format(*(np.concatenate(list(of.values())) for of in (raw, of_objects)))
    labels, names = _labels(objects, folder, class_names)
    tables = {
        split: table_of(
            images[split],
            sizes[split],
            found.image_numbers,
            corners(raw[split], box_format, of_objects[split]),
            found.describe,
            labels=labels[split],
            is_crowd=numbers_of(found, "crowd"),
            areas=numbers_of(found, "area"),
        )
        for split, found in objects.items()
    }
    return tables, names


def _labels(
    objects: dict[str, ObjectColumns], folder: Path | None, class_names: Sequence[str] | None
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Returns (N,) class numbers by split, and the names of the classes."""
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
        names = class_names_beside([folder] if folder else [], class_names)
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
        "bbox_format: 'coco' (x, y, width, height in pixels), 'voc' (x1, y1, x2, y2) or 'yolo' (centre x, y, width, "
        "height as shares of the image)."
    )
