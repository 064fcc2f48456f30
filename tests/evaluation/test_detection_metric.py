"""Box metrics match the COCO evaluator and known values for any order and number of processes."""

import json
import math
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from hf_vit.evaluation.base import StreamedMetric
from hf_vit.evaluation.detection import DetectionMetric

from ..helpers import distributed
from ..helpers.dense import NUM_IMAGES, scores_of_processes
from ..helpers.objects import METRICS, NAMES, detection_image, random_boxes


BOX = [10, 10, 110, 110]


def score(metric: StreamedMetric, *images: tuple[Any, Any]) -> dict[str, float]:
    metric.update([metric.record(*image) for image in images])
    return metric.compute()


def target(*boxes: list[float], labels: list[int] | None = None, **values: Any) -> dict[str, Any]:
    return {"boxes": list(boxes), "class_labels": labels or [0] * len(boxes), **values}


def prediction(*scored: tuple[list[float], float], labels: list[int] | None = None) -> dict[str, Any]:
    return target(*(box for box, _ in scored), labels=labels, scores=[value for _, value in scored])


@pytest.mark.parametrize("name", METRICS)
def test_neither_batches_nor_order_change_a_score(name: str) -> None:
    make_metric, image = METRICS[name]
    metric = make_metric()
    records = [metric.record(*image(number)) for number in range(NUM_IMAGES)]
    metric.update(records)
    expected = metric.compute()
    assert all(0 < value < 1 for value in expected.values())
    for seed in range(5):
        shuffled = random.Random(seed).sample(records, NUM_IMAGES)
        metric.reset()
        for start in range(0, NUM_IMAGES, seed + 2):
            metric.update(pickle.loads(pickle.dumps(shuffled[start : start + seed + 2])))
        assert metric.compute() == expected


def test_two_processes_score_as_one(tmp_path: Path) -> None:
    distributed.finish(distributed.start("score_predictions", tmp_path, "objects", processes=2), tmp_path)
    alone = {
        name: score(make_metric(), *map(image, range(NUM_IMAGES))) for name, (make_metric, image) in METRICS.items()
    }
    assert scores_of_processes(METRICS, batch_size=4) == alone
    for rank in range(2):
        assert json.loads((tmp_path / f"process_{rank}.json").read_text()) == alone


@pytest.mark.parametrize("name", METRICS)
def test_without_images_scores_are_nan_and_nothing_is_printed(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    metric = METRICS[name][0]()
    scores = metric.compute()
    assert tuple(scores) == metric.score_names
    assert all(math.isnan(value) for value in scores.values())
    assert all(math.isnan(value) for values in metric.per_class().values() for value in values.values())
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", METRICS)
def test_tensors_score_as_arrays(name: str) -> None:
    def as_tensors(values: dict[str, Any]) -> dict[str, Any]:
        tensors = {key: torch.as_tensor(value) for key, value in values.items()}
        return {key: value.requires_grad_() if value.is_floating_point() else value for key, value in tensors.items()}

    make_metric, image = METRICS[name]
    tensors = [tuple(map(as_tensors, image(number))) for number in (0, 5)]
    assert str(score(make_metric(), *tensors)) == str(score(make_metric(), image(0), image(5)))


@pytest.mark.parametrize("name", METRICS)
def test_predictions_that_are_not_finite_are_refused(name: str) -> None:
    make_metric, image = METRICS[name]
    found, truth = image(0)
    for key in set(found) - {"class_labels"}:
        with pytest.raises(ValueError, match=f"predicted {key} are not finite .* Training may have diverged"):
            make_metric().record({**found, key: found[key] * math.nan}, truth)


def coco_reference(images: list[tuple[Any, Any]]) -> COCOeval:
    """Return the scores of the official evaluator."""
    datasets = [COCO(), COCO()]
    for part, dataset in zip((1, 0), datasets, strict=True):
        annotations = [
            {
                "image_id": number,
                "category_id": int(image[part]["class_labels"][i]),
                "bbox": [*box[:2], *(box[2:] - box[:2])],
                "area": image[part]["areas"][i] if part else np.prod(box[2:] - box[:2]),
                "score": 0 if part else image[part]["scores"][i],
                "iscrowd": int(image[part]["is_crowd"][i]) if part else 0,
            }
            for number, image in enumerate(images)
            for i, box in enumerate(image[part]["boxes"])
        ]
        dataset.dataset = {
            "images": [{"id": number} for number in range(len(images))],
            "categories": [{"id": label} for label in range(len(NAMES))],
            "annotations": [{"id": number, **entry} for number, entry in enumerate(annotations, start=1)],
        }
        dataset.createIndex()
    evaluator = COCOeval(*datasets, "bbox")
    evaluator.evaluate()
    evaluator.accumulate()
    evaluator.summarize()
    return evaluator


@pytest.mark.parametrize("seed", range(12))
def test_scores_are_those_of_pycocotools(seed: int) -> None:
    generator = np.random.default_rng(seed)
    images = [detection_image(100 * seed + number) for number in range(1 + 2 * seed)]
    if seed == 3:  # more detections per class than are evaluated
        boxes = random_boxes(generator, 240)
        images[0] = {"boxes": boxes, "class_labels": np.arange(240) % 2, "scores": None}, images[0][1]
    for found, _ in images:  # ties are ordered by image, and the evaluators order images differently
        found["scores"] = generator.random(len(found["boxes"]))
    metric = DetectionMetric(NAMES)
    scores = score(metric, *images)
    reference = coco_reference(images)
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
    """One correct box (score 0.9), one inaccurate box (0.8, IoU 76 / 124 = 0.61), and one false positive."""
    truth = target(BOX, [200, 10, 300, 110])
    found = prediction((BOX, 0.9), ([224, 10, 324, 110], 0.8), ([10, 300, 110, 400], invented))
    metric = DetectionMetric(["cell"])
    scores = score(metric, (found, truth))
    ap_75 = 51 / 101 if invented < 0.9 else 51 / 101 / 2  # recalls of 0 to 0.5 are reached
    assert scores["map_50"] == pytest.approx(ap_50)
    assert scores["map_75"] == pytest.approx(ap_75)
    assert scores["map"] == scores["map_large"] == pytest.approx((3 * ap_50 + 7 * ap_75) / 10)
    assert scores["mar_100"] == scores["mar_10"] == pytest.approx((3 * 1 + 7 * 0.5) / 10)
    assert scores["mar_1"] == (0.0 if invented > 0.9 else 0.5)
    assert math.isnan(scores["map_small"])
    assert math.isnan(scores["map_medium"])


def test_what_is_invented_in_an_image_without_objects_counts() -> None:
    images = [(prediction((BOX, 0.5)), target(BOX)), (prediction((BOX, 0.9)), target())]
    assert score(DetectionMetric(["cell"]), *images)["map"] == pytest.approx(1 / 2)
    unseen = (prediction(), target(BOX))
    assert score(DetectionMetric(["cell"]), *images, unseen)["map"] == pytest.approx(51 / 101 / 2)


@pytest.mark.parametrize(("wrong", "expected"), [(99, 1 / 100), (100, 0)])
def test_only_the_surest_hundred_detections_count(wrong: int, expected: float) -> None:
    found = prediction(*[([300, 300, 400, 400], 0.9)] * wrong, (BOX, 0.5))
    assert score(DetectionMetric(["cell"]), (found, target(BOX)))["map_50"] == pytest.approx(expected)


def test_detections_in_a_crowd_are_excused() -> None:
    truth = target(BOX, [200, 200, 400, 400], is_crowd=[0, 1])
    inside = [([200 + step, 220, 240 + step, 260], 0.95) for step in range(0, 100, 20)]
    found = prediction((BOX, 0.5), *inside)
    assert score(DetectionMetric(["cell"]), (found, truth))["map"] == pytest.approx(1)
    crowd_alone = target([200, 200, 400, 400], is_crowd=[1])
    assert math.isnan(score(DetectionMetric(["cell"]), (found, crowd_alone))["map"])


def test_the_given_area_says_how_large_an_object_is() -> None:
    box = [0, 0, 40, 40]
    for areas, size in (({}, "medium"), ({"areas": [900.0]}, "small")):
        scores = score(DetectionMetric(["cell"]), (prediction((box, 0.5)), target(box, **areas)))
        known = {name for name in ("map_small", "map_medium", "map_large") if not math.isnan(scores[name])}
        assert known == {f"map_{size}"}


def test_a_class_without_objects_is_nan_and_left_out_of_the_mean() -> None:
    metric = DetectionMetric(["cat", "dog"])
    found = prediction((BOX, 0.9), (BOX, 0.8), labels=[0, 1])
    assert score(metric, (found, target(BOX)))["map"] == pytest.approx(1)
    per_class = metric.per_class()
    assert per_class["cat"] == pytest.approx({"ap": 1, "ap_50": 1, "ar_100": 1})
    assert all(math.isnan(value) for value in per_class["dog"].values())
    assert np.isnan(metric.precision_recall()["dog"]).all()


def test_the_curve_of_a_class_is_its_precision_at_each_recall() -> None:
    metric = DetectionMetric(NAMES)
    score(metric, *map(detection_image, range(NUM_IMAGES)))
    curves, per_class = metric.precision_recall(), metric.per_class()
    assert list(curves) == NAMES
    for name, curve in list(curves.items())[:3]:
        assert curve.shape == (101,)
        assert (np.diff(curve) <= 0).all()
        assert curve.mean() == pytest.approx(per_class[name]["ap_50"])


def test_a_turned_box_is_a_wrong_one() -> None:
    """The official evaluator ignores boxes with a negative area."""
    for turned in ([110, 110, 10, 10], [10, 110, 110, 10]):
        found = prediction((turned, 0.9), (BOX, 0.8))
        assert score(DetectionMetric(["cell"]), (found, target(BOX)))["map"] == pytest.approx(1 / 2)


def test_predictions_and_targets_that_do_not_fit_are_refused() -> None:
    metric = DetectionMetric(["cat", "dog"])
    with pytest.raises(ValueError, match=r"The target has .* outside of the 2 classes \(0 to 1\): 2\."):
        metric.record(prediction(), target(BOX, labels=[2]))
    with pytest.raises(ValueError, match=r"The prediction has 1 boxes, but .* \{'class_labels': 2\}"):
        metric.record(prediction((BOX, 0.5), labels=[0, 1]), target())
