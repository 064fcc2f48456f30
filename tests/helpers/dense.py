"""Synthetic dense predictions and targets, for the tests of metrics and visualizations."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from hf_vit.evaluation.base import StreamedMetric
from hf_vit.evaluation.depth import DepthMetric
from hf_vit.evaluation.detection import InstanceMetric
from hf_vit.evaluation.segmentation import PanopticMetric, SemanticSegmentationMetric


NAMES = ["sky", "road", "cat", "dog", "ghost"]  # the class "ghost" occurs in no image
THINGS = [2, 3]
NUM_IMAGES = 11  # not divisible by the batch sizes 2 and 4
Image = tuple[Any, Any]  # a pair of prediction and target


def size(number: int) -> tuple[int, int]:
    return 112 + 8 * (number % 3), 130 + 16 * (number % 4)


def boxes(generator: np.random.Generator, count: int, shape: tuple[int, int]) -> list[tuple[int, int, int, int]]:
    """Returns random rectangles (top, bottom, left, right): some have few pixels, some cover most of the image."""
    sides = [sorted(generator.choice(length + 1, 2, replace=False)) for _ in range(count) for length in shape]
    return [(*sides[2 * i], *sides[2 * i + 1]) for i in range(count)]


def masks_of(rectangles: Iterable[tuple[int, int, int, int]], shape: tuple[int, int]) -> np.ndarray:
    rectangles = list(rectangles)
    masks = np.zeros((len(rectangles), *shape), dtype=bool)
    for mask, (top, bottom, left, right) in zip(masks, rectangles, strict=True):
        mask[top:bottom, left:right] = True
    return masks


def semantic_image(number: int) -> Image:
    generator = np.random.default_rng(number)
    target = generator.choice([0, 1, 2, 3, 255], size(number), p=[0.4, 0.3, 0.1, 0.1, 0.1])
    wrong = generator.random(target.shape) < 0.3
    return np.where(wrong | (target == 255), generator.integers(0, 4, target.shape), target), target


def panoptic_image(number: int) -> Image:
    """Returns a panoptic prediction and target with overlapping boxes. Predicted boxes are slightly shifted."""
    generator = np.random.default_rng(number)
    rectangles = boxes(generator, 6, size(number))
    maps = []
    for move in (0, 9):
        ids = np.zeros(size(number), dtype=int)
        for i, (top, bottom, left, right) in enumerate(rectangles, start=1):
            ids[top : bottom + move, left + move : right] = i
        maps.append(ids)
    target, prediction = maps
    joined = [i for i in range(1, 7) if (target == i).any()]
    found = [i for i in range(1, 7) if (prediction == i).any()]
    info = [{"id": i, "label_id": (i + i // 5) % 4 if number % 2 else i % 4, "score": 0.5} for i in found]
    return {"segmentation": prediction, "segments_info": info}, {
        "masks": np.stack([target == i for i in joined]),
        "class_labels": np.array([i % 4 for i in joined]),
        "is_crowd": np.array([i == 5 for i in joined]),
    }


def instance_image(number: int) -> Image:
    """Returns predicted and target boxes. Predictions are shifted by a few pixels and include a false positive.

    Image 1 has no objects, image 2 has no detections, and image 3 has no objects and no detections.
    """
    generator, shape = np.random.default_rng(number), size(number)
    objects = [] if number in (1, 3) else boxes(generator, 5, shape)
    detections = [(top, bottom, left + 3, right + 3) for top, bottom, left, right in objects]
    detections = [] if number in (2, 3) else [*detections, *boxes(generator, 1, shape)]
    prediction = {
        "masks": masks_of(detections, shape),
        "class_labels": generator.choice(THINGS, len(detections)),
        "scores": generator.random(len(detections)).round(1),  # scores are rounded so that many of them are equal
    }
    return prediction, {"masks": masks_of(objects, shape), "class_labels": np.resize(THINGS, len(objects))}


def depth_image(number: int) -> Image:
    """Returns predicted and true depth of 0.5 to 12 meters. Some pixels are invalid; image 4 has no valid pixels."""
    generator = np.random.default_rng(number)
    target = generator.uniform(0.5, 12, size(number))
    prediction = target * generator.uniform(0.7, 1.5, size(number))
    invalid = generator.choice([0, np.nan, np.inf, -1], size(number))
    valid = (generator.random(size(number)) < 0.8) & (number != 4)
    return prediction, np.where(valid, target, invalid)


Metrics = dict[str, tuple[Callable[[], StreamedMetric], Callable[[int], Image]]]
METRICS: Metrics = {
    "semantic": (lambda: SemanticSegmentationMetric(NAMES), semantic_image),
    "panoptic": (lambda: PanopticMetric(NAMES, THINGS), panoptic_image),
    "instance": (lambda: InstanceMetric(NAMES, THINGS), instance_image),
    "depth": (lambda: DepthMetric(max_depth=10.0), depth_image),
}


def scores_of_processes(metrics: Metrics, batch_size: int) -> dict[str, dict[str, float]]:
    """Returns the scores over all images. Each process adds the predictions of some images to the metrics."""
    accelerator, scores = Accelerator(cpu=True), {}
    for name, (make_metric, image) in metrics.items():
        metric = make_metric()
        loader = torch.utils.data.DataLoader(range(NUM_IMAGES), batch_size=batch_size)
        for batch in accelerator.prepare(loader):
            records = [metric.record(*image(number)) for number in batch.tolist()]
            metric.update(accelerator.gather_for_metrics(records, use_gather_object=True))
        scores[name] = metric.compute()
    return scores
