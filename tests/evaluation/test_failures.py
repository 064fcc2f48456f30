"""Test that evaluations name classes without a correct prediction, and objects that are not found."""

from typing import Any

import numpy as np
import torch

from hf_vit.evaluation.base import BaseEvaluator
from hf_vit.evaluation.classification import ClassificationMetric
from hf_vit.evaluation.detection import DetectionMetric
from hf_vit.evaluation.keypoints import KeypointMetric
from hf_vit.evaluation.segmentation import SemanticSegmentationMetric, UniversalMetric
from hf_vit.tasks.image_classification import ClassificationEvaluator
from hf_vit.tasks.keypoint_detection import KeypointEvaluator
from hf_vit.tasks.object_detection import DetectionEvaluator
from hf_vit.tasks.semantic_segmentation import SemanticEvaluator
from hf_vit.tasks.universal_segmentation import UniversalEvaluator


NAMES = ["grass", "cat", "dog"]


def failures(evaluator: BaseEvaluator, pairs: list[tuple[Any, Any]], threshold: float | None = None) -> list[str]:
    """Return the failures of an evaluator, given the prediction and the target of each image."""
    evaluator.threshold = threshold
    evaluator.metric.reset()
    evaluator.metric.update([evaluator.metric.record(prediction, target) for prediction, target in pairs])
    return evaluator.find_failures()


def test_the_recall_of_classes_is_checked() -> None:
    evaluator = ClassificationEvaluator(None, ClassificationMetric([*NAMES, "absent"]))
    right = [(torch.eye(4)[label], label) for label in (0, 1, 2)]
    assert failures(evaluator, right) == []
    wrong = [*right[:2], (torch.eye(4)[1], 2), (torch.eye(4)[0], 2)]
    assert failures(evaluator, wrong) == ["Recall is 0 for 1 of 3 classes: 'dog'."]


def test_the_iou_of_classes_of_pixels_is_checked() -> None:
    evaluator = SemanticEvaluator(None, SemanticSegmentationMetric(NAMES))
    labels = np.array([[0, 0, 1], [2, 2, 255]])
    assert failures(evaluator, [(labels.clip(max=2), labels)]) == []
    assert failures(evaluator, [(labels.clip(max=1), labels)]) == ["IoU is 0 for 1 of 3 classes: 'dog'."]


def segments(masks: list[torch.Tensor], labels: list[int]) -> dict[str, Any]:
    """Return the predictions of universal segmentation for masks without overlaps."""
    ids = torch.full(masks[0].shape, -1)
    classes = torch.zeros(masks[0].shape, dtype=torch.int64)
    for number, (mask, label) in enumerate(zip(masks, labels, strict=True)):
        ids[mask], classes[mask] = number, label
    info = [{"id": number, "label_id": label, "score": 1.0} for number, label in enumerate(labels)]
    instances = {"masks": torch.stack(masks), "class_labels": labels, "scores": [0.9] * len(labels)}
    return {"panoptic": {"segmentation": ids, "segments_info": info}, "semantic": classes, "instance": instances}


def test_the_panoptic_quality_of_classes_and_found_segments_are_checked() -> None:
    evaluator = UniversalEvaluator(None, UniversalMetric(NAMES, [1, 2], can_overlap=False))
    masks = list(torch.eye(4, dtype=torch.bool)[:, None, :].expand(4, 3, 4))  # four columns
    target = {"masks": torch.stack(masks), "class_labels": torch.tensor([0, 1, 2, 2])}
    assert failures(evaluator, [(segments(masks, [0, 1, 2, 2]), target)]) == []
    found = failures(evaluator, [(segments([masks[0], masks[1]], [0, 1]), target)], 0.35)
    assert found == [
        "PQ is 0 for 1 of 3 classes: 'dog'.",
        "Only 1 of 3 objects are found (score threshold 0.35, predictions above it: 1).",
    ]
    # Overlapping masks have no panoptic quality.
    evaluator = UniversalEvaluator(None, UniversalMetric(NAMES, [1, 2], can_overlap=True))
    found = failures(evaluator, [(segments([masks[0], masks[1]], [0, 1]), target)])
    assert found[1] == "Only 1 of 3 objects are found (score threshold 0.5, predictions above it: 1)."
    # Regions that are not countable are no objects.
    evaluator = UniversalEvaluator(None, UniversalMetric(NAMES, [], can_overlap=False))
    assert failures(evaluator, [(segments(masks[:1], [0]), target)]) == ["PQ is 0 for 2 of 3 classes: 'cat', 'dog'."]


def test_the_average_precision_of_classes_and_found_boxes_are_checked() -> None:
    evaluator = DetectionEvaluator(None, DetectionMetric(NAMES[1:]), 10)
    boxes = torch.tensor([[0.0, 0, 10, 10], [20, 20, 30, 30], [40, 40, 60, 60]])
    target = {"boxes": boxes, "class_labels": torch.tensor([0, 0, 1])}
    perfect = {"boxes": boxes, "class_labels": target["class_labels"], "scores": torch.tensor([0.9, 0.8, 0.7])}
    assert failures(evaluator, [(perfect, target)]) == []
    assert failures(evaluator, [(perfect, target)], 0.85) == [
        "Only 1 of 3 objects are found (score threshold 0.85, predictions above it: 1)."
    ]
    cats = {**perfect, "class_labels": torch.tensor([0, 0, 0])}
    assert failures(evaluator, [(cats, target)], 0.1) == ["AP is 0 for 1 of 2 classes: 'dog'."]


def test_the_share_of_correct_keypoints_is_checked() -> None:
    evaluator = KeypointEvaluator(None, KeypointMetric(["nose", "tail"]))
    target = {
        "keypoints": torch.tensor([[10.0, 10, 2], [90, 90, 2]]),
        **{"box": torch.tensor([0.0, 0, 100, 100]), "area": torch.tensor(1e4), "image_id": torch.tensor(0)},
    }
    points = {"keypoints": torch.tensor([[11.0, 10], [20, 20]]), "scores": torch.ones(2)}
    assert failures(evaluator, [(points, target)]) == ["PCK is 0 for 1 of 2 keypoints: 'tail'."]
