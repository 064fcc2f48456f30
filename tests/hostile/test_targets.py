"""Test that image processors and models raise errors for invalid targets, such as labels, masks, boxes and texts."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from hf_vit import HfViTImageProcessor

from ..helpers.models import MODEL_CLASSES, pixels, small_config
from .table import Row, assert_refused, parametrize, rows


IMAGE = np.zeros((6, 8, 3), np.uint8)
MAP = np.zeros((6, 8), np.int64)
INSTANCES = {"segmentation_maps": [MAP + 3]}
MASKS = np.ones((2, 6, 8), bool)
BOX = [1.0, 1.0, 4.0, 5.0]
NEGATIVE = {"image_id": 1, "annotations": [{"bbox": [1, 1, -4, 5], "category_id": 0}]}
POSE = np.array([[1.0, 2.0, 2.0], [3.0, 2.0, 1.0]])
UNEVEN = [POSE.tolist(), POSE[:1].tolist()]
CROPS = {"do_affine_crop": True, "size": {"height": 8, "width": 6}}


def prepare(targets: dict[str, Any]) -> Any:
    """Process an image with targets. Images with keypoints or object boxes are cropped; other images are resized."""
    options = CROPS if {"keypoints", "object_boxes"} & targets.keys() else {"size": 8}
    return HfViTImageProcessor(**options)([IMAGE], **targets, return_tensors="pt")


def with_value(array: np.ndarray, value: float) -> np.ndarray:
    changed = array.copy()
    changed[0, 1] = value
    return changed


def written(name: str, image: Image.Image) -> Callable[[Path], dict[str, Any]]:
    def write(folder: Path) -> dict[str, Any]:
        image.save(folder / name)
        return {"segmentation_maps": [folder / name]}

    return write


VALUES = [
    ("mask-of-another-size", {"segmentation_maps": [MAP[:4]]}, "4 x 8 pixels | 6 x 8"),
    ("mask-of-swapped-sides", {"segmentation_maps": [MAP.T]}, "8 x 6 pixels | same size"),
    ("mask-of-three-bands", {"segmentation_maps": [np.zeros((6, 8, 3), int)]}, "shape (6, 8, 3)"),
    ("mask-of-negative-classes", {"segmentation_maps": [MAP - 1]}, "contains -1 | from 0"),
    ("masks-of-other-images", {"segmentation_maps": [MAP, MAP]}, "2 entries | 1 images"),
    ("mask-file-in-color", written("m.png", Image.new("RGB", (8, 6))), "m.png | mode 'RGB'"),
    ("mask-file-with-alpha", written("m.png", Image.new("LA", (8, 6))), "m.png | mode 'LA'"),
    ("instances-of-no-class", {**INSTANCES, "instance_id_to_semantic_id": {1: 0}}, "segments 3"),
    ("negative-class", {**INSTANCES, "instance_id_to_semantic_id": {3: -1}}, "class -1 | of at least 0"),
    ("classes-of-instances-without-a-map", {"instance_id_to_semantic_id": {1: 0}}, "without segmentation_maps"),
    ("masks-of-shares", {"mask_labels": [MASKS * 0.5], "class_labels": [[0, 1]]}, "other than 0 and 1"),
    ("masks-of-0-and-255", {"mask_labels": [MASKS * 255], "class_labels": [[0, 1]]}, "other than 0 and 1"),
    ("fewer-classes-than-masks", {"mask_labels": [MASKS], "class_labels": [[0]]}, "shape (1,) | 2 entries"),
    ("masks-without-classes", {"mask_labels": [MASKS]}, "without class_labels"),
    ("masks-of-another-size", {"mask_labels": [MASKS[:, :3]], "class_labels": [[0, 1]]}, "3 x 8 pixels"),
    ("masks-and-depth", {"segmentation_maps": [MAP], "depth_maps": [MAP * 1.0]}, "trained on one"),
    ("depth-of-another-size", {"depth_maps": [np.ones((3, 8))]}, "3 x 8 pixels"),
    ("depth-of-an-image-too-many", {"depth_maps": [np.ones((6, 8))] * 2}, "2 entries"),
]
TYPES = [
    ("mask-of-floats", {"segmentation_maps": [MAP * 1.0]}, "float64 | integers"),
    ("mask-of-nan", {"segmentation_maps": [MAP * np.nan]}, "float64 | integers"),
    ("mask-of-objects", {"segmentation_maps": [MAP.astype(object)]}, "dtype object"),
    ("mask-of-texts", {"segmentation_maps": [np.full((6, 8), "sky")]}, "which is not supported"),
    ("mask-that-is-none", {"segmentation_maps": [None]}, "NoneType"),
    ("mask-as-nested-lists", {"segmentation_maps": [MAP.tolist()]}, "of type list | np.array"),
    ("depth-in-whole-numbers", {"depth_maps": [MAP]}, "unit is unknown | 1000 for millimeters"),
    ("classes-of-masks-as-names", {"mask_labels": [MASKS], "class_labels": [["cat", "dog"]]}, "cat | label2id"),
    ("classes-of-boxes-as-shares", {"boxes": [[BOX]], "class_labels": [[0.5]]}, "float32 | integers"),
]
VALUES += [
    ("box-of-negative-size", {"boxes": [[[4, 5, 1, 1]]], "class_labels": [[0]]}, "right >= left"),
    ("box-of-nan", {"boxes": [[[1, 1, np.nan, 5]]], "class_labels": [[0]]}, "nan | finite"),
    ("box-of-infinite-size", {"boxes": [[[1, 1, np.inf, 5]]], "class_labels": [[0]]}, "inf | finite"),
    ("box-of-five-numbers", {"boxes": [[[1, 1, 4, 5, 0]]], "class_labels": [[0]]}, "shape (1, 5) | (N, 4)"),
    ("box-of-names", {"boxes": [[["a", "b", "c", "d"]]], "class_labels": [[0]]}, "four numbers"),
    ("boxes-of-uneven-length", {"boxes": [[BOX, [1, 1]]], "class_labels": [[0, 0]]}, "four numbers"),
    ("boxes-of-other-images", {"boxes": [[BOX], [BOX]], "class_labels": [[0], [0]]}, "2 entries | 1 images"),
    ("boxes-without-classes", {"boxes": [[BOX]]}, "without class_labels"),
    ("classes-without-boxes", {"class_labels": [[0]]}, "without mask_labels or boxes"),
    ("boxes-of-a-negative-class", {"boxes": [[BOX]], "class_labels": [[-2]]}, "contains -2"),
    ("more-classes-than-boxes", {"boxes": [[BOX]], "class_labels": [[0, 1]]}, "shape (2,) | 1 entries"),
    ("annotations-of-no-form", {"annotations": [{"annotations": [{"box": BOX}]}]}, "annotations[0]"),
    ("annotation-of-a-negative-size", {"annotations": [NEGATIVE]}, "annotations[0] | -4"),
    ("crop-of-no-area", {"object_boxes": [[[2, 2, 2, 5]]]}, "no area"),
    ("crop-outside-of-the-image", {"object_boxes": [[[90, 90, 99, 99]]]}, "outside of its image"),
    ("crop-of-nan", {"object_boxes": [[[np.nan, 1, 2, 5]]]}, "nan | finite"),
    ("keypoints-of-two-numbers", {"object_boxes": [[BOX]], "keypoints": [[POSE[:, :2]]]}, "(N, K, 3)"),
    ("keypoint-of-nan", {"object_boxes": [[BOX]], "keypoints": [[with_value(POSE, np.nan)]]}, "finite x, y"),
    ("visibility-of-7", {"object_boxes": [[BOX]], "keypoints": [[[[1, 2, 7], [3, 2, 1]]]]}, "7.0 | visibility of"),
    ("more-poses-than-boxes", {"object_boxes": [[BOX]], "keypoints": [[POSE, POSE]]}, "1 objects"),
    ("objects-of-other-keypoints", {"object_boxes": [[BOX, BOX]], "keypoints": [UNEVEN]}, "keypoints[0]"),
    ("poses-of-other-images", {"object_boxes": [[BOX]], "keypoints": [[POSE], [POSE]]}, "2 entries | 1 images"),
    ("keypoints-beside-a-mask", {"keypoints": [[POSE]], "segmentation_maps": [MAP]}, "trained on one"),
]
CLASSES = {kind.__name__.removeprefix("HfViTFor"): kind for kind in MODEL_CLASSES}


@cache
def model_of(task: str) -> Any:
    return CLASSES[task](small_config())


def train(task: str) -> Callable[[dict[str, Any]], Any]:
    """Return a function that calls the model of a task with two images and the given labels."""

    def call(labels: dict[str, Any]) -> Any:
        model = model_of(task)
        return model(pixel_values=pixels(model.config), **labels)

    return call


def of_model(task: str, *table: tuple[str, Any, str]) -> list[Row]:
    """Return test cases for the model of a task. An input is either labels or a dictionary of model arguments."""
    given = [(name, value if isinstance(value, dict) else {"labels": value}, words) for name, value, words in table]
    return rows(train(task), ValueError, given)


def objects(classes: list[int], boxes: list[list[float]]) -> list[dict[str, torch.Tensor]]:
    one = {"class_labels": torch.tensor(classes), "boxes": torch.tensor(boxes).reshape(-1, 4)}
    return [one, one]


WHOLE, NINE = torch.ones(1, 32, 32), torch.tensor([9])
MODEL_ROWS = [
    *of_model(
        "ImageClassification",
        ("class-out-of-range", torch.tensor([0, 5]), "Label 5 | 0 to 4"),
        ("label-below-0", torch.tensor([0, -1]), "Label -1"),
        ("class-as-truth", torch.tensor([True, False]), "not bool"),
        ("classes-in-a-row-too-many", torch.tensor([[0, 1]]), "must be (batch,) = (2,)"),
        ("classes-of-fewer-images", torch.tensor([0]), "(2,)"),
        ("floats-of-unknown-meaning", torch.zeros(2, 5), "problem_type"),
    ),
    *of_model(
        "SemanticSegmentation",
        ("map-out-of-range", torch.full((2, 32, 32), 9), "9"),
        ("map-of-floats", torch.zeros(2, 32, 32), "float32"),
        ("map-of-one-dimension-too-many", torch.zeros(2, 1, 32, 32, dtype=torch.int64), "(2, 1, 32, 32)"),
        ("map-of-fewer-images", torch.zeros(1, 32, 32, dtype=torch.int64), "(1, 32, 32)"),
    ),
    *of_model(
        "DepthEstimation",
        ("depth-of-integers", torch.ones(2, 32, 32, dtype=torch.int64), "int64 | meters"),
        ("depth-of-fewer-images", torch.ones(1, 32, 32), "(1, 32, 32)"),
        ("depth-of-three-channels", torch.ones(2, 3, 32, 32), "(2, 3, 32, 32)"),
    ),
    *of_model(
        "ObjectDetection",
        ("object-of-an-unknown-class", objects([7], [[0.5, 0.5, 0.2, 0.2]]), "Class 7 | 0 to 4"),
        ("object-in-pixels", objects([1], [[16.0, 16.0, 8.0, 8.0]]), "16.0 | relative to the image"),
        ("object-of-nan", objects([1], [[float("nan"), 0.5, 0.2, 0.2]]), "nan | in [0, 1]"),
        ("object-of-a-negative-size", objects([1], [[0.5, 0.5, -0.2, 0.2]]), "-0.2"),
        ("objects-of-fewer-images", objects([1], [[0.5, 0.5, 0.2, 0.2]])[:1], "2 images"),
        ("objects-of-more-classes-than-boxes", objects([1, 2], [[0.5, 0.5, 0.2, 0.2]]), "(2,) and (1, 4)"),
        ("objects-that-are-a-tensor", torch.zeros(2, 4), "list with a dictionary"),
    ),
    *of_model(
        "KeypointDetection",
        ("keypoints-too-many", torch.zeros(2, 9, 3), "(2, 9, 3)"),
        ("keypoints-without-visibility", torch.zeros(2, 5, 2), "(2, 5, 2)"),
        ("keypoints-of-nan", torch.full((2, 5, 3), float("nan")), "nan"),
    ),
    *of_model(
        "UniversalSegmentation",
        ("segments-without-classes", {"mask_labels": [WHOLE] * 2}, "class_labels"),
        ("segments-of-an-unknown-class", {"mask_labels": [WHOLE] * 2, "class_labels": [NINE] * 2}, "9"),
        ("segments-of-fewer-images", {"mask_labels": [WHOLE], "class_labels": [NINE - 9]}, "2 images"),
    ),
]


@parametrize([*rows(prepare, ValueError, VALUES), *rows(prepare, TypeError, TYPES), *MODEL_ROWS])
def test_image_processors_and_models_reject_invalid_targets(row: Row, tmp_path: Path) -> None:
    assert_refused(row, tmp_path)
