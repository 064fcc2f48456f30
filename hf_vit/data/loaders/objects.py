"""Load datasets for object detection and keypoint detection from local files or the Hub."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

import numpy as np

from ..datasets import KeypointData, TargetData
from ..formats import WITH_COLUMNS, read_source
from ..reading.columns import SourceKeywords, SourceOptions
from ..reading.keypoints import flip_pairs_of, oks_sigmas_of
from ..reading.landmarks import load_landmarks
from ..reading.object_columns import load_detection_columns, load_keypoint_columns
from ..reading.objects import (
    WHOLE_IMAGE,
    BoxErrors,
    BoxFormat,
    clean_keypoints,
    detection_rows,
    join_tables,
    keypoint_rows,
    upright,
)
from ..reading.orientation import AnnotationOrientation
from ..targets import detection_target, keypoint_target


NO_BOXES = (
    "contains no boxes in a known format: COCO (annotations/instances_train2017.json, or train/annotations.json), "
    "YOLO (data.yaml, or images/ and labels/), VOC (Annotations/ and JPEGImages/), or parquet files with a column "
    "objects. Extract archives first."
)
NO_KEYPOINTS = (
    "contains no keypoints in a known format: COCO (annotations/person_keypoints_train2017.json, or "
    "train/annotations.json), or a table with columns file_name, nose_x, nose_y, ... Extract archives first."
)


def load_object_detection(
    source: str,
    *,
    box_errors: BoxErrors = "raise",
    bbox_format: BoxFormat | None = None,
    class_names: Sequence[str] | None = None,
    annotation_orientation: AnnotationOrientation = "auto",
    objects_column_name: str | None = None,
    **keywords: Unpack[SourceKeywords],
) -> TargetData:
    """Load images with boxes of objects.

    The format of `source` is detected in this order:

    - a parquet file, a folder of parquet files, or a folder written by `Dataset.save_to_disk`, with a column `objects`
      of `bbox`, `category` and optionally `area` and `iscrowd`, or with columns of these names;
    - COCO: an annotation file or a folder with `annotations/instances_train2017.json`, ..., `train/annotations.json`,
      ..., or `train/_annotations.coco.json`, ...;
    - YOLO: a file data.yaml, a folder with such a file, or a folder with `images/` and `labels/` and class names in
      `class_names` or classes.txt. Polygons are converted to their bounding boxes;
    - Pascal VOC: a folder with `Annotations/`, `JPEGImages/` and optionally `ImageSets/Main/train.txt`, ..., or with
      XML files next to images, optionally in `train/`, `valid/`, ... Difficult objects are treated as crowds;
    - if the path does not exist, the name of a dataset on the Hub, with columns as in parquet files.

    Args:
        source: Path, or name of a dataset on the Hub.
        box_errors: Treatment of boxes that exceed their image or have no area: "raise" lists them in an error, "clip"
            clips them to the image and removes those completely outside, "drop" removes all of them.
        bbox_format: Format of boxes in columns: "coco" (x, y, width, height in pixels), "voc" (x1, y1, x2, y2 in
            pixels) or "yolo" (center x, y, width, height as fractions of the image); default: "coco" if it fits best.
        class_names: Names of all classes in order, for class numbers or to set the order of class names in the data.
        annotation_orientation: Whether boxes refer to the "stored" or to the "displayed" image, if it has an EXIF
            orientation; by default ("auto") detected by the image size.
        objects_column_name: Column of objects, if it has no usual name.
        **keywords: Configuration and revision on the Hub, and the column of images, see `SourceOptions`.

    Returns:
        Splits with the columns `image`, `boxes`, `class_labels`, `is_crowd`, `areas`, `width`, `height` and `file`,
        and the class names. Images are not decoded; use `check_dense` to detect damaged images and wrong sizes.

    Raises:
        FileNotFoundError: if `source` is neither a path nor a name on the Hub.
        OSError: if the size of an image is not given and its header cannot be read.
        ValueError: if the data are invalid, as far as this can be detected without decoding images.
    """
    options = SourceOptions(source, objects_column_name, **keywords)
    match, content = read_source(options, "boxes", NO_BOXES)
    if match.name in WITH_COLUMNS:
        content = load_detection_columns(content, options, bbox_format, class_names)
    elif bbox_format is not None:
        raise ValueError(f"bbox_format={bbox_format!r} applies to dataset columns, not to {source}. Remove it.")
    table, classes = content.with_class_numbers(class_names)
    rows, notes = detection_rows(upright(table, annotation_orientation), box_errors, source)
    return TargetData(rows, detection_target, classes, notes=notes)


def load_keypoint_detection(
    source: str,
    *,
    whole_image: bool = False,
    box_errors: BoxErrors = "raise",
    flip_pairs: Sequence[str] | None = None,
    annotation_orientation: AnnotationOrientation = "auto",
    objects_column_name: str | None = None,
    **keywords: Unpack[SourceKeywords],
) -> KeypointData:
    """Load objects with keypoints, one example per object. Objects without any labeled keypoint are removed.

    The format of `source` is detected in this order:

    - a parquet file, a folder of parquet files, or a folder written by `Dataset.save_to_disk`, with a column `objects`
      that has `keypoints` and optionally `bbox` and `area`;
    - COCO: a folder with `annotations/person_keypoints_train2017.json` or `train/annotations.json`, ...;
    - a table (.csv, .tsv, .jsonl), see `load_landmarks`, or a folder with `train.csv`, ..., or with a single table;
    - if the path does not exist, the name of a dataset on the Hub, with columns as in parquet files.

    Coordinates are in pixels. Integer coordinates are pixel centers, and a keypoint at (-1, -1) is not labeled. The
    default box is the whole image.

    Args:
        source: Path, or name of a dataset on the Hub.
        whole_image: Whether to replace boxes by the whole image, for images of a single object.
        box_errors: As in `load_object_detection`; "clip" and "drop" treat keypoints outside the image as not labeled.
        flip_pairs: Pairs of keypoint names or indices that a horizontal flip swaps, such as "left_eye,right_eye" or
            "1,2"; by default found by names with left and right, or predefined for the 68 iBUG landmarks.
        annotation_orientation: As in `load_object_detection`.
        objects_column_name: Column of objects, if it has no usual name.
        **keywords: Configuration and revision on the Hub, and the column of images, see `SourceOptions`.

    Returns:
        Splits with the columns `image`, `file`, `keypoints`, `box`, `area`, `image_id`, `width` and `height`, and the
        properties of the keypoints. Images are not decoded; `check_dense` detects damaged images and wrong sizes.

    Raises:
        FileNotFoundError: if `source` is neither a path nor a name on the Hub.
        OSError: if the size of an image is not given and its header cannot be read.
        ValueError: if the data are invalid, as far as this can be detected without decoding images.
    """
    options = SourceOptions(source, objects_column_name, **keywords)
    match, content = read_source(options, "points", NO_KEYPOINTS)
    if match.name in WITH_COLUMNS:
        content = load_keypoint_columns(content, options)
    elif match.name == "table":
        content = load_landmarks(content)
    table, notes = clean_keypoints(join_tables(content.tables))
    table = upright(table, annotation_orientation)
    if whole_image:  # replace boxes by whole images, but keep the areas of objects
        areas, boxes = table.known_areas, np.tile(table.object_sizes, 2) * WHOLE_IMAGE
        table = replace(table, boxes=boxes, areas=np.where(areas > 0, areas, np.nan))
    known, rows = content.keypoints, keypoint_rows(table, box_errors, source)
    pairs, sigmas = flip_pairs_of(known.names, flip_pairs), oks_sigmas_of(known.names)
    return KeypointData(rows, keypoint_target, known.names, (), notes, pairs, known.skeleton, sigmas)
