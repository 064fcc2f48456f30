"""Synthetic COCO datasets of drawn objects and figures, for training detection and keypoint models."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


CLASSES = ["brick", "leaf"]
POINTS = ["top", "left_foot", "right_foot"]
NUM_TRAIN, NUM_VALIDATION = 8, 5
COLORS = np.array([(220, 60, 40), (40, 160, 60)])
DOTS = np.array([(230, 40, 40), (40, 220, 40), (40, 60, 230)])
Draw = Callable[[np.random.Generator, np.ndarray, int], list[dict[str, Any]]]


def write_coco(folder: Path, categories: list[dict[str, Any]], draw: Draw) -> Path:
    """Write images of several sizes, which `draw` paints, with COCO annotations. Return `folder`."""
    generator = np.random.default_rng(0)
    for split, count in (("train", NUM_TRAIN), ("val", NUM_VALIDATION)):
        (folder / split / "images").mkdir(parents=True)
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for number in range(count):
            height, width = 40 + 4 * (number % 3), 44 + 6 * (number % 2)
            pixels = np.full((height, width, 3), 110.0)
            for entry in draw(generator, pixels, number):
                annotations.append({"id": len(annotations) + 1, "image_id": number, "iscrowd": 0, **entry})
            noisy = (pixels + generator.normal(0, 8, pixels.shape)).clip(0, 255).astype(np.uint8)
            Image.fromarray(noisy).save(folder / split / "images" / f"{number}.png")
            images.append({"id": number, "file_name": f"{number}.png", "height": height, "width": width})
        content = {"images": images, "annotations": annotations, "categories": categories}
        (folder / split / "annotations.json").write_text(json.dumps(content))
    return folder


def draw_boxes(generator: np.random.Generator, pixels: np.ndarray, number: int) -> list[dict[str, Any]]:
    """Draw a box on the left, the right or both sides. Every fourth image has no box, and image 3 has a crowd."""
    found = []
    for side in range(2):
        if number % 4 in (side, 2):
            left, top = 2 + 21 * side + int(generator.integers(3)), int(generator.integers(2, 14))
            width, height = 14 + int(generator.integers(4)), 18 + int(generator.integers(6))
            label = int(generator.integers(2))
            pixels[top : top + height, left : left + width] = COLORS[label]
            box = [left, top, width, height]
            found.append({"category_id": label + 1, "bbox": box, "area": width * height})
    if number == 3:
        found.append({"category_id": 2, "bbox": [1, 1, 30, 30], "area": 900, "iscrowd": 1})
    return found


def draw_figures(generator: np.random.Generator, pixels: np.ndarray, number: int) -> list[dict[str, Any]]:
    """Draw one or two figures, each with three dots in a box. A dot in image 4 is not labeled."""
    found = []
    for side in range(1 + number % 2):
        left, top = 1 + 22 * side, int(generator.integers(2, 8))
        places = [(left + 9, top + 3), (left + 3, top + 25), (left + 16, top + 25)]
        places = [(x + int(generator.integers(-2, 3)), y + int(generator.integers(-2, 3))) for x, y in places]
        for (x, y), color in zip(places, DOTS, strict=True):
            pixels[y - 2 : y + 3, x - 2 : x + 3] = color
        triples = [[x, y, 2] for x, y in places]
        if number == 4:
            triples[0] = [0, 0, 0]
        keypoints = [value for triple in triples for value in triple]
        pose = {"keypoints": keypoints, "num_keypoints": sum(visibility > 0 for visibility in keypoints[2::3])}
        found.append({"category_id": 1, "bbox": [left, top, 20, 30], "area": 600, **pose})
    return found


def write_objects(folder: Path) -> Path:
    """Write images of bricks and leaves, with boxes."""
    categories = [{"id": number + 1, "name": name} for number, name in enumerate(CLASSES)]
    return write_coco(folder, categories, draw_boxes)


def write_figures(folder: Path) -> Path:
    """Write a dataset of images of stick figures, annotated with boxes and keypoints."""
    category = {"id": 1, "name": "figure", "keypoints": POINTS, "skeleton": [[1, 2], [1, 3]]}
    return write_coco(folder, [category], draw_figures)
