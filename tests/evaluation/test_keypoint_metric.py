"""Keypoint metrics: equal to the COCO evaluator and to known values."""

import math
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from pycocotools.cocoeval import Params

from hf_vit.data.formats.keypoints import COCO_SIGMAS
from hf_vit.evaluation.keypoints import KeypointMetric, default_oks_sigmas

from ..helpers.objects import KEYPOINTS, OKS_SIGMAS, pose
from .reference import evaluate_coco, score


# A face in a box of 100 x 64 pixels whose chin is not labeled.
FACE = ["left_eye", "right_eye", "nose", "chin"]
POINTS = np.array([[0.0, 0, 2], [60, 0, 2], [30, 30, 1], [0, 0, 0]])


def found(*moves: tuple[float, float], of: np.ndarray = POINTS, sure: float = 0.5) -> dict[str, Any]:
    """Return the points, each shifted by some pixels."""
    moved = of[:, :2] + np.array([*moves, *[(0, 0)] * (len(of) - len(moves))])
    return {"keypoints": moved, "scores": np.full(len(of), sure)}


def truth(of: np.ndarray = POINTS, image_id: int = 1) -> dict[str, Any]:
    return {"keypoints": of, "box": [0, 0, 100, 64], "area": 5000.0, "image_id": image_id}


def coco_annotation(points: np.ndarray, target: dict[str, Any], sure: float = 0) -> dict[str, Any]:
    left, top, right, bottom = target["box"]
    return {
        "category_id": 1,
        "keypoints": points.flatten().tolist(),
        "num_keypoints": (points[:, 2] > 0).sum(),
        "bbox": [left, top, right - left, bottom - top],
        "area": target["area"],
        "score": sure,
    }


@pytest.mark.parametrize("seed", range(0, 12, 2))
def test_oks_scores_are_those_of_pycocotools(seed: int) -> None:
    generator = np.random.default_rng(seed)
    objects = [pose(100 * seed + number) for number in range(60)]
    for prediction, target in objects:
        prediction["scores"] = generator.random(len(KEYPOINTS))
        # Up to 60 objects in one image, of which the metric uses 20.
        target["image_id"] = int(generator.integers(0, 1 + 3 * seed))
        target["keypoints"] *= generator.random() < 0.9
    metric = KeypointMetric(KEYPOINTS, OKS_SIGMAS)
    scores = score(metric, *objects)
    # The order decides which of two equal objects is matched.
    objects.sort(key=lambda one: metric.record(*one)["rank"])
    truths, poses = defaultdict(list), defaultdict(list)
    for prediction, target in objects:
        points, sure = np.insert(prediction["keypoints"], 2, 1, axis=1), prediction["scores"].mean()
        truths[target["image_id"]].append(coco_annotation(target["keypoints"], target))
        poses[target["image_id"]].append(coco_annotation(points, target, sure))
    expected = evaluate_coco("keypoints", [1], truths, poses, OKS_SIGMAS).stats[:3]
    assert list(scores.values())[:3] == pytest.approx(expected.tolist(), abs=1e-12)
    assert 0 < scores["oks_ap"] < scores["oks_ap_50"] < 1


def test_oks_equals_hand_computed_ones() -> None:
    sigma, area = 0.1, 5000
    # Offset of all keypoints for an object keypoint similarity (OKS) of 0.82.
    off = math.sqrt(-math.log(0.82) * 8 * sigma**2 * area)
    moved = found((off, 0), (0, off), (-off, 0), (999, 999))
    scores = score(KeypointMetric(FACE, [sigma] * 4), (moved, truth()))
    assert scores["oks_ap"] == pytest.approx(7 / 10)
    assert scores["oks_ap_50"] == scores["oks_ap_75"] == pytest.approx(1)
    # A pose is as sure as its keypoints are on average.
    for sure, oks_ap in ((0.4, 0.5 * 51 / 101), (0.6, 51 / 101)):
        right, wrong = found(sure=sure), found(*[(999, 999)] * 4)
        scores = score(KeypointMetric(FACE), (right, truth()), (wrong, truth(image_id=2)))
        assert scores["oks_ap"] == pytest.approx(oks_ap)
    # Swapped objects in an image do not change OKS matching, but they change keypoint errors.
    other = POINTS + np.array([500, 500, 0])
    for image_ids, oks_ap in (((1, 1), 1), ((1, 2), 0)):
        swapped = [(found(of=other), truth(image_id=image_ids[0])), (found(), truth(other, image_ids[1]))]
        scores = score(KeypointMetric(FACE), *swapped)
        assert scores["oks_ap"] == pytest.approx(oks_ap)
        assert scores["pck"] == 0


def test_sigmas_of_people_are_those_of_coco_and_what_does_not_fit_is_refused() -> None:
    assert list(COCO_SIGMAS.values()) == pytest.approx(Params("keypoints").kpt_oks_sigmas.tolist())
    assert default_oks_sigmas(list(COCO_SIGMAS)[::-1]) == list(COCO_SIGMAS.values())[::-1]
    assert default_oks_sigmas(["nose", "tail"]) == [0.05, 0.05]
    with pytest.raises(ValueError, match=r"oks_sigmas=\[0.1, 0.2\] must be 4 positive numbers"):
        KeypointMetric(FACE, [0.1, 0.2])
    with pytest.raises(ValueError, match="pck_threshold=0 must be positive"):
        KeypointMetric(FACE, pck_threshold=0)
    with pytest.raises(ValueError, match=r"normalize has the unknown keypoint 'ear'\. Choose two of left_eye"):
        KeypointMetric(FACE, normalize=("nose", "ear"))
    with pytest.raises(ValueError, match=r"predicted keypoints have the shape \(3, 2\) instead of \(4, 2\)"):
        KeypointMetric(FACE).record(found(of=POINTS[:3]), truth())


def test_keypoint_scores_equal_hand_computed_ones() -> None:
    metric = KeypointMetric(FACE)
    # The labeled keypoints are 60 pixels wide, so PCK accepts 12 pixels. The box area has a square root of 80.
    scores = score(metric, (found((12, 0), (0, 13), (3, 4), (99, 99)), truth()))
    assert scores["pck"] == pytest.approx(2 / 3)
    assert scores["nme"] == pytest.approx((12 + 13 + 5) / 3 / 80)
    keypoints = metric.per_class()
    assert keypoints["left_eye"] == pytest.approx({"pck": 1, "nme": 12 / 80})
    assert keypoints["right_eye"] == pytest.approx({"pck": 0, "nme": 13 / 80})
    assert all(math.isnan(value) for value in keypoints["chin"].values())
    # Two keypoints can be the length.
    moves = (12, 0), (0, 13), (3, 4)
    metric = KeypointMetric(FACE, pck_threshold=0.1, normalize=("left_eye", "nose"))
    length = math.hypot(30, 30)  # a threshold of 0.1 then accepts 4.2 pixels
    eyes_alone = POINTS * [[1], [1], [0], [0]]
    scores = score(metric, (found(*moves), truth()), (found((50, 50), of=eyes_alone), truth(eyes_alone)))
    assert scores["pck"] == 0
    assert scores["nme"] == pytest.approx((12 + 13 + 5) / 3 / length)  # the other object has no nose


def test_every_labeled_keypoint_counts_alike_and_objects_without_a_length_do_not() -> None:
    one_off, eyes_alone = found((15, 0)), POINTS * [[1], [1], [0], [0]]
    scores = score(KeypointMetric(FACE), (one_off, truth()), (found(of=eyes_alone), truth(eyes_alone)))
    assert scores["pck"] == pytest.approx(4 / 5)
    assert scores["nme"] == pytest.approx(15 / 80 / 5)
    nose_alone, nothing = POINTS * [[0], [0], [1], [0]], POINTS * 0
    scores = score(KeypointMetric(FACE), (found((8, 0), of=nothing), truth(nothing)))
    assert all(math.isnan(value) for value in scores.values())
    scores = score(KeypointMetric(FACE), (found((0, 0), (0, 0), (8, 0), of=nose_alone), truth(nose_alone)))
    assert math.isnan(scores["pck"])
    assert scores["nme"] == pytest.approx(8 / 80)
