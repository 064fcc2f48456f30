"""Detection metrics: equal to the COCO evaluator and to known values."""

import math
from typing import Any

import numpy as np
import pytest

from hf_vit.evaluation.detection import DetectionMetric

from ..helpers.dense import NUM_IMAGES
from ..helpers.objects import NAMES, detection_image, random_boxes
from .reference import evaluate_coco, score


BOX = [10, 10, 110, 110]


def target(*boxes: list[float], labels: list[int] | None = None, **values: Any) -> dict[str, Any]:
    return {"boxes": list(boxes), "class_labels": labels or [0] * len(boxes), **values}


def prediction(*scored: tuple[list[float], float], labels: list[int] | None = None) -> dict[str, Any]:
    return target(*(box for box, _ in scored), labels=labels, scores=[value for _, value in scored])


def coco_annotations(objects: dict[str, Any]) -> list[dict[str, Any]]:
    boxes, zeros = objects["boxes"], np.zeros(len(objects["boxes"]))
    areas = objects.get("areas", np.prod(boxes[:, 2:] - boxes[:, :2], axis=1))
    columns = zip(
        objects["class_labels"], areas, objects.get("scores", zeros), objects.get("is_crowd", zeros), strict=True
    )
    return [
        {
            "category_id": int(label),
            "bbox": [*box[:2], *(box[2:] - box[:2])],
            "area": area,
            "score": score,
            "iscrowd": int(is_crowd),
        }
        for box, (label, area, score, is_crowd) in zip(boxes, columns, strict=True)
    ]


@pytest.mark.parametrize("seed", range(6))
def test_scores_are_those_of_pycocotools(seed: int) -> None:
    generator = np.random.default_rng(seed)
    images = [detection_image(100 * seed + number) for number in range(1 + 4 * seed)]
    if seed == 3:  # more detections of a class than the metric considers
        boxes = random_boxes(generator, 240)
        images[0] = {"boxes": boxes, "class_labels": np.arange(240) % 2, "scores": None}, images[0][1]
    # The reference sorts predictions of equal score by another order of images.
    for found, _ in images:
        found["scores"] = generator.random(len(found["boxes"]))
    metric = DetectionMetric(NAMES)
    scores = score(metric, *images)
    found, truths = ({number: coco_annotations(pair[i]) for number, pair in enumerate(images)} for i in range(2))
    reference = evaluate_coco("bbox", range(len(NAMES)), truths, found)
    expected = np.where(reference.stats[:9] < 0, np.nan, reference.stats[:9])
    assert list(scores.values()) == pytest.approx(expected.tolist(), abs=1e-12, nan_ok=True)
    precision, recall = (
        np.where(values < 0, np.nan, values) for values in map(reference.eval.get, ("precision", "recall"))
    )
    assert metric.per_class() == {
        name: pytest.approx(
            {
                "ap": precision[:, :, label, 0, -1].mean(),
                "ap_50": precision[0, :, label, 0, -1].mean(),
                "ar_100": recall[:, label, 0, -1].mean(),
            },
            abs=1e-12,
            nan_ok=True,
        )
        for label, name in enumerate(NAMES)
    }


@pytest.mark.parametrize(("invented", "ap_50"), [(0.7, 1), (0.85, (51 + 50 * 2 / 3) / 101), (0.95, 2 / 3)])
def test_average_precision_equals_hand_computed_ones(invented: float, ap_50: float) -> None:
    """One box is exact (score 0.9), one is shifted (0.8; IoU 76 / 124 = 0.61), and one is a false positive."""
    truth = target(BOX, [200, 10, 300, 110])
    found = prediction((BOX, 0.9), ([224, 10, 324, 110], 0.8), ([10, 300, 110, 400], invented))
    metric = DetectionMetric(["cell"])
    scores = score(metric, (found, truth))
    ap_75 = 51 / 101 if invented < 0.9 else 51 / 101 / 2  # half of the objects are found, with recalls from 0 to 0.5
    assert scores["map_50"] == pytest.approx(ap_50)
    assert scores["map_75"] == pytest.approx(ap_75)
    assert scores["map"] == scores["map_large"] == pytest.approx((3 * ap_50 + 7 * ap_75) / 10)
    assert scores["mar_100"] == scores["mar_10"] == pytest.approx((3 * 1 + 7 * 0.5) / 10)
    assert scores["mar_1"] == (0.0 if invented > 0.9 else 0.5)
    assert math.isnan(scores["map_small"])
    assert math.isnan(scores["map_medium"])


def test_what_is_invented_counts() -> None:
    metric = lambda: DetectionMetric(["cell"])  # noqa: E731
    images = [(prediction((BOX, 0.5)), target(BOX)), (prediction((BOX, 0.9)), target())]
    assert score(metric(), *images)["map"] == pytest.approx(1 / 2)
    unseen = (prediction(), target(BOX))
    assert score(metric(), *images, unseen)["map"] == pytest.approx(51 / 101 / 2)
    for wrong, expected in ((99, 1 / 100), (100, 0)):  # only the 100 surest detections count
        found = prediction(*[([300, 300, 400, 400], 0.9)] * wrong, (BOX, 0.5))
        assert score(metric(), (found, target(BOX)))["map_50"] == pytest.approx(expected)
    # The official evaluator ignores boxes of negative area.
    for turned in ([110, 110, 10, 10], [10, 110, 110, 10]):
        found = prediction((turned, 0.9), (BOX, 0.8))
        assert score(metric(), (found, target(BOX)))["map"] == pytest.approx(1 / 2)


def test_areas_and_crowds_are_those_of_the_target() -> None:
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
