"""Random objects and poses with predictions, for tests of metrics."""

import numpy as np

from hf_vit.evaluation.detection import DetectionMetric
from hf_vit.evaluation.keypoints import KeypointMetric

from .dense import Image, Metrics


NAMES = ["cat", "dog", "bird", "ghost"]  # The class "ghost" occurs in no image
KEYPOINTS = ["nose", "left_ear", "right_ear", "left_paw", "right_paw"]
OKS_SIGMAS = [0.03, 0.05, 0.05, 0.1, 0.1]


def random_boxes(generator: np.random.Generator, count: int) -> np.ndarray:
    """Return boxes (count, 4) of various sizes in the format (left, top, right, bottom)."""
    corners, sides = generator.uniform(0, 300, (count, 2)), np.exp(generator.uniform(2, 5.5, (count, 2)))
    return np.concatenate([corners, corners + sides], axis=1)


def detection_image(number: int) -> Image:
    """Return detections and random target boxes. Some detections are shifted, and some are false positives.

    Image 1 has no objects, image 2 has no detections, and image 3 has no objects and no detections.
    """
    generator = np.random.default_rng(number)
    boxes = random_boxes(generator, 0 if number in (1, 3) else generator.integers(1, 9))
    labels = generator.integers(0, 3, len(boxes))
    found = np.concatenate([boxes + generator.normal(0, 3, boxes.shape)] * 2 + [random_boxes(generator, 4)])
    found_labels = np.concatenate([labels, labels, generator.integers(0, 3, 4)])
    found = np.concatenate([found[:, :2], np.maximum(found[:, 2:], found[:, :2] + 1)], axis=1)
    kept = generator.random(len(found)) < (0 if number in (2, 3) else 0.8)
    prediction = {
        "boxes": found[kept],
        "class_labels": found_labels[kept],
        "scores": generator.random(kept.sum()).round(1),  # Scores are rounded so that many of them are equal
    }
    areas = np.prod(boxes[:, 2:] - boxes[:, :2], axis=1) * generator.uniform(0.5, 1, len(boxes))
    is_crowd = generator.random(len(boxes)) < 0.15
    return prediction, {"boxes": boxes, "class_labels": labels, "areas": areas, "is_crowd": is_crowd}


def pose(number: int) -> Image:
    """Return a predicted pose and its target, in which some keypoints are not labeled. An image has two objects."""
    generator = np.random.default_rng(number)
    box = random_boxes(generator, 1)[0]
    sides = box[2:] - box[:2]
    points = box[:2] + sides * generator.random((len(KEYPOINTS), 2))
    visibility = generator.integers(0, 3, len(KEYPOINTS)) * (number != 4)  # Object 4 has no labeled keypoints
    error = generator.normal(0, 0.06, points.shape) * sides
    prediction = {"keypoints": points + error, "scores": generator.random(len(KEYPOINTS)).round(1)}
    return prediction, {
        "keypoints": np.concatenate([points, visibility[:, None]], axis=1) * (visibility > 0)[:, None],
        "box": box,
        "area": sides.prod() * generator.uniform(0.4, 1),
        "image_id": 7 * (number // 2),
    }


METRICS: Metrics = {
    "detection": (lambda: DetectionMetric(NAMES), detection_image),
    "keypoints": (lambda: KeypointMetric(KEYPOINTS, OKS_SIGMAS), pose),
}
