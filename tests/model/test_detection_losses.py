"""Matching and losses of object detection, compared with other implementations and values computed by hand."""

import math
from collections.abc import Sequence
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision import ops
from transformers.image_transforms import center_to_corners_format
from transformers.loss.loss_for_object_detection import ForObjectDetectionLoss
from transformers.loss.loss_lw_detr import LwDetrForObjectDetectionLoss

from hf_vit.model.deformable_decoder import DetectionPrediction
from hf_vit.model.task_configurations import HfViTDetectionConfig
from hf_vit.model.task_object_detection import (
    box_overlaps,
    check_labels,
    count_divisors,
    detection_loss,
    match_objects,
    prediction_losses,
)

from ..helpers.models import boxes


COUNTS = (3, 0, 1, 5)
NUM_CLASSES, NUM_QUERIES = 4, 6
LOSSES = ("cross_entropy", "iou_aware")
DIVISORS = torch.tensor([4.0, 9.0])  # for the class loss and the box losses
all_losses = pytest.mark.parametrize("class_loss", LOSSES)


def options(class_loss: str, **more: Any) -> HfViTDetectionConfig:
    return HfViTDetectionConfig(decoder="queries", class_loss=class_loss, **more)


def predict(
    generator: torch.Generator, class_loss: str, num_queries: int = NUM_QUERIES, batch: int = len(COUNTS)
) -> DetectionPrediction:
    num_outputs = NUM_CLASSES + (class_loss == "cross_entropy")
    logits = torch.randn(batch, num_queries, num_outputs, generator=generator)
    found = torch.stack([boxes(generator, num_queries) for _ in range(batch)])
    return DetectionPrediction(*(values.double().requires_grad_() for values in (logits, found)))


def draw_labels(generator: torch.Generator, counts: Sequence[int] = COUNTS) -> list[dict[str, Tensor]]:
    return [
        {
            "class_labels": torch.randint(NUM_CLASSES, (count,), generator=generator),
            "boxes": boxes(generator, count).double(),
        }
        for count in counts
    ]


def draw(class_loss: str, num_queries: int = NUM_QUERIES) -> tuple[DetectionPrediction, list[dict[str, Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    return predict(generator, class_loss, num_queries), draw_labels(generator)


def test_overlaps_equal_those_of_torchvision() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = (center_to_corners_format(boxes(generator, count).double()) for count in (7, 5))
    iou, generalized = box_overlaps(first[:, None], second[None])
    torch.testing.assert_close(iou, ops.box_iou(first, second), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(generalized, ops.generalized_box_iou(first, second), rtol=1e-12, atol=1e-12)


def test_overlaps_by_hand() -> None:
    # Two 2 x 2 squares shifted by (1, 1): intersection 1, union 7, enclosing box 9. Then two disjoint squares,
    # enclosing box 8 x 2.
    square = torch.tensor([0.0, 0, 2, 2])
    iou, generalized = box_overlaps(square, torch.tensor([[1.0, 1, 3, 3], [6, 0, 8, 2]]))
    torch.testing.assert_close(iou, torch.tensor([1 / 7, 0]))
    torch.testing.assert_close(generalized, torch.tensor([1 / 7 - 2 / 9, -0.5]))


def test_boxes_without_area_give_finite_losses_and_gradients() -> None:
    points = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.2, 0.3, 0.0, 0.4]], requires_grad=True)
    _, generalized = box_overlaps(center_to_corners_format(points), center_to_corners_format(points.detach()))
    generalized.sum().backward()
    assert generalized.isfinite().all()
    assert points.grad is not None
    assert points.grad.isfinite().all()


def test_a_box_that_is_far_off_leaves_the_loss_of_the_others() -> None:
    prediction, labels = draw("iou_aware")
    far = prediction.boxes.detach().clone()
    far[0, 0] = math.inf
    sums = prediction_losses(prediction.logits, far, labels, options("iou_aware"))
    assert torch.stack(sums).isfinite().all()


@all_losses
def test_matching_is_the_cheapest_of_all(class_loss: str) -> None:
    prediction, labels = draw(class_loss)
    for logits, found, target in zip(*prediction, labels, strict=True):
        classes, truth = target["class_labels"], target["boxes"]
        queries, objects = match_objects(logits, found, classes, truth, options(class_loss))
        assert sorted(objects.tolist()) == list(range(len(classes)))

        def total(chosen: tuple[int, ...], pairs: Any = (logits, found, classes, truth)) -> float:
            return sum(cost(class_loss, *pairs, query, number) for number, query in enumerate(chosen))

        best = min(map(total, permutations(range(NUM_QUERIES), len(classes))))
        chosen = [queries[objects == number].item() for number in range(len(classes))]
        assert math.isclose(total(tuple(chosen)), best, rel_tol=1e-9)


def cost(
    class_loss: str, logits: Tensor, found: Tensor, classes: Tensor, truth: Tensor, query: int, number: int
) -> float:
    """Return the matching cost of one pair.

    The classification cost is that of DETR with softmax, otherwise that of Deformable DETR (the difference of two
    focal losses).
    """
    label = int(classes[number])
    if class_loss == "cross_entropy":
        of_class = -float(logits[query].softmax(0)[label])
    else:
        p = float(logits[query, label].sigmoid())
        of_class = 2 * (0.25 * (1 - p) ** 2 * -math.log(p + 1e-8) - 0.75 * p**2 * -math.log(1 - p + 1e-8))
    distance = float((found[query] - truth[number]).abs().sum())
    corners = center_to_corners_format(torch.stack((found[query], truth[number])))
    return of_class + 5 * distance - 2 * float(ops.generalized_box_iou(corners[:1], corners[1:]))


@pytest.mark.parametrize("counts", [COUNTS, (1, 1), (3, 3), (7, 7), (20, 20), (0, 20), (25, 2)], ids=str)
def test_equals_the_loss_of_detr(counts: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    prediction = predict(generator, "cross_entropy", 20, len(counts))
    labels = draw_labels(generator, counts)
    config = SimpleNamespace(
        class_cost=1,
        bbox_cost=5,
        giou_cost=2,
        num_labels=NUM_CLASSES,
        eos_coefficient=0.1,
        auxiliary_loss=False,
        bbox_loss_coefficient=5,
        giou_loss_coefficient=2,
    )
    total, expected, _ = ForObjectDetectionLoss(
        prediction.logits.float(), [as_float(target) for target in labels], "cpu", prediction.boxes.float(), config
    )
    own = options("cross_entropy", num_queries=20)
    loss, parts = detection_loss([prediction], labels, own, count_divisors(labels, own))
    for name, part in parts.items():
        torch.testing.assert_close(part.float(), expected[name].detach())
    torch.testing.assert_close(loss.float(), total)
    theirs, ours = (torch.autograd.grad(value, list(prediction)) for value in (total, loss))
    for a, e in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-7)  # the reference computes in float32


def as_float(target: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"class_labels": target["class_labels"], "boxes": target["boxes"].float()}


def test_equals_the_loss_of_lw_detr_with_groups_and_layers() -> None:
    num_groups = 3
    generator = torch.Generator().manual_seed(1)
    layers = [predict(generator, "iou_aware", num_groups * NUM_QUERIES) for _ in range(3)]
    labels = draw_labels(generator)
    config = SimpleNamespace(
        class_cost=2,
        bbox_cost=5,
        giou_cost=2,
        num_labels=NUM_CLASSES,
        focal_alpha=0.25,
        group_detr=num_groups,
        auxiliary_loss=True,
        decoder_layers=2,
        class_loss_coefficient=1,
        bbox_loss_coefficient=5,
        giou_loss_coefficient=2,
    )
    encoder, first, last = layers
    expected, _, _ = LwDetrForObjectDetectionLoss(
        last.logits,
        labels,
        "cpu",
        last.boxes,
        config,
        torch.stack((first.logits, last.logits)),
        torch.stack((first.boxes, last.boxes)),
        encoder.logits,
        encoder.boxes,
    )
    actual, parts = detection_loss(
        layers, labels, options("iou_aware"), count_divisors(labels, options("iou_aware")), num_groups
    )
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)  # the reference matches boxes in float32
    assert set(parts) == {f"{name}{at}" for name in ("loss_ce", "loss_bbox", "loss_giou") for at in ("", "_0", "_1")}
    leaves = [values for layer in layers for values in layer]
    theirs, ours = torch.autograd.grad(expected, leaves), torch.autograd.grad(actual, leaves)
    for a, e in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-9)


def test_divisors_of_parts_add_up() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = draw_labels(generator)
    for class_loss, own in {"cross_entropy": 9 + 0.1 * 15, "iou_aware": 9.0}.items():
        config = options(class_loss, num_queries=NUM_QUERIES)
        torch.testing.assert_close(count_divisors(labels, config), torch.tensor([own, 9.0], dtype=torch.float64))
        parts = torch.stack([count_divisors([target], config) for target in labels])
        torch.testing.assert_close(parts.sum(dim=0), torch.tensor([own, 9.0], dtype=torch.float64))


@all_losses
def test_the_sum_over_parts_of_a_batch_is_the_loss_of_the_batch(class_loss: str) -> None:
    prediction, labels = draw(class_loss)
    whole, _ = detection_loss([prediction], labels, options(class_loss), DIVISORS)
    parts = []
    for part in (slice(0, 1), slice(1, 2), slice(2, 4)):
        own = DetectionPrediction(*(values[part] for values in prediction))
        parts.append(detection_loss([own], labels[part], options(class_loss), DIVISORS)[0])
    torch.testing.assert_close(torch.stack(parts).sum(), whole, rtol=1e-12, atol=0)


@all_losses
def test_images_without_objects_teach_the_classes_alone(class_loss: str) -> None:
    prediction, labels = draw(class_loss)
    empty = [{name: values[:0] for name, values in target.items()} for target in labels]
    sums = prediction_losses(*prediction, empty, options(class_loss))
    assert float(sums[0]) > 0
    assert [float(value) for value in sums[1:]] == [0, 0]
    gradients = torch.autograd.grad(torch.stack(sums).sum(), list(prediction))
    assert gradients[0].abs().min() > 0
    assert gradients[1].abs().max() == 0


@all_losses
def test_more_objects_than_queries_leave_some_without(class_loss: str) -> None:
    prediction, labels = draw(class_loss, num_queries=2)
    queries, objects = match_objects(
        prediction.logits[3], prediction.boxes[3], labels[3]["class_labels"], labels[3]["boxes"], options(class_loss)
    )
    assert sorted(queries.tolist()) == [0, 1]
    assert len(set(objects.tolist())) == 2
    assert detection_loss([prediction], labels, options(class_loss), DIVISORS)[0].isfinite()


@all_losses
def test_a_right_answer_costs_less_than_any_other(class_loss: str) -> None:
    _, labels = draw(class_loss)
    target = labels[3]
    logits = torch.full((NUM_QUERIES, NUM_CLASSES + (class_loss == "cross_entropy")), -8.0)
    logits[torch.arange(5), target["class_labels"]] = 8.0
    if class_loss == "cross_entropy":
        logits[5, -1] = 8.0
    found = torch.cat((target["boxes"].float(), boxes(torch.Generator().manual_seed(3), 1)))
    right = sum(prediction_losses(logits[None], found[None], [target], options(class_loss)))
    assert float(right) < 0.05
    for change in (logits.flip(1), logits * 0):
        assert float(sum(prediction_losses(change[None], found[None], [target], options(class_loss)))) > 10 * right


def test_bad_labels_are_named() -> None:
    good = {"class_labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.2]])}
    check_labels(2, 3, [good, {"class_labels": torch.zeros(0, dtype=torch.int64), "boxes": torch.zeros(0, 4)}])
    cases: list[tuple[Any, str]] = [
        (torch.zeros(2), "a list with a dictionary for each of the 2 images, not Tensor"),
        ([good], "for each of the 2 images, not 1"),
        ([good, {"boxes": good["boxes"]}], r"labels\[1\] must be a dictionary with class_labels and boxes"),
        ([good, {**good, "boxes": torch.zeros(2, 4)}], r"not \(1,\) and \(2, 4\)"),
        ([good, {**good, "class_labels": torch.tensor([3])}], r"Class 3 in labels\[1\] is out of range"),
        ([{**good, "boxes": torch.tensor([[64.0, 20, 10, 5]])}, good], r"labels\[0\] has the box \[64.0, 20.0"),
    ]
    for labels, message in cases:
        with pytest.raises(ValueError, match=message):
            check_labels(2, 3, labels)
