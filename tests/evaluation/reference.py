"""Helper functions that compute scores with our metrics and with the official COCO evaluator."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from hf_vit.evaluation.base import StreamedMetric


Annotations = dict[int, list[dict[str, Any]]]


def score(metric: StreamedMetric, *images: tuple[Any, Any]) -> dict[str, float]:
    """Return the scores of a metric. Each image is given as a pair of prediction and target."""
    metric.update([metric.record(*image) for image in images])
    return metric.compute()


def evaluate_coco(
    kind: str, categories: Iterable[int], targets: Annotations, predictions: Annotations, sigmas: Any = None
) -> COCOeval:
    """Return the official COCO evaluation of predictions, given the annotations of each image."""
    datasets = []
    for images in (targets, predictions):
        dataset = COCO()
        annotations = [{"image_id": number, "iscrowd": 0, **own} for number, image in images.items() for own in image]
        dataset.dataset = {
            "images": [{"id": number, "height": 0, "width": 0} for number in sorted(targets)],
            "categories": [{"id": label} for label in categories],
            "annotations": [{"id": number, **own} for number, own in enumerate(annotations, start=1)],
        }
        dataset.createIndex()
        datasets.append(dataset)
    evaluator = COCOeval(*datasets, kind)
    if sigmas is not None:
        evaluator.params.kpt_oks_sigmas = np.array(sigmas)
    evaluator.evaluate()
    evaluator.accumulate()
    evaluator.summarize()
    return evaluator
