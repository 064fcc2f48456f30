"""Test that metrics of dense predictions agree with reference implementations and with values computed by hand."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from pycocotools import mask as run_lengths
from sklearn.metrics import balanced_accuracy_score
from torchmetrics.detection import PanopticQuality

from hf_vit.evaluation.depth import DepthMetric
from hf_vit.evaluation.detection import InstanceMetric
from hf_vit.evaluation.segmentation import PanopticMetric, SemanticSegmentationMetric

from ..data.errors import expect_error
from ..helpers import dense
from ..helpers.dense import NAMES, NUM_IMAGES, THINGS, masks_of
from .reference import evaluate_coco, score


def test_semantic_scores_are_those_of_torchmetrics_and_scikit_learn() -> None:
    assert len({dense.size(number) for number in range(NUM_IMAGES)}) > 3
    images = [dense.semantic_image(number) for number in range(NUM_IMAGES)]
    scores = score(SemanticSegmentationMetric(NAMES), *images)
    answers, labels = (torch.cat([torch.from_numpy(image[part]).flatten() for image in images]) for part in (0, 1))
    options = {"num_classes": len(NAMES), "ignore_index": 255}
    counted = labels != 255
    expected = {
        "mean_iou": torchmetrics.JaccardIndex("multiclass", **options)(answers, labels),
        "pixel_accuracy": torchmetrics.Accuracy("multiclass", average="micro", **options)(answers, labels),
        "mean_accuracy": balanced_accuracy_score(labels[counted], answers[counted]),
        "mean_dice": torchmetrics.F1Score("multiclass", average="macro", **options)(answers, labels),
    }
    assert scores == pytest.approx({name: float(value) for name, value in expected.items()}, abs=1e-6)


def test_semantic_scores_equal_hand_computed_ones_and_other_classes_are_refused() -> None:
    metric = SemanticSegmentationMetric(["a", "b", "c", "d"])
    target = [[0, 0, 0, 1], [1, 255, 255, 0]]
    prediction = [[0, 0, 1, 1], [1, 3, 0, 2]]
    # Class c occurs only in the prediction. Class d is predicted only in ignored pixels.
    expected = {"mean_iou": (2 / 4 + 2 / 3 + 0) / 3, "pixel_accuracy": 4 / 6, "mean_accuracy": (2 / 4 + 1) / 2}
    expected["mean_dice"] = (4 / 6 + 4 / 5 + 0) / 3
    assert score(metric, (prediction, target)) == pytest.approx(expected)
    scores = metric.per_class()
    assert scores["a"] == pytest.approx({"iou": 1 / 2, "accuracy": 1 / 2, "dice": 2 / 3})
    assert scores["c"] == pytest.approx({"iou": 0, "accuracy": math.nan, "dice": 0}, nan_ok=True)
    assert all(math.isnan(value) for value in scores["d"].values())
    assert metric.confusion_matrix.tolist() == [[2, 1, 1, 0], [0, 2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    metric = SemanticSegmentationMetric(["a", "b"], ignore_index=9)
    with pytest.raises(ValueError, match=r"The target has .* outside of the 2 classes \(0 to 1\): -1, 255\."):
        metric.record([[0, 1, 1, 1]], [[0, 255, -1, 9]])
    expect_error(r"The prediction has .*: 2\.", metric.record, [[2, 3]], [[0, 9]])


def panoptic_reference(images: list[tuple[Any, Any]], num_classes: int) -> dict[int, list[float]]:
    """Return the sum of IoUs and the numbers of true positives, false positives and false negatives of each class."""
    sums: dict[int, list[float]] = {label: [0.0, 0, 0, 0] for label in range(num_classes)}
    for prediction, target in images:
        void = ~target["masks"].any(axis=0)
        found = [(prediction["segmentation"] == info["id"], info["label_id"]) for info in prediction["segments_info"]]
        objects = list(zip(target["masks"], target["class_labels"], target["is_crowd"], strict=True))
        matched_objects, matched = set(), set()
        for i, (target_mask, target_label, is_crowd) in enumerate(objects):
            for j, (mask, label) in enumerate(found):
                union = (target_mask | (mask & ~void)).sum()
                iou = (target_mask & mask).sum() / union
                if label == target_label and not is_crowd and iou > 0.5:
                    matched_objects.add(i)
                    matched.add(j)
                    sums[label][0] += iou
                    sums[label][1] += 1
        for j, (mask, label) in enumerate(found):
            crowds = [m for m, target_label, is_crowd in objects if is_crowd and target_label == label]
            excused = np.logical_or.reduce([void, *crowds])
            sums[label][2] += j not in matched and (mask & excused).sum() / mask.sum() <= 0.5
        for i, (_, target_label, is_crowd) in enumerate(objects):
            sums[target_label][3] += i not in matched_objects and not is_crowd
    return sums


def test_panoptic_scores_are_those_of_the_coco_definition_and_of_torchmetrics() -> None:
    images = [dense.panoptic_image(number) for number in range(NUM_IMAGES)]
    metric = PanopticMetric(NAMES, THINGS)
    scores = score(metric, *images)
    reference = panoptic_reference(images, 4)
    # Each class has true positives, false positives and false negatives.
    assert all(min(sums) > 0 for sums in reference.values())
    quality = {label: iou / (tp + fp / 2 + fn / 2) for label, (iou, tp, fp, fn) in reference.items()}
    expected = {
        "pq": np.mean(list(quality.values())),
        "sq": np.mean([iou / tp for iou, tp, _, _ in reference.values()]),
        "rq": np.mean([tp / (tp + fp / 2 + fn / 2) for _, tp, fp, fn in reference.values()]),
        "pq_things": (quality[2] + quality[3]) / 2,
        "pq_stuff": (quality[0] + quality[1]) / 2,
    }
    assert scores == pytest.approx(expected, abs=1e-12)
    per_class = metric.per_class()
    assert per_class["cat"]["pq"] == pytest.approx(quality[2])
    assert math.isnan(per_class["ghost"]["pq"])
    # If every pixel belongs to a segment, the panoptic scores equal those of torchmetrics.
    pairs, judge = [], PanopticQuality(things={2, 3}, stuffs={0, 1})
    info = [{"id": i, "label_id": i} for i in range(4)]
    for number in range(NUM_IMAGES):
        generator = np.random.default_rng(number)
        target = generator.integers(0, 4, (6, 8)).repeat(16, axis=0).repeat(16, axis=1)
        prediction = np.where(generator.random(target.shape) < 0.2, generator.integers(0, 4, target.shape), target)
        masks = np.stack([target == i for i in range(4)])
        segments = {"segmentation": prediction, "segments_info": info}
        pairs.append((segments, {"masks": masks, "class_labels": range(4)}))
        judge.update(*(torch.from_numpy(np.stack([m, np.zeros_like(m)], -1))[None] for m in (prediction, target)))
    assert score(PanopticMetric(NAMES, THINGS), *pairs)["pq"] == pytest.approx(judge.compute().item(), abs=1e-6)


def test_mostly_void_segments_are_no_false_positives_and_bad_segments_raise() -> None:
    target = {"masks": masks_of([(0, 4, 0, 4)], (4, 10)), "class_labels": [0]}
    segmentation = np.full((4, 10), -1)
    segmentation[:, :4], segmentation[:, 6:] = 0, 1
    info = [{"id": 0, "label_id": 0}, {"id": 1, "label_id": 1}]
    scores = score(PanopticMetric(["a", "b"], []), ({"segmentation": segmentation, "segments_info": info}, target))
    assert scores == pytest.approx({"pq": 1, "sq": 1, "rq": 1, "pq_things": math.nan, "pq_stuff": 1}, nan_ok=True)
    segmentation[:, 6:], segmentation[:, 1:4] = -1, 1
    scores = score(PanopticMetric(["a", "b"], []), ({"segmentation": segmentation, "segments_info": info}, target))
    assert scores["pq"] == 0
    metric = PanopticMetric(["a", "b"], [1])
    masks = masks_of([(0, 2, 0, 2), (1, 3, 1, 3)], (4, 4))
    nothing = {"segmentation": np.zeros((4, 4)), "segments_info": []}
    with pytest.raises(ValueError, match="1 pixels are in several target masks"):
        metric.record(nothing, {"masks": masks, "class_labels": [0, 1]})
    with pytest.raises(ValueError, match=r"ids that are missing from segments_info: \[7\]"):
        metric.record({**nothing, "segmentation": np.full((4, 4), 7)}, {"masks": masks[:0], "class_labels": []})
    expect_error(r"The set of thing_ids has .*: 2\.", PanopticMetric, ["a", "b"], [2])


def coco_annotations(objects: dict[str, Any]) -> list[dict[str, Any]]:
    zeros = np.zeros(len(objects["masks"]))
    columns = {
        "category_id": map(int, objects["class_labels"]),
        "segmentation": [run_lengths.encode(np.asfortranarray(mask, dtype=np.uint8)) for mask in objects["masks"]],
        "area": [mask.sum() for mask in objects["masks"]],
        "score": objects.get("scores", zeros),
        "iscrowd": objects.get("is_crowd", zeros),
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def test_instance_scores_are_those_of_pycocotools() -> None:
    """Compare with pycocotools, because torchmetrics ignores images without objects."""
    images = [dense.instance_image(number) for number in range(NUM_IMAGES)]
    images[0][1]["is_crowd"] = np.array([1, 0, 0, 0, 0])
    # The scores of predictions are distinct, because pycocotools orders equal scores by image.
    for number, (prediction, _) in enumerate(images):
        prediction["scores"] = np.random.default_rng(number).random(len(prediction["scores"]))
    metric = InstanceMetric(NAMES, THINGS)
    scores = score(metric, *images)
    found, truths = ({number: coco_annotations(pair[i]) for number, pair in enumerate(images)} for i in range(2))
    reference = evaluate_coco("segm", THINGS, truths, found)
    assert list(scores.values()) == pytest.approx(reference.stats[[0, 1, 2, 3, 4, 5, 8]].tolist(), abs=1e-12)
    assert all(0 < value <= 1 for value in scores.values())
    per_class = [values["ap"] for values in metric.per_class().values()]
    assert per_class == pytest.approx(reference.eval["precision"][..., 0, -1].mean(axis=(0, 1)).tolist(), abs=1e-12)


def test_instances_of_other_classes_do_not_count() -> None:
    masks = masks_of([(0, 9, 0, 9), (0, 9, 12, 20)], (10, 20))
    target = {"masks": masks, "class_labels": [0, 2]}
    prediction = {"masks": masks, "class_labels": [1, 2], "scores": [0.9, 0.8]}
    metric = InstanceMetric(NAMES, THINGS)
    scores = score(metric, (prediction, target))
    assert scores["mask_ap"] == scores["mask_ap_small"] == scores["mask_ar_100"] == pytest.approx(1)
    assert math.isnan(scores["mask_ap_large"])
    per_class = metric.per_class()
    assert per_class["cat"] == pytest.approx({"ap": 1, "ap_50": 1})
    assert math.isnan(per_class["dog"]["ap"])
    assert "sky" not in per_class
    # The metric caches its scores until it is updated with more images.
    metric = InstanceMetric(NAMES, THINGS)
    first = score(metric, dense.instance_image(0))
    assert metric._evaluate() is metric._evaluate()
    both = score(metric, dense.instance_image(4))
    assert both == score(InstanceMetric(NAMES, THINGS), dense.instance_image(4), dense.instance_image(0)) != first


def fitted_inverse(prediction: np.ndarray, target: np.ndarray) -> np.ndarray:
    system = np.stack([prediction, np.ones_like(prediction)], axis=1)
    inverse = system @ np.linalg.lstsq(system, 1 / target, rcond=None)[0]
    return 1 / np.maximum(inverse, 1 / 10)


def depth_reference(prediction: np.ndarray, target: np.ndarray) -> dict[str, float]:
    """Return the scores of one image, following the evaluation code of BTS."""
    ratio = np.maximum(target / prediction, prediction / target)
    log_error = np.log(prediction) - np.log(target)
    return {
        "abs_rel": np.mean(np.abs(target - prediction) / target),
        "rmse": np.sqrt(((target - prediction) ** 2).mean()),
        "log10": np.mean(np.abs(np.log10(prediction) - np.log10(target))),
        "rmse_log": np.sqrt((log_error**2).mean()),
        "silog": np.sqrt(np.mean(log_error**2) - np.mean(log_error) ** 2) * 100,
        "delta1": (ratio < 1.25).mean(),
        "delta2": (ratio < 1.25**2).mean(),
        "delta3": (ratio < 1.25**3).mean(),
    }


ALIGNED: dict[Any, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    None: lambda prediction, target: prediction,
    "median": lambda prediction, target: prediction * np.median(target) / np.median(prediction),
    "scale_shift": fitted_inverse,
}


@pytest.mark.parametrize("alignment", ALIGNED)
def test_depth_scores_are_the_means_of_images(alignment: Any) -> None:
    images = [dense.depth_image(number) for number in range(NUM_IMAGES)]
    if alignment == "scale_shift":
        images = [(3 / prediction - 0.2, target) for prediction, target in images]
    expected = []
    for prediction, target in images:
        valid = np.isfinite(target) & (target > 1e-3) & (target < 10)
        if valid.any():
            aligned = ALIGNED[alignment](prediction[valid], target[valid])
            expected.append(depth_reference(np.clip(aligned, 1e-3, 10), target[valid]))
    assert len(expected) == NUM_IMAGES - 1
    scores = score(DepthMetric(max_depth=10.0, alignment=alignment), *images)
    assert scores == pytest.approx({name: np.mean([one[name] for one in expected]) for name in scores}, abs=1e-9)


def test_aligned_depth_ignores_scale_and_crops_exclude_the_outside() -> None:
    target = dense.depth_image(0)[1]
    depth = np.where(np.isfinite(target) & (target > 0), target, 1.0)
    assert score(DepthMetric(alignment="median"), (0.01 * depth, target))["abs_rel"] == pytest.approx(0, abs=1e-12)
    inverse = DepthMetric(max_depth=80, alignment="scale_shift")
    assert score(inverse, (7 / depth + 5, target))["delta1"] == 1
    assert score(DepthMetric(), (0.01 * depth, target))["abs_rel"] == pytest.approx(0.99)
    for alignment in ("median", "scale_shift"):  # no scale can be fitted to a constant prediction
        scores = score(DepthMetric(max_depth=80, alignment=alignment), (np.zeros_like(depth), target))
        assert all(math.isfinite(value) for value in scores.values())
    for crop, shape, inside in (
        ("eigen", (480, 640), np.s_[45:471, 41:601]),
        ("eigen", (240, 320), np.s_[22:235, 20:300]),
        ("eigen_kitti", (375, 1242), np.s_[124:342, 44:1197]),
        ("garg", (375, 1242), np.s_[153:371, 44:1197]),
    ):
        target, prediction, edge = np.full(shape, 2.0), np.full(shape, 100.0), np.full(shape, 2.0)
        prediction[inside], edge[inside] = 2.0, 4.0
        assert score(DepthMetric(crop=crop), (prediction, target))["abs_rel"] == 0
        assert score(DepthMetric(crop=crop), (edge, target))["abs_rel"] == 1


def test_depth_options_that_do_not_fit_are_refused() -> None:
    expect_error(r"crop='nyu' is unknown\. Choose None or one of eigen", DepthMetric, crop="nyu")
    expect_error("alignment='mean' is unknown", DepthMetric, alignment="mean")
    expect_error("min_depth=2 must be above 0 and below max_depth=1", DepthMetric, min_depth=2, max_depth=1)
    expect_error("needs max_depth", DepthMetric, alignment="scale_shift")
    expect_error("not finite", DepthMetric().record, [[math.nan]], [[1.0]])
    assert DepthMetric().record([[math.nan]], [[0.0]]) == {}
