"""Test that score thresholds chosen by F1 are robust with few images and independent of the image order."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from hf_vit.evaluation.base import best_threshold
from hf_vit.evaluation.detection import FOLDS, DetectionMetric, Matches, cross_fitted_threshold, find_best_threshold
from hf_vit.evaluation.keypoints import KeypointMetric
from hf_vit.evaluation.segmentation import INSTANCE, PANOPTIC, SEMANTIC, TRIED, TRIED_THRESHOLDS, UniversalMetric


FAR = [200, 200, 220, 220]


def f1(threshold: float, scores: np.ndarray, correct: np.ndarray, count: int) -> float:
    given = scores > threshold
    return 2 * correct[given].sum() / (given.sum() + count)


@pytest.mark.parametrize("seed", range(5))
def test_best_threshold_is_close_to_the_optimum(seed: int) -> None:
    generator = np.random.default_rng(seed)
    correct = np.arange(400) < 120
    # Scores are rounded, so that many of them are equal.
    scores = np.where(correct, generator.beta(3, 6, 400), generator.beta(1, 9, 400)).round(2)
    found = best_threshold(scores, correct, 150)
    assert found is not None
    assert found.quality == pytest.approx(f1(found.value, scores, correct, 150))
    assert found.quality >= 0.99 * max(f1(value, scores, correct, 150) for value in np.linspace(0, 1, 1001)) - 0.01
    order = generator.permutation(400)
    assert best_threshold(scores[order], correct[order], 150) == found


def test_it_lies_between_the_right_scores_and_in_the_middle_of_a_gap() -> None:
    correct = [True, True, False]
    adjacent = [0.5, np.nextafter(np.float32(0.25), np.float32(1)), 0.25]  # the last two are adjacent float32 values
    tiny = [0.00012345, 0.000123449, 0.000123448]
    for scores in ([0.9999, 0.9998, 0.9997], tiny, adjacent, [1.2, 1.1, 0.3], [1.0, 0.9999999, 0.9999998]):
        values = np.array(scores, dtype=np.float32)
        found = best_threshold(values, correct, 2)
        assert found is not None
        assert 0 <= found.value <= 1
        assert (values > found.value).tolist() == (torch.from_numpy(values) > found.value).tolist() == correct
        assert found.quality == 1
    # The threshold lies in the middle of the gap between the scores of correct and wrong predictions.
    assert best_threshold([0.29, 0.25, 0.05, 0.01], [True, True, False, False], 2) == (0.15, 1.0, None, "F1", False)
    assert best_threshold([0.0, -0.1], [True, False], 1) is None
    assert best_threshold([0.9], [False], 3) is None
    assert DetectionMetric(["a"]).best_threshold() is None
    assert UniversalMetric(["a", "b"], [], can_overlap=False).best_threshold() is None
    found = best_threshold([1.3, 1.2, 0.4], [True, False, False], 1)
    assert found is not None
    assert 0.4 < found.value <= 1  # the best threshold, 1.25, is not a probability
    assert found.quality == pytest.approx(2 / 3)
    # The threshold is not simply the score with the highest F1, because this score depends on single objects. The
    # first 40 predictions are correct, half of the next 20 are correct, and all others are wrong.
    scores = np.linspace(0.9, 0.1, 81)
    correct = np.array([True] * 40 + [number % 2 == 0 for number in range(20)] + [False] * 21)
    curve = [f1(value, scores, correct, 55) for value in scores]
    found = best_threshold(scores, correct, 55)
    assert found is not None
    assert found.quality > 0.98 * max(curve)
    # F1 is highest at the end of a plateau. The chosen threshold is above this score.
    assert found.value > scores[int(np.argmax(curve))] + 0.01


def chosen(metric: DetectionMetric) -> Any:
    found = metric.best_threshold()
    assert found is not None
    return found


def shifted(box: list[float], by: float) -> list[float]:
    return [value + by for value in box]


def detections(*found: tuple[list[float], float], label: int = 0) -> dict[str, Any]:
    return {
        "boxes": np.array([box for box, _ in found], dtype=float).reshape(-1, 4),
        "class_labels": np.full(len(found), label),
        "scores": [score for _, score in found],
    }


def truth(*boxes: list[float], label: int = 0, crowds: tuple[bool, ...] = ()) -> dict[str, Any]:
    return {
        "boxes": np.array(boxes, dtype=float).reshape(-1, 4),
        "class_labels": np.full(len(boxes), label),
        "is_crowd": np.array(crowds or [False] * len(boxes)),
    }


def test_a_box_or_mask_is_right_once_and_keypoints_that_are_not_there_stay_away() -> None:
    box, crowd = [10, 10, 30, 30], [100, 100, 180, 180]
    metric = DetectionMetric(["a", "b"])
    found = detections((box, 0.8), (shifted(box, 2), 0.6), (FAR, 0.5), ([110, 110, 120, 120], 0.9))
    wrong = detections((box, 0.7)), truth(box, label=1)
    metric.update([metric.record(found, truth(box, crowd, crowds=(False, True)))])
    # The threshold lies between 0.8 and the score of the duplicate box. Crowd annotations are ignored.
    assert chosen(metric)[:2] == (0.7, 1.0)
    metric.update([metric.record(*wrong)])
    assert chosen(metric).quality == pytest.approx(2 / 3)
    mask = np.zeros((2, 20, 20), dtype=bool)
    mask[0, 2:10, 2:10] = mask[1, 12:18, 12:18] = True
    metric = UniversalMetric(["a"], [0], can_overlap=True)
    prediction = {INSTANCE: {"masks": mask, "class_labels": [0, 0], "scores": [0.3, 0.1]}}
    metric.update([metric.record(prediction, {"masks": mask[:1], "class_labels": np.array([0])})])
    assert metric.best_threshold() == (0.2, 1.0, None, "F1", False)
    metric, points = KeypointMetric(["a", "b", "c"]), np.array([[10.0, 10], [60, 10], [10, 60]])

    def record(visibility: list[int], scores: list[float]) -> Any:
        target = {"keypoints": np.column_stack([points, visibility]), "box": [0, 0, 70, 70], "area": 4900}
        target["image_id"] = 1
        return metric.record({"keypoints": points + 3, "scores": scores}, target)

    metric.update([record([2, 1, 0], [0.5, 0.4, 0.1])] * 4)
    assert chosen(metric)[:2] == (0.25, 1.0)
    metric.reset()
    metric.update([record([2, 2, 2], [0.5, 0.4, 0.1])] * 4)
    assert metric.best_threshold() is None  # all predictions are correct, so no threshold is needed


def test_repeated_boxes_are_left_out_where_that_helps() -> None:
    metric, box = DetectionMetric(["a"]), [10, 10, 40, 40]
    records = []
    for i in range(9):
        found = detections((shifted(box, i), 0.9 - 0.01 * i), (shifted(box, i + 2), 0.895 - 0.01 * i))
        records.append(metric.record(found, truth(shifted(box, i))))
    for _ in range(2):
        metric.reset()
        metric.update(random.sample(records, len(records)))
        found = chosen(metric)
        assert (found.nms, found.quality) == (0.7, 1.0)
    # The ground truth contains two overlapping objects.
    near = [(detections((box, 0.9), (shifted(box, 3), 0.8)), truth(box, shifted(box, 3)))] * 3
    metric.reset()
    metric.update([metric.record(*image) for image in near])
    found = chosen(metric)
    assert (found.nms, found.quality) == (None, 1.0)


@pytest.mark.parametrize("count", [9, 120])  # cross-fitting is used for 9 images, but not for 120
def test_several_classes_on_an_object_are_reduced_to_one(count: int) -> None:
    metric, box = DetectionMetric(["a", "b"]), [10, 10, 40, 40]
    for index in range(count):
        right = detections((box, 0.9 - 0.001 * index))
        wrong = detections((shifted(box, 1), 0.89 - 0.001 * index), label=1)
        both = {name: np.concatenate([right[name], wrong[name]]) for name in right}
        metric.update([metric.record(both, truth(box))])
    found = chosen(metric)
    assert (found.nms, found.is_class_agnostic) == (0.7, True)
    # The chosen threshold may be slightly worse, because it lies in the middle of several nearly equal thresholds.
    assert found.quality == pytest.approx(1.0, abs=0.01)
    assert found.measure == ("F1" if count == 120 else "cross-fitted F1")


def test_few_images_report_a_cross_fitted_score() -> None:
    generator = np.random.default_rng(0)
    drawn = [[(score, bool(score > generator.random())) for score in generator.random(4)] for _ in range(10)]
    images = [Matches(pairs, 3) for pairs in drawn]
    found, values, right, given = cross_fitted_threshold(images), [], 0, 0
    for fold in range(FOLDS):
        others = [pair for number, image in enumerate(images) if number % FOLDS != fold for pair in image.found]
        best = best_threshold(*zip(*others, strict=True), 24)
        own = [pair for image in images[fold::FOLDS] for pair in image.found]
        answers = [is_right for score, is_right in own if score > best.value]
        values, right, given = [*values, best.value], right + sum(answers), given + len(answers)
    assert found is not None
    assert found.value == pytest.approx(np.mean(values), rel=5e-3)
    assert found.quality == 2 * right / (given + 30)
    assert found.quality < find_best_threshold(images).quality


@pytest.mark.parametrize(("right", "expected"), [((0.2, 0.35), 0.35), ((0.2, 0.5), 0.5), ((), None)])
def test_segments_choose_by_their_quality(right: tuple[float, ...], expected: float | None) -> None:
    mask = np.zeros((1, 20, 20), dtype=bool)
    mask[0, 2:10, 2:10] = True
    metric = UniversalMetric(["a"], [0], can_overlap=False)

    def segments(threshold: float) -> dict[str, Any]:
        info = [{"id": 1, "label_id": 0, "score": 0.9}]
        noise = np.eye(20, dtype=int) * (threshold == 0.2)  # pixels of a false positive segment
        info += [{"id": 2, "label_id": 0, "score": 0.3}] if noise.any() else []
        if threshold not in right:
            return {"segmentation": np.zeros((20, 20), dtype=int), "segments_info": []}
        return {"segmentation": np.where(mask[0], 1, 2 * noise), "segments_info": info}

    prediction = {
        PANOPTIC: segments(0.5),
        SEMANTIC: np.zeros((20, 20), dtype=int),
        INSTANCE: {"masks": mask, "class_labels": [0], "scores": [0.3]},
        TRIED: {threshold: segments(threshold) for threshold in TRIED_THRESHOLDS},
    }
    masks = torch.from_numpy(np.concatenate([mask, ~mask]))
    metric.update([metric.record(prediction, {"masks": masks, "class_labels": torch.zeros(2, dtype=torch.long)})])
    found = metric.best_threshold()
    assert (found and (found.value, found.measure)) == (expected and (expected, "PQ"))
    metric.reset()
    assert metric.best_threshold() is None
