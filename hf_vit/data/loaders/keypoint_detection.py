"""Datasets for keypoints, from wherever a user has them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Unpack

import numpy as np

from ..datasets import KeypointData
from ..formats.coco import find_coco, load_coco_keypoints
from ..formats.columns import SourceKeywords, SourceOptions
from ..formats.files import first_format
from ..formats.keypoints import KeypointNames, flip_pairs_of, oks_sigmas_of
from ..formats.landmarks import find_landmarks, load_landmarks
from ..formats.object_columns import load_keypoint_columns
from ..formats.objects import (
    WHOLE_IMAGE,
    BoxErrors,
    ObjectTable,
    checked_keypoints,
    clean_keypoints,
    join_tables,
    keypoint_rows,
    upright,
)
from ..formats.orientation import AnnotationOrientation
from ..formats.stored import load_columns
from ..targets import keypoint_target


FORMATS = ((partial(find_coco, kinds=["keypoints"]), load_coco_keypoints), (find_landmarks, load_landmarks))


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
    """Loads objects with keypoints, one example each; those without any labeled keypoint are left out.

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
    tables, known = _load(options)
    table, notes = clean_keypoints(join_tables(tables))
    table = upright(table, annotation_orientation)
    if whole_image:  # the areas of objects stay what they were
        areas, boxes = table.known_areas, np.tile(table.object_sizes, 2) * WHOLE_IMAGE
        table = replace(table, boxes=boxes, areas=np.where(areas > 0, areas, np.nan))
    rows = keypoint_rows(checked_keypoints(table, box_errors), source)
    pairs, sigmas = flip_pairs_of(known.names, flip_pairs), oks_sigmas_of(known.names)
    return KeypointData(rows, keypoint_target, known.names, (), notes, pairs, known.skeleton, sigmas)


def _load(options: SourceOptions) -> tuple[list[ObjectTable], KeypointNames]:
    if columns := load_columns(options):
        return load_keypoint_columns(columns, options)
    if found := first_format(options.path, FORMATS, options):
        return found
    raise ValueError(
        f"{options.path} holds no keypoints. Give COCO's JSON (annotations/person_keypoints_train2017.json, or "
        "train/annotations.json), or a table with columns file_name, nose_x, nose_y, ...; unpack archives first."
    )
