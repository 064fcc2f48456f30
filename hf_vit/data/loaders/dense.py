"""Datasets for segmentation and depth, from wherever a user has them."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Unpack

from datasets import DatasetDict

from ..datasets import TargetData
from ..formats.classes import ClassList, choose_classes
from ..formats.coco import KINDS, find_coco, load_coco_masks
from ..formats.columns import SourceKeywords, SourceOptions, image_and_target
from ..formats.files import find_folder, listed, with_files
from ..formats.folders import load_pairs
from ..formats.orientation import AnnotationOrientation, with_turns
from ..formats.stored import class_folder, load_splits
from ..targets import depth_target, region_target, semantic_target


def load_semantic_segmentation(
    source: str,
    *,
    class_names: Sequence[str] | None = None,
    classes_file: str | None = None,
    reduce_labels: bool = False,
    binary_masks: bool = False,
    annotation_orientation: AnnotationOrientation = "auto",
    mask_column_name: str | None = None,
    **keywords: Unpack[SourceKeywords],
) -> TargetData:
    """Load images with a mask each that says the class of every pixel.

    `source` is, recognized by what is there and in this order:

    - a parquet file, or a folder of them, with two columns of images, as `load_image_classification` takes them;
    - a folder written by `Dataset.save_to_disk`;
    - a folder with `train/images/`, `train/masks/`, `val/images/`, ..., or `images/train/`, `masks/train/`, ..., or
      `images/` and `masks/` alone, where an image and its mask have one stem; masks may also lie in `labels/` or
      `annotations/`;
    - if no such path exists, the name of a dataset on the Hub.

    Masks hold class numbers in one band of 8 or 16 bits (255 where there is no class), or colors in RGB.

    Args:
        source: Path, or name on the Hub.
        class_names: Names of the classes. By default those of classes.txt (one a line, the first is class 0) or
            id2label.json in `source`, or of a palette there, which is needed for colors: palette.txt,
            label_colors.txt (lines "name 255 0 128" or "255 0 128 name") or class_dict.csv.
        classes_file: One of these files, if it lies elsewhere.
        reduce_labels: Whether masks of numbers count classes from 1 and have 0 where there is none.
        binary_masks: Whether masks of numbers have 0 for the first of two classes and 255 for the second.
        annotation_orientation: Whether masks are of the "stored" or the "displayed" images; by default sizes tell.
        mask_column_name: Column of masks, if none has a usual name ("mask", "label", "annotation", ...).
        **keywords: Configuration and revision on the Hub, and the column of images, see `SourceOptions`.

    Returns:
        Splits with the columns `image`, `mask` and `file`, and the names. No image is decoded.

    Raises:
        FileNotFoundError: if `source` is neither a path nor a name on the Hub.
        ValueError: if the data are wrong in any way that shows without decoding the images.
    """
    options = SourceOptions(source, mask_column_name, **keywords)
    splits, classes = _load_masks(
        options, annotation_orientation, class_names, classes_file, reduce_labels, binary_masks
    )
    return TargetData(splits, partial(semantic_target, classes=classes), classes.names)


def load_universal_segmentation(
    source: str,
    *,
    thing_names: Sequence[str] | None = None,
    annotations: str | None = None,
    class_names: Sequence[str] | None = None,
    classes_file: str | None = None,
    reduce_labels: bool = False,
    binary_masks: bool = False,
    annotation_orientation: AnnotationOrientation = "auto",
    mask_column_name: str | None = None,
    **keywords: Unpack[SourceKeywords],
) -> TargetData:
    """Load images with masks of things and of stuff, each of a class.

    `source` is, recognized by what is there and in this order:

    - a folder in the format of COCO, `annotations/panoptic_train2017.json`, ... or `annotations/instances_...`, or
      with `train/annotations.json`, ..., or such a file. Crowds are not trained on, but excuse what is found in them;
    - whatever `load_semantic_segmentation` takes. Every class in an image is one mask, but of things each connected
      region is one, which is sensible where things do not touch, as in photos of one animal.

    Args:
        source: Path, or name on the Hub.
        thing_names: Those classes of semantic masks that are things; an empty list if all are stuff. Required for such
            masks, which hold no instances. Annotations of COCO say so themselves.
        annotations: "panoptic" or "instances", where `source` has both.
        class_names: As in `load_semantic_segmentation`, like all that follow.
        classes_file: One of the files of names or colors.
        reduce_labels: Whether masks of numbers count classes from 1.
        binary_masks: Whether masks of numbers are 0 and 255.
        annotation_orientation: Of masks, or of the annotations of COCO.
        mask_column_name: Column of masks.
        **keywords: As there.

    Returns:
        Splits with the columns `image`, `file` and those of the masks, the names and which of them are things. No
        image is decoded.

    Raises:
        FileNotFoundError: if `source` is neither a path nor a name on the Hub.
        ValueError: if the data are wrong in any way that shows without decoding the images.
    """
    options = SourceOptions(source, mask_column_name, **keywords)
    if coco := _load_coco(options.path, annotations, annotation_orientation):
        if thing_names or class_names or classes_file:
            raise ValueError(f"The annotations of {source} name classes and things themselves. Give no other names.")
        return coco
    splits, classes = _load_masks(
        options, annotation_orientation, class_names, classes_file, reduce_labels, binary_masks
    )
    thing_ids = _thing_ids(classes.names, thing_names, source)
    read_target = partial(region_target, classes=classes, thing_ids=thing_ids)
    return TargetData(splits, read_target, classes.names, thing_ids)


def _load_masks(
    options: SourceOptions,
    orientation: AnnotationOrientation,
    class_names: Sequence[str] | None,
    classes_file: str | None,
    *encoding: bool,
) -> tuple[DatasetDict, ClassList]:
    """Return images and masks, and their classes; `encoding` is that of `choose_classes`."""
    splits = _load_pairs(options, "mask", orientation)
    folder = class_folder(options, class_names or classes_file)
    return splits, choose_classes(folder, class_names, classes_file, *encoding)


def _thing_ids(names: Sequence[str], thing_names: Sequence[str] | None, source: str) -> tuple[int, ...]:
    if thing_names is None:
        raise ValueError(
            f'The masks of {source} hold classes but no instances. Set --thing_classes "{names[-1]}" (thing_names in '
            'Python) to the classes whose connected regions are instances, or to "" if all classes are stuff.'
        )
    if unknown := [name for name in thing_names if name not in names]:
        raise ValueError(f"thing_names has {listed(unknown)}, but the classes are {listed(names)}.")
    return tuple(number for number, name in enumerate(names) if name in thing_names)


def load_depth_estimation(
    source: str,
    *,
    depth_scale: float | None = None,
    annotation_orientation: AnnotationOrientation = "auto",
    depth_column_name: str | None = None,
    **keywords: Unpack[SourceKeywords],
) -> TargetData:
    """Load images with a depth map each.

    `source` is what `load_semantic_segmentation` takes, with `depths/` or `depth/` in the place of `masks/` and a
    column "depth" or "depth_map" in that of "mask".

    Args:
        source: Path, or name on the Hub.
        depth_scale: Units per meter: 256 for KITTI. Unless given, whole numbers (PNG and TIFF of 16 or 32 bits) are
            millimeters and floats (TIFF, `.npy`) meters; given, it counts for both.
        annotation_orientation: Of depth maps, as in `load_semantic_segmentation`.
        depth_column_name: Column of depth maps, if none has a usual name.
        **keywords: As there.

    Returns:
        Splits with the columns `image`, `depth` and `file`. No image is decoded.

    Raises:
        FileNotFoundError: if `source` is neither a path nor a name on the Hub.
        ValueError: if the data are wrong in any way that shows without decoding the images.
    """
    if depth_scale is not None and not 0 < depth_scale < math.inf:
        raise ValueError(
            f"depth_scale={depth_scale} must be positive and finite: it is the number of units in a meter, 1000 for "
            "millimeters."
        )
    options = SourceOptions(source, depth_column_name, **keywords)
    splits = _load_pairs(options, "depth", annotation_orientation)
    return TargetData(splits, partial(depth_target, depth_scale=depth_scale))


def _load_pairs(options: SourceOptions, target: str, orientation: AnnotationOrientation) -> DatasetDict:
    take, folders = partial(image_and_target, target=target), ((find_folder, partial(load_pairs, target=target)),)
    problem = "is a file of unknown kind. Give a parquet file, or a folder; unpack archives first."
    return with_turns(with_files(load_splits(options, take, folders, problem)), target, orientation)


def _load_coco(path: Path, annotations: str | None, orientation: AnnotationOrientation) -> TargetData | None:
    if annotations not in (None, *KINDS):
        raise ValueError(f"annotations={annotations!r} is unknown. Choose {' or '.join(map(repr, KINDS))}.")
    files = find_coco(path, [annotations] if annotations else KINDS) if path.exists() else {}
    return load_coco_masks(files, orientation) if files else None
