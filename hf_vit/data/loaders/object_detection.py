"""Datasets for object detection, from wherever a user has them."""

from collections.abc import Sequence
from functools import partial
from typing import Unpack

from ..datasets import TargetData
from ..formats.coco import find_coco, load_coco_objects
from ..formats.columns import SourceKeywords, SourceOptions
from ..formats.files import first_format
from ..formats.object_columns import load_detection_columns
from ..formats.objects import (
    BoxErrors,
    BoxFormat,
    checked_boxes,
    detection_rows,
    join_tables,
    upright,
    without_repeats,
)
from ..formats.orientation import AnnotationOrientation
from ..formats.stored import load_columns
from ..formats.voc import find_voc, load_voc
from ..formats.yolo import find_yolo, load_yolo
from ..targets import detection_target


FORMATS = ((partial(find_coco, kinds=["instances"]), load_coco_objects), (find_yolo, load_yolo), (find_voc, load_voc))


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
    """Loads images with a box around each object; there may be images without any.

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
    elif found := first_format(options.path, FORMATS, class_names):
        tables, classes = found
    else:
        raise ValueError(
            f"{options.path} holds no boxes. Give COCO's JSON (annotations/instances_train2017.json, or "
            "train/annotations.json), YOLO's data.yaml, images/ and labels/, VOC's Annotations/ and JPEGImages/, or "
            "parquet files with a column objects; unpack archives first."
        )
    table = checked_boxes(upright(join_tables(tables), annotation_orientation), box_errors)
    table, notes = without_repeats(table)
    return TargetData(detection_rows(table, source), detection_target, classes, notes=notes)
