"""Keypoints in the columns of datasets. Shapes: N objects, K keypoints."""

import numpy as np
import pyarrow as pa
from datasets import DatasetDict

from .keypoint_table import KeypointNames, KeypointTable
from .object_columns import ObjectColumns, boxes_of, images_of, is_list, lengths_of, numbers_of, read_objects, sizes_of
from .object_table import corners, table_of, whole_images
from .wording import listed


def load_keypoint_columns(
    splits: DatasetDict, image_column_name: str | None = None, objects_column_name: str | None = None
) -> tuple[dict[str, KeypointTable], KeypointNames]:
    """Reads the keypoints of datasets, and the headers of images if there are no columns `width` and `height`.

    Args:
        splits: As in `load_detection_columns`, where objects have `keypoints`: x, y and visibility one after the
            other, or a list of x and y, or of all three, for each keypoint. Boxes, if any, are written as COCO does.
        image_column_name: As in `load_detection_columns`.
        objects_column_name: As in `load_detection_columns`.

    Returns:
        Objects with keypoints by split; the names of the keypoints are their numbers from 0.

    Raises:
        OSError: if an image cannot be opened.
        ValueError: if columns are missing or of other types, or objects have different numbers of keypoints.
    """
    tables = {}
    for split, dataset in splits.items():
        found = read_objects(dataset, split, ("keypoints",), objects_column_name)
        images = images_of(dataset, split, image_column_name)
        sizes = sizes_of(dataset, images)
        of_objects = sizes[found.image_numbers]
        boxes = corners(boxes_of(found), "coco", of_objects) if "box" in found.values else whole_images(of_objects)
        objects = table_of(images, sizes, found.image_numbers, boxes, found.describe, areas=numbers_of(found, "area"))
        tables[split] = KeypointTable.of(objects, _keypoints(found))
    counts = {table.keypoints.shape[1] for table in tables.values()}
    if len(counts) > 1:
        raise ValueError(f"The splits have objects of {listed(sorted(counts))} keypoints. Make them the same.")
    return tables, KeypointNames(tuple(str(number) for number in range(counts.pop())))


def _keypoints(objects: ObjectColumns) -> np.ndarray:
    """Returns (N, K, 3) x, y and visibility, which is 2 where only x and y are given."""
    lists = objects.values["keypoints"]
    values, widths = lists.flatten(), {3}
    if is_list(values):
        widths, values = set(lengths_of(values).tolist()), values.flatten()
    counts = {count if is_list(lists.flatten()) else count / 3 for count in lengths_of(lists).tolist()}
    if len(counts) != 1 or not all(float(count).is_integer() for count in counts) or widths not in ({2}, {3}):
        raise ValueError(
            f"The objects of {objects.split!r} have {listed(sorted(counts))} keypoints of {listed(sorted(widths))} "
            "numbers. All need as many, of x, y and maybe visibility."
        )
    keypoints = values.cast(pa.float64()).to_numpy(zero_copy_only=False).reshape(len(lists), -1, widths.pop())
    if keypoints.shape[2] == 3:
        return keypoints
    return np.concatenate([keypoints, 2.0 * np.isfinite(keypoints).all(axis=2, keepdims=True)], axis=2)
