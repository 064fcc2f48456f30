"""Test that metrics of boxes and keypoints agree with the COCO evaluator and with values computed by hand."""

import math
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from pycocotools.cocoeval import Params

from hf_vit.data.reading.keypoints import COCO_SIGMAS
from hf_vit.evaluation.detection import DetectionMetric
from hf_vit.evaluation.keypoints import KeypointMetric, default_oks_sigmas

from ..data.errors import expect_error
from ..helpers.dense import NUM_IMAGES
from ..helpers.objects import KEYPOINTS, NAMES, OKS_SIGMAS, detection_image, pose, random_boxes
from .reference import evaluate_coco, score


BOX = [10, 10, 110, 110]
RESULTS = ("precision", "recall")


def target(*boxes: list[float], labels: list[int] | None = None, **values: Any) -> dict[str, Any]:
    return {"boxes": list(boxes), "class_labels": labels or [0] * len(boxes), **values}


def prediction(*scored: tuple[list[float], float], labels: list[int] | None = None) -> dict[str, Any]:
    return target(*(box for box, _ in scored), labels=labels, scores=[value for _, value in scored])


def coco_annotations(objects: dict[str, Any]) -> list[dict[str, Any]]:
    boxes, zeros = objects["boxes"], np.zeros(len(objects["boxes"]))
    sides = boxes[:, 2:] - boxes[:, :2]
    columns = {
        "category_id": map(int, objects["class_labels"]),
        "bbox": np.concatenate([boxes[:, :2], sides], axis=1).tolist(),
        "area": objects.get("areas", np.prod(sides, axis=1)),
        "score": objects.get("scores", zeros),
        "iscrowd": map(int, objects.get("is_crowd", zeros)),
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


@pytest.mark.parametrize("seed", range(6))
def test_scores_are_those_of_pycocotools(seed: int) -> None:
    generator = np.random.default_rng(seed)
    images = [detection_image(100 * seed + number) for number in range(1 + 4 * seed)]
    if seed == 3:  # an image with more than 100 detections per class
        boxes = random_boxes(generator, 240)
        images[0] = {"boxes": boxes, "class_labels": np.arange(240) % 2, "scores": None}, images[0][1]
    # Scores are distinct, because pycocotools orders predictions with equal scores differently.
    for found, _ in images:
        found["scores"] = generator.random(len(found["boxes"]))
    metric = DetectionMetric(NAMES)
    scores = score(metric, *images)
    found, truths = ({number: coco_annotations(pair[i]) for number, pair in enumerate(images)} for i in range(2))
    reference = evaluate_coco("bbox", range(len(NAMES)), truths, found)
    expected = np.where(reference.stats[:9] < 0, np.nan, reference.stats[:9])
    assert list(scores.values()) == pytest.approx(expected.tolist(), abs=1e-12, nan_ok=True)
    precisions, recalls = (np.where(values < 0, np.nan, values) for values in map(reference.eval.get, RESULTS))
    for label, name in enumerate(NAMES):
        precision, recall = precisions[:, :, label, 0, -1], recalls[:, label, 0, -1]
        expected = {"ap": precision.mean(), "ap_50": precision[0].mean(), "ar_100": recall.mean()}
        assert metric.per_class()[name] == pytest.approx(expected, abs=1e-12, nan_ok=True)
    assert list(metric.per_class()) == NAMES


@pytest.mark.parametrize(("invented", "ap_50"), [(0.7, 1), (0.85, (51 + 50 * 2 / 3) / 101), (0.95, 2 / 3)])
def test_average_precision_equals_hand_computed_ones(invented: float, ap_50: float) -> None:
    """Predict an exact box (score 0.9), a shifted box (score 0.8, IoU 76 / 124 = 0.61) and a false positive."""
    truth = target(BOX, [200, 10, 300, 110])
    found = prediction((BOX, 0.9), ([224, 10, 324, 110], 0.8), ([10, 300, 110, 400], invented))
    metric = DetectionMetric(["cell"])
    scores = score(metric, (found, truth))
    ap_75 = 51 / 101 if invented < 0.9 else 51 / 101 / 2  # half of the objects are found, so recall is at most 0.5
    assert scores["map_50"] == pytest.approx(ap_50)
    assert scores["map_75"] == pytest.approx(ap_75)
    assert scores["map"] == scores["map_large"] == pytest.approx((3 * ap_50 + 7 * ap_75) / 10)
    assert scores["mar_100"] == scores["mar_10"] == pytest.approx((3 * 1 + 7 * 0.5) / 10)
    assert scores["mar_1"] == (0.0 if invented > 0.9 else 0.5)
    assert math.isnan(scores["map_small"])
    assert math.isnan(scores["map_medium"])


def test_false_positives_areas_and_crowds_count() -> None:
    images = [(prediction((BOX, 0.5)), target(BOX)), (prediction((BOX, 0.9)), target())]
    assert score(DetectionMetric(["cell"]), *images)["map"] == pytest.approx(1 / 2)
    unseen = (prediction(), target(BOX))
    assert score(DetectionMetric(["cell"]), *images, unseen)["map"] == pytest.approx(51 / 101 / 2)
    for wrong, expected in ((99, 1 / 100), (100, 0)):  # only the 100 detections with the highest scores are evaluated
        found = prediction(*[([300, 300, 400, 400], 0.9)] * wrong, (BOX, 0.5))
        assert score(DetectionMetric(["cell"]), (found, target(BOX)))["map_50"] == pytest.approx(expected)
    # The official evaluator ignores boxes of negative area.
    for turned in ([110, 110, 10, 10], [10, 110, 110, 10]):
        found = prediction((turned, 0.9), (BOX, 0.8))
        assert score(DetectionMetric(["cell"]), (found, target(BOX)))["map"] == pytest.approx(1 / 2)
    # The size range of an object depends on the area in the target if there is one, not on the box.
    for areas, size in (({}, "medium"), ({"areas": [900.0]}, "small")):
        image = prediction(([0, 0, 40, 40], 0.5)), target([0, 0, 40, 40], **areas)
        scores = score(DetectionMetric(["cell"]), image)
        known = {name for name in ("map_small", "map_medium", "map_large") if not math.isnan(scores[name])}
        assert known == {f"map_{size}"}
    truth = target(BOX, [200, 200, 400, 400], is_crowd=[0, 1])
    inside = [([200 + step, 220, 240 + step, 260], 0.95) for step in range(0, 100, 20)]
    found = prediction((BOX, 0.5), *inside)
    assert score(DetectionMetric(["cell"]), (found, truth))["map"] == pytest.approx(1)
    crowd_alone = target([200, 200, 400, 400], is_crowd=[1])
    assert math.isnan(score(DetectionMetric(["cell"]), (found, crowd_alone))["map"])


def test_curves_and_classes_without_objects() -> None:
    metric = DetectionMetric(["cat", "dog"])
    found = prediction((BOX, 0.9), (BOX, 0.8), labels=[0, 1])
    assert score(metric, (found, target(BOX)))["map"] == pytest.approx(1)
    per_class = metric.per_class()
    assert per_class["cat"] == pytest.approx({"ap": 1, "ap_50": 1, "ar_100": 1})
    assert all(math.isnan(value) for value in per_class["dog"].values())
    assert np.isnan(metric.precision_recall()["dog"]).all()
    with pytest.raises(ValueError, match=r"The target has .* outside of the 2 classes \(0 to 1\): 2\."):
        metric.record(prediction(), target(BOX, labels=[2]))
    with pytest.raises(ValueError, match=r"The prediction has 1 boxes, but .* \{'class_labels': 2\}"):
        metric.record(prediction((BOX, 0.5), labels=[0, 1]), target())
    metric = DetectionMetric(NAMES)
    score(metric, *map(detection_image, range(NUM_IMAGES)))
    curves, per_class = metric.precision_recall(), metric.per_class()
    assert list(curves) == NAMES
    for name, curve in list(curves.items())[:3]:
        assert curve.shape == (101,)
        assert (np.diff(curve) <= 0).all()
        assert curve.mean() == pytest.approx(per_class[name]["ap_50"])


# Keypoints of a face in a box of 100 x 64 pixels. The chin is not labeled.
FACE = ["left_eye", "right_eye", "nose", "chin"]
POINTS = np.array([[0.0, 0, 2], [60, 0, 2], [30, 30, 1], [0, 0, 0]])


def found(*moves: tuple[float, float], of: np.ndarray = POINTS, sure: float = 0.5) -> dict[str, Any]:
    """Return predicted keypoints: the points `of`, shifted by `moves` in pixels. All scores are `sure`."""
    moved = of[:, :2] + np.array([*moves, *[(0, 0)] * (len(of) - len(moves))])
    return {"keypoints": moved, "scores": np.full(len(of), sure)}


def truth(of: np.ndarray = POINTS, image_id: int = 1) -> dict[str, Any]:
    return {"keypoints": of, "box": [0, 0, 100, 64], "area": 5000.0, "image_id": image_id}


def coco_annotation(points: np.ndarray, target: dict[str, Any], sure: float = 0) -> dict[str, Any]:
    left, top, right, bottom = target["box"]
    return {
        "category_id": 1, "keypoints": points.flatten().tolist(), "num_keypoints": (points[:, 2] > 0).sum(),
        "bbox": [left, top, right - left, bottom - top], "area": target["area"], "score": sure
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(0, 12, 2))
def test_oks_scores_are_those_of_pycocotools(seed: int) -> None:
    generator = np.random.default_rng(seed)
    objects = [pose(100 * seed + number) for number in range(60)]
    for prediction, target in objects:
        prediction["scores"] = generator.random(len(KEYPOINTS))
        # Images have up to 60 predicted objects. The metric evaluates 20 of them.
        target["image_id"] = int(generator.integers(0, 1 + 3 * seed))
        target["keypoints"] *= generator.random() < 0.9
    metric = KeypointMetric(KEYPOINTS, OKS_SIGMAS)
    scores = score(metric, *objects)
    # Objects are sorted in the same way as in the metric, because the order decides between equally good matches.
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
    # If each labeled keypoint is shifted by this length, the object keypoint similarity (OKS) is 0.82.
    off = math.sqrt(-math.log(0.82) * 8 * sigma**2 * area)
    moved = found((off, 0), (0, off), (-off, 0), (999, 999))
    scores = score(KeypointMetric(FACE, [sigma] * 4), (moved, truth()))
    assert scores["oks_ap"] == pytest.approx(7 / 10)
    assert scores["oks_ap_50"] == scores["oks_ap_75"] == pytest.approx(1)
    # The score of a pose is the mean score of its keypoints.
    for sure, oks_ap in ((0.4, 0.5 * 51 / 101), (0.6, 51 / 101)):
        right, wrong = found(sure=sure), found(*[(999, 999)] * 4)
        scores = score(KeypointMetric(FACE), (right, truth()), (wrong, truth(image_id=2)))
        assert scores["oks_ap"] == pytest.approx(oks_ap)
    # The OKS metric may match a prediction to any object in its image. Keypoint errors use the object of its own crop.
    other = POINTS + np.array([500, 500, 0])
    for image_ids, oks_ap in (((1, 1), 1), ((1, 2), 0)):
        swapped = [(found(of=other), truth(image_id=image_ids[0])), (found(), truth(other, image_ids[1]))]
        scores = score(KeypointMetric(FACE), *swapped)
        assert scores["oks_ap"] == pytest.approx(oks_ap)
        assert scores["pck"] == 0


def test_sigmas_of_people_equal_coco_and_invalid_sigmas_raise() -> None:
    assert list(COCO_SIGMAS.values()) == pytest.approx(Params("keypoints").kpt_oks_sigmas.tolist())
    assert default_oks_sigmas(list(COCO_SIGMAS)[::-1]) == list(COCO_SIGMAS.values())[::-1]
    assert default_oks_sigmas(["nose", "tail"]) == [0.05, 0.05]
    expect_error(r"oks_sigmas=\[0.1, 0.2\] must be 4 positive numbers", KeypointMetric, FACE, [0.1, 0.2])
    expect_error("pck_threshold=0 must be positive", KeypointMetric, FACE, pck_threshold=0)
    with pytest.raises(ValueError, match=r"normalize has the unknown keypoint 'ear'\. Choose two of left_eye"):
        KeypointMetric(FACE, normalize=("nose", "ear"))
    with pytest.raises(ValueError, match=r"predicted keypoints have the shape \(3, 2\)\. .* must be \(4, 2\)"):
        KeypointMetric(FACE).record(found(of=POINTS[:3]), truth())


def test_keypoint_scores_equal_hand_computed_ones() -> None:
    metric = KeypointMetric(FACE)
    # The labeled keypoints span 60 pixels, so PCK accepts errors up to 12 pixels. NME divides errors by
    # 80 pixels, the square root of the box area.
    scores = score(metric, (found((12, 0), (0, 13), (3, 4), (99, 99)), truth()))
    assert scores["pck"] == pytest.approx(2 / 3)
    assert scores["nme"] == pytest.approx((12 + 13 + 5) / 3 / 80)
    keypoints = metric.per_class()
    assert keypoints["left_eye"] == pytest.approx({"pck": 1, "nme": 12 / 80})
    assert keypoints["right_eye"] == pytest.approx({"pck": 0, "nme": 13 / 80})
    assert all(math.isnan(value) for value in keypoints["chin"].values())
    # Errors can be normalized by the distance between two keypoints.
    moves = (12, 0), (0, 13), (3, 4)
    metric = KeypointMetric(FACE, pck_threshold=0.1, normalize=("left_eye", "nose"))
    length = math.hypot(30, 30)  # a PCK threshold of 0.1 accepts errors up to 4.2 pixels
    eyes_alone = POINTS * [[1], [1], [0], [0]]
    scores = score(metric, (found(*moves), truth()), (found((50, 50), of=eyes_alone), truth(eyes_alone)))
    assert scores["pck"] == 0
    # The second object is excluded from NME, because its nose is not labeled.
    assert scores["nme"] == pytest.approx((12 + 13 + 5) / 3 / length)
    # All labeled keypoints have the same weight in PCK. Objects without a normalization length are excluded.
    one_off = found((15, 0))
    scores = score(KeypointMetric(FACE), (one_off, truth()), (found(of=eyes_alone), truth(eyes_alone)))
    assert scores["pck"] == pytest.approx(4 / 5)
    assert scores["nme"] == pytest.approx(15 / 80 / 5)
    nose_alone, nothing = POINTS * [[0], [0], [1], [0]], POINTS * 0
    scores = score(KeypointMetric(FACE), (found((8, 0), of=nothing), truth(nothing)))
    assert all(math.isnan(value) for value in scores.values())
    scores = score(KeypointMetric(FACE), (found((0, 0), (0, 0), (8, 0), of=nose_alone), truth(nose_alone)))
    assert math.isnan(scores["pck"])
    assert scores["nme"] == pytest.approx(8 / 80)
