"""Datasets for object detection and keypoints, from wherever a user has them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Unpack

import numpy as np

from ..datasets import KeypointData, TargetData
from ..formats.boxes import find_voc, find_yolo, load_voc, load_yolo
from ..formats.coco import find_coco, load_coco_keypoints, load_coco_objects
from ..formats.columns import SourceKeywords, SourceOptions
from ..formats.files import first_format
from ..formats.keypoints import find_landmarks, flip_pairs_of, load_landmarks, oks_sigmas_of
from ..formats.object_columns import load_detection_columns, load_keypoint_columns
from ..formats.objects import (
    WHOLE_IMAGE,
    BoxErrors,
    BoxFormat,
    clean_keypoints,
    detection_rows,
    join_tables,
    keypoint_rows,
    upright,
)
from ..formats.orientation import AnnotationOrientation
from ..formats.stored import load_columns
from ..targets import detection_target, keypoint_target


# Pairs of a function that recognizes a format and one that reads it, in the order in which they are tried
BOX_FORMATS = (
    (partial(find_coco, kinds=["instances"]), load_coco_objects),
    (find_yolo, load_yolo),
    (find_voc, load_voc),
)
KEYPOINT_FORMATS = ((partial(find_coco, kinds=["keypoints"]), load_coco_keypoints), (find_landmarks, load_landmarks))


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
    """Load images with a box around each object; there may be images without any.

    `source` is, recognized by what is there and in this order:

    - a parquet file, a folder of them, or one written by `Dataset.save_to_disk`, with a column `objects` of `bbox`,
      `category` and maybe `area` and `iscrowd`, or with columns of these names;
    - a folder in the format of COCO: `annotations/instances_train2017.json`, ..., `train/annotations.json`, ..., or
      `train/_annotations.coco.json`, ..., or such a file;
    - a folder in the format of YOLO with a file data.yaml, or this file, or a folder with `images/` and `labels/`,
      whose classes class_names or classes.txt name. Of polygons, the boxes around them are taken;
    - a folder in the format of Pascal VOC: `Annotations/`, `JPEGImages/` and maybe `ImageSets/Main/train.txt`, ..., or
      XML files beside images, also in `train/`, `valid/`, ... What is difficult counts as a crowd;
    - if no such path exists, the name of a dataset on the Hub, with columns as of parquet files.

    Args:
        source: Path, or name on the Hub.
        box_errors: What is done about boxes that reach out of their image or have no area: "raise" lists them in an
            error, "clip" cuts them off at its border if anything is left of them, "drop" leaves them out.
        bbox_format: How boxes in columns are written: "coco" (x, y, width, height in pixels), "voc" (x1, y1, x2, y2 in
            pixels) or "yolo" (center x, y, width, height as shares of the image); by default "coco" if that fits.
        class_names: Names of the classes, where they are plain numbers, or all of them in order where they are words.
        annotation_orientation: Whether boxes are of the "stored" or the "displayed" images; by default sizes tell.
        objects_column_name: Column of objects, if none has a usual name.
        **keywords: Configuration and revision on the Hub, and the column of images, see `SourceOptions`.

    Returns:
        Splits with the columns `image`, `boxes`, `class_labels`, `is_crowd`, `areas`, `width`, `height` and `file`,
        and the names of the classes. No image is decoded: `check_dense` does, and finds those of another size.

    Raises:
        FileNotFoundError: if `source` is neither a path nor a name on the Hub.
        OSError: if the size of an image is not given, and its header cannot be read.
        ValueError: if the data are wrong in any way that shows without decoding the images.
    """
    options = SourceOptions(source, objects_column_name, **keywords)
    if columns := load_columns(options):
        tables, classes = load_detection_columns(columns, options, bbox_format, class_names)
    elif bbox_format is not None:
        raise ValueError(f"bbox_format={bbox_format!r} is for boxes in columns, but {source} has files. Leave it out.")
    elif found := first_format(options.path, BOX_FORMATS, class_names):
        tables, classes = found
    else:
        raise ValueError(
            f"{source} holds no boxes. Give COCO's JSON (annotations/instances_train2017.json, or "
            "train/annotations.json), YOLO's data.yaml, images/ and labels/, VOC's Annotations/ and JPEGImages/, or "
            "parquet files with a column objects; unpack archives first."
        )
    rows, notes = detection_rows(upright(join_tables(tables), annotation_orientation), box_errors, source)
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
    """Load objects with keypoints, one example each; those without any labeled keypoint are left out.

    `source` is, recognized by what is there and in this order:

    - a parquet file, a folder of them, or one written by `Dataset.save_to_disk`, with a column `objects` that has
      `keypoints` and maybe `bbox` and `area`;
    - a folder in the format of COCO, `annotations/person_keypoints_train2017.json` or `train/annotations.json`, ...;
    - a table (.csv, .tsv, .jsonl) as of `load_landmarks`, or a folder with `train.csv`, ..., or with one table;
    - if no such path exists, the name of a dataset on the Hub, with columns as of parquet files.

    Places are in pixels, the center of pixel i at i; -1, -1 is not labeled. Without a box, it is the whole image.

    Args:
        source: Path, or name on the Hub.
        whole_image: Whether boxes are ignored, as for landmarks of the only object of an image.
        box_errors: As in `load_object_detection`; with "clip" and "drop", keypoints outside count as not labeled.
        flip_pairs: Pairs that a mirror image swaps, of names or numbers from 0: "left_eye,right_eye" or "1,2"; by
            default what names with left and right, or the 68 points of iBUG, say.
        annotation_orientation: As in `load_object_detection`.
        objects_column_name: Column of objects, if none has a usual name.
        **keywords: Configuration and revision on the Hub, and the column of images, see `SourceOptions`.

    Returns:
        Splits with the columns `image`, `file`, `keypoints`, `box`, `area`, `image_id`, `width` and `height`, and what
        is known of the keypoints. No image is decoded: `check_dense` does, and finds those of another size.

    Raises:
        FileNotFoundError: if `source` is neither a path nor a name on the Hub.
        OSError: if the size of an image is not given, and its header cannot be read.
        ValueError: if the data are wrong in any way that shows without decoding the images.
    """
    options = SourceOptions(source, objects_column_name, **keywords)
    if columns := load_columns(options):
        tables, known = load_keypoint_columns(columns, options)
    elif found := first_format(options.path, KEYPOINT_FORMATS, options):
        tables, known = found
    else:
        raise ValueError(
            f"{source} holds no keypoints. Give COCO's JSON (annotations/person_keypoints_train2017.json, or "
            "train/annotations.json), or a table with columns file_name, nose_x, nose_y, ...; unpack archives first."
        )
    table, notes = clean_keypoints(join_tables(tables))
    table = upright(table, annotation_orientation)
    if whole_image:  # the areas of objects stay what they were
        areas, boxes = table.known_areas, np.tile(table.object_sizes, 2) * WHOLE_IMAGE
        table = replace(table, boxes=boxes, areas=np.where(areas > 0, areas, np.nan))
    rows = keypoint_rows(table, box_errors, source)
    pairs, sigmas = flip_pairs_of(known.names, flip_pairs), oks_sigmas_of(known.names)
    return KeypointData(rows, keypoint_target, known.names, (), notes, pairs, known.skeleton, sigmas)
