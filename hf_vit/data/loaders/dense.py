"""Load datasets for segmentation and depth estimation from local files or the Hub."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Unpack

from datasets import DatasetDict

from ..datasets import TargetData
from ..formats import FORMATS, WITH_COLUMNS, read_source
from ..formats.coco_panoptic import PanopticData
from ..formats.pairs import explain
from ..reading.classes import ClassList, choose_classes
from ..reading.columns import SourceKeywords, SourceOptions, image_and_target, take_from
from ..reading.files import add_file_column, joined
from ..reading.hub import class_folder
from ..reading.masks import instance_rows
from ..reading.match import Match
from ..reading.objects import ObjectData
from ..reading.orientation import AnnotationOrientation, add_turn_column
from ..targets import depth_target, instances_target, panoptic_target, region_target, semantic_target


KINDS = {"panoptic": "coco_panoptic", "instances": "coco"}  # name of the format of each kind of annotations


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
    """Load images with semantic segmentation masks.

    The format of `source` is detected in this order:

    - a parquet file, or a folder of them as in `load_image_classification`, with columns of images and masks;
    - a folder written by `Dataset.save_to_disk`;
    - a folder with `train/images/`, `train/masks/`, `val/images/`, ..., or `images/train/`, `masks/train/`, ..., or
      only `images/` and `masks/`. An image and its mask have the same stem. Other names of `masks/` are `labels/` and
      `annotations/`;
    - a published dataset or an export of a tool in layouts.yaml, with its class names;
    - if the path does not exist, the name of a dataset on the Hub.

    Masks contain class numbers in one channel of 8 or 16 bits (255 for unlabeled pixels), or RGB colors.

    Args:
        source: Path, or name of a dataset on the Hub.
        class_names: Names of the classes. By default, they are read from classes.txt (one name per line, starting with
            class 0), id2label.json, or a palette in `source`. Colors require a palette: palette.txt, label_colors.txt
            (lines "name 255 0 128" or "255 0 128 name") or class_dict.csv.
        classes_file: Path of a file of class names or colors outside of `source`.
        reduce_labels: Whether class numbers in masks start at 1, with 0 for unlabeled pixels.
        binary_masks: Whether masks contain 0 for the first of two classes and 255 for the second.
        annotation_orientation: Whether masks refer to the "stored" or to the "displayed" image, if it has an EXIF
            orientation; by default ("auto") detected by the size of the masks.
        mask_column_name: Column of masks, if it has no usual name ("mask", "label", "annotation", ...).
        **keywords: Configuration and revision on the Hub, and the column of images, see `SourceOptions`.

    Returns:
        Splits with the columns `image`, `mask` and `file`, and the class names. Images are not decoded.

    Raises:
        FileNotFoundError: if `source` is neither a path nor a name on the Hub.
        ValueError: if the data are invalid, as far as this can be detected without decoding images.
    """
    options = SourceOptions(source, mask_column_name, **keywords)
    match, content = read_source(options, "masks", explain(options.path, "mask"))
    splits, classes = _masks(
        match, content, annotation_orientation, class_names, classes_file, reduce_labels, binary_masks
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
    """Load images with masks of things and stuff, for instance and panoptic segmentation.

    The format of `source` is detected in this order:

    - COCO: an annotation file or a folder with `annotations/panoptic_train2017.json`, `annotations/instances_...`, or
      `train/annotations.json`, ... Crowds are ignored in training, and predictions in them are not false positives;
    - any format of `load_semantic_segmentation`. Each connected region of a thing class becomes one instance, which
      assumes that things do not touch; a stuff class has one mask per image.

    Args:
        source: Path, or name of a dataset on the Hub.
        thing_names: Names of the thing classes of semantic masks, which contain no instances; an empty list if all
            classes are stuff. Required for semantic masks; not needed for COCO annotations.
        annotations: "panoptic" or "instances", if `source` has both.
        class_names: Names of the classes, as in `load_semantic_segmentation`.
        classes_file: File of class names or colors.
        reduce_labels: Whether class numbers in masks start at 1.
        binary_masks: Whether masks contain only 0 and 255.
        annotation_orientation: Orientation of masks or COCO annotations.
        mask_column_name: Column of masks.
        **keywords: As in `load_semantic_segmentation`.

    Returns:
        Splits with the columns `image` and `file` and the mask columns, the class names, and the numbers of the thing
        classes. Images are not decoded.

    Raises:
        FileNotFoundError: if `source` is neither a path nor a name on the Hub.
        ValueError: if the data are invalid, as far as this can be detected without decoding images.
    """
    options = SourceOptions(source, mask_column_name, **keywords)
    options = replace(options, data_format=_format_of(annotations, options))
    match, content = read_source(options, "instances", explain(options.path, "mask"))
    if isinstance(content, ObjectData | PanopticData):
        if thing_names or class_names or classes_file:
            raise ValueError(
                f"The annotations of {source} already contain class names and things. Remove thing_names, class_names "
                "and classes_file."
            )
        return _instances(content, annotation_orientation)
    splits, classes = _masks(
        match, content, annotation_orientation, class_names, classes_file, reduce_labels, binary_masks
    )
    thing_ids = _thing_ids(classes.names, thing_names, source)
    read_target = partial(region_target, classes=classes, thing_ids=thing_ids)
    return TargetData(splits, read_target, classes.names, thing_ids)


def _format_of(annotations: str | None, options: SourceOptions) -> str | None:
    """Return the name of the format for a kind of COCO annotations, or `options.data_format` if no kind is given."""
    if annotations is not None:
        if annotations not in KINDS:
            raise ValueError(f"annotations={annotations!r} is unknown. Use {' or '.join(map(repr, KINDS))}.")
        return KINDS[annotations]
    path = options.path
    if options.data_format is None and path.is_dir():
        found = [kind for kind, name in KINDS.items() if FORMATS["instances"][name].detect(path, "instances")]
        if len(found) > 1:
            raise ValueError(
                f"{path} has annotation files of {' and '.join(found)}. Choose one kind, as in "
                f"annotations={found[0]!r}."
            )
    return options.data_format


def _masks(
    match: Match,
    content: DatasetDict,
    orientation: AnnotationOrientation,
    class_names: Sequence[str] | None,
    classes_file: str | None,
    reduce_labels: bool,
    binary_masks: bool,
) -> tuple[DatasetDict, ClassList]:
    folder = class_folder(match.options, class_names or classes_file)
    classes = choose_classes(folder, class_names, classes_file, reduce_labels, binary_masks, match.layout)
    return _pairs(match, content, "mask", orientation), classes


def _instances(content: ObjectData | PanopticData, orientation: AnnotationOrientation) -> TargetData:
    if isinstance(content, PanopticData):
        rows = add_turn_column(add_file_column(content.splits), "panoptic", orientation)
        return TargetData(rows, panoptic_target, content.names, content.thing_ids)
    table, names = content.with_class_numbers(None)
    rows = add_turn_column(instance_rows(table), None, orientation)
    return TargetData(rows, instances_target, names, tuple(range(len(names))))


def _thing_ids(names: Sequence[str], thing_names: Sequence[str] | None, source: str) -> tuple[int, ...]:
    if thing_names is None:
        raise ValueError(
            f"The masks of {source} contain classes but no instances. Set --thing_classes (thing_names in Python) to "
            f'the classes whose connected regions are instances, for example --thing_classes "{names[-1]}", or to "" '
            "if all classes are stuff."
        )
    if unknown := [name for name in thing_names if name not in names]:
        raise ValueError(f"thing_names has unknown classes {joined(unknown)}. Choose from {joined(names)}.")
    return tuple(number for number, name in enumerate(names) if name in thing_names)


def load_depth_estimation(
    source: str,
    *,
    depth_scale: float | None = None,
    annotation_orientation: AnnotationOrientation = "auto",
    depth_column_name: str | None = None,
    **keywords: Unpack[SourceKeywords],
) -> TargetData:
    """Load images with depth maps.

    The formats are those of `load_semantic_segmentation`, with `depths/` or `depth/` instead of `masks/`, and a column
    "depth" or "depth_map" instead of "mask".

    Args:
        source: Path, or name of a dataset on the Hub.
        depth_scale: Units per meter, for example 256 for KITTI. By default, integers (16- or 32-bit PNG and TIFF) are
            millimeters and floats (TIFF, `.npy`) are meters. If given, it applies to both.
        annotation_orientation: Orientation of depth maps, as in `load_semantic_segmentation`.
        depth_column_name: Column of depth maps, if it has no usual name.
        **keywords: As in `load_semantic_segmentation`.

    Returns:
        Splits with the columns `image`, `depth` and `file`. Images are not decoded.

    Raises:
        FileNotFoundError: if `source` is neither a path nor a name on the Hub.
        ValueError: if the data are invalid, as far as this can be detected without decoding images.
    """
    if depth_scale is not None and not 0 < depth_scale < math.inf:
        raise ValueError(
            f"depth_scale={depth_scale} must be positive and finite. It is the number of units per meter, for example "
            "1000 for millimeters."
        )
    options = SourceOptions(source, depth_column_name, **keywords)
    match, content = read_source(options, "depth", explain(options.path, "depth"))
    splits = _pairs(match, content, "depth", annotation_orientation)
    if depth_scale is None and match.layout:
        depth_scale = match.layout.depth_scale
    return TargetData(splits, partial(depth_target, depth_scale=depth_scale))


def _pairs(match: Match, content: DatasetDict, target: str, orientation: AnnotationOrientation) -> DatasetDict:
    """Select the images and the targets ("mask" or "depth"), and add file names and orientations."""
    if match.name in WITH_COLUMNS:
        content = take_from(content, partial(image_and_target, target=target), match.options)
    return add_turn_column(add_file_column(content), target, orientation)
