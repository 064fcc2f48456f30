"""The objects of many images, the same from every source. Shapes: I images, N objects."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pyarrow as pa
from datasets import Dataset, concatenate_datasets


BoxFormat = Literal["coco", "voc", "yolo"]


@dataclass(frozen=True)
class ObjectTable:
    """The images of a split, also those without any object, and their objects one after the other.

    Args:
        images: The column `image` (`datasets.Image`), I rows.
        sizes: (I, 2) int64, width and height of each image in pixels.
        image_numbers: (N,) int64, the image of each object, ascending.
        boxes: (N, 4) float64, x1, y1, x2, y2 in pixels.
        labels: (N,) int64, numbers of classes.
        is_crowd: (N,) bool, whether a box is around several objects, or one that need not be found.
        areas: (N,) float64, square pixels; NaN where only the box says it.
        ids: (N,) int64, what `describe` takes.
        describe: Says, for errors, which object in which file has an id.
    """

    images: Dataset
    sizes: np.ndarray
    image_numbers: np.ndarray
    boxes: np.ndarray
    labels: np.ndarray
    is_crowd: np.ndarray
    areas: np.ndarray
    ids: np.ndarray
    describe: Callable[[int], str]

    def __len__(self) -> int:
        """Returns the number N of objects."""
        return len(self.boxes)

    def select(self, kept: np.ndarray) -> "ObjectTable":
        """Returns a table of some of the objects, and of all images.

        Args:
            kept: (N,) bool.
        """
        columns = ("image_numbers", "boxes", "labels", "is_crowd", "areas", "ids")
        return replace(self, **{name: vars(self)[name][kept] for name in columns})

    def name_of(self, place: int) -> str:
        """Says which object in which file stands at a place from 0."""
        return self.describe(int(self.ids[place]))


def table_of(
    images: Dataset,
    sizes: np.ndarray,
    image_numbers: np.ndarray,
    boxes: np.ndarray,
    describe: Callable[[int], str],
    *,
    labels: np.ndarray | None = None,
    is_crowd: np.ndarray | None = None,
    areas: np.ndarray | None = None,
) -> ObjectTable:
    """Returns a table of objects in any order, which are sorted by image and otherwise stay in their order.

    Args:
        images: As in `ObjectTable`.
        sizes: As in `ObjectTable`.
        image_numbers: (N,) whole numbers.
        boxes: (N, 4).
        describe: Says which object stood at a place from 0 before they were sorted.
        labels: (N,), by default all 0.
        is_crowd: (N,), by default none is.
        areas: (N,); where one is not positive, it is not known. By default none is known.
    """
    order = np.argsort(image_numbers, kind="stable")
    areas = np.full(len(order), np.nan) if areas is None else np.asarray(areas, float)
    return ObjectTable(
        images,
        np.asarray(sizes, np.int64).reshape(-1, 2),
        np.asarray(image_numbers, np.int64)[order],
        np.asarray(boxes, float).reshape(-1, 4)[order],
        np.zeros(len(order), np.int64) if labels is None else np.asarray(labels, np.int64)[order],
        np.zeros(len(order), bool) if is_crowd is None else np.asarray(is_crowd, bool)[order],
        np.where(areas > 0, areas, np.nan)[order],
        order,
        describe,
    )


def corners(boxes: np.ndarray, box_format: BoxFormat, sizes: np.ndarray) -> np.ndarray:
    """Returns boxes as x1, y1, x2, y2 in pixels.

    Args:
        boxes: (N, 4) float64, as "coco": x1, y1, width and height in pixels, "voc": x1, y1, x2, y2 in pixels, or
            "yolo": centre x, y, width and height as shares of the image.
        box_format: Which of them.
        sizes: (N, 2) width and height of each box's image in pixels.
    """
    if box_format == "voc":
        return boxes
    places, lengths = boxes[:, :2], boxes[:, 2:]
    if box_format == "yolo":
        places, lengths = (places - lengths / 2) * sizes, lengths * sizes
    return np.concatenate([places, places + lengths], axis=1)


def whole_images(sizes: np.ndarray) -> np.ndarray:
    """Returns boxes (N, 4) around images of sizes (N, 2), width and height."""
    return np.concatenate([np.zeros_like(sizes), sizes], axis=1).astype(float)


def box_areas(boxes: np.ndarray) -> np.ndarray:
    """Returns (N,) square pixels of boxes (N, 4) x1, y1, x2, y2."""
    return (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)


def detection_rows(table: ObjectTable) -> Dataset:
    """Returns one row an image: `image`, `boxes`, `class_labels`, `is_crowd`, `areas`, `width` and `height`."""
    offsets = np.searchsorted(table.image_numbers, np.arange(len(table.sizes) + 1)).astype(np.int32)
    columns = {
        "boxes": list_of_four(table.boxes),
        "class_labels": pa.array(table.labels),
        "is_crowd": pa.array(table.is_crowd),
        "areas": pa.array(known_areas(table), pa.float32()),
    }
    lists = {name: pa.ListArray.from_arrays(offsets, values) for name, values in columns.items()}
    return beside(table.images, {**lists, "width": table.sizes[:, 0], "height": table.sizes[:, 1]})


def known_areas(table: ObjectTable) -> np.ndarray:
    """Returns (N,) areas, of the boxes where there are no others."""
    return np.where(np.isnan(table.areas), box_areas(table.boxes), table.areas)


def list_of_four(boxes: np.ndarray) -> pa.Array:
    """Returns (N, 4) as Arrow float32."""
    return pa.FixedSizeListArray.from_arrays(pa.array(boxes.ravel(), pa.float32()), 4)


def beside(images: Dataset, columns: dict[str, pa.Array | np.ndarray]) -> Dataset:
    """Puts columns beside those of a dataset, which stay where they are."""
    return concatenate_datasets([images, Dataset(pa.table(columns))], axis=1)
