"""The official evaluator of COCO, and the scores of a metric."""

from typing import Any

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from hf_vit.evaluation.base import StreamedMetric


def score(metric: StreamedMetric, *images: tuple[Any, Any]) -> dict[str, float]:
    """Return the scores of predictions and their targets."""
    metric.update([metric.record(*image) for image in images])
    return metric.compute()


def evaluate_coco(
    kind: str, targets: list[dict[str, Any]], predictions: list[dict[str, Any]], sigmas: list[float] | None = None
) -> COCOeval:
    """Return the evaluation of annotations, each with its `image_id`."""
    datasets = []
    for annotations in (targets, predictions):
        dataset = COCO()
        dataset.dataset = {
            "images": [{"id": number, "height": 0, "width": 0} for number in {own["image_id"] for own in targets}],
            "categories": [{"id": number} for number in {own["category_id"] for own in [*targets, *predictions]}],
            "annotations": [{"id": number, "iscrowd": 0, **own} for number, own in enumerate(annotations, start=1)],
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
