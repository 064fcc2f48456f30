"""Test that matching and losses of object detection agree with other implementations and hand-computed values."""

import math
from collections.abc import Sequence
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
    detection_loss,
    loss_normalizers,
    match_objects,
    prediction_losses,
)

from ..helpers.models import boxes


COUNTS = (3, 0, 1, 5)
NUM_CLASSES, NUM_QUERIES = 4, 6
LOSSES = ("cross_entropy", "iou_aware")
DIVISORS = torch.tensor([4.0, 9.0])  # normalizers of the classification loss and of the box losses
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
    labels = []
    for count in counts:
        classes = torch.randint(NUM_CLASSES, (count,), generator=generator)
        labels.append({"class_labels": classes, "boxes": boxes(generator, count).double()})
    return labels


def draw(class_loss: str, num_queries: int = NUM_QUERIES) -> tuple[DetectionPrediction, list[dict[str, Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    return predict(generator, class_loss, num_queries), draw_labels(generator)


def test_overlaps_equal_those_of_torchvision_and_by_hand() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = (center_to_corners_format(boxes(generator, count).double()) for count in (7, 5))
    iou, generalized = box_overlaps(first[:, None], second[None])
    torch.testing.assert_close(iou, ops.box_iou(first, second), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(generalized, ops.generalized_box_iou(first, second), rtol=1e-12, atol=1e-12)
    # Two 2 x 2 squares offset by (1, 1) have an intersection of 1, a union of 7 and a hull of 9. After a shift
    # by (6, 0), the hull is 8 x 2.
    iou, generalized = box_overlaps(torch.tensor([0.0, 0, 2, 2]), torch.tensor([[1.0, 1, 3, 3], [6, 0, 8, 2]]))
    torch.testing.assert_close(iou, torch.tensor([1 / 7, 0]))
    torch.testing.assert_close(generalized, torch.tensor([1 / 7 - 2 / 9, -0.5]))


def test_boxes_without_area_or_far_off_leave_losses_and_gradients_finite() -> None:
    points = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.2, 0.3, 0.0, 0.4]], requires_grad=True)
    _, generalized = box_overlaps(center_to_corners_format(points), center_to_corners_format(points.detach()))
    generalized.sum().backward()
    assert generalized.isfinite().all()
    assert points.grad is not None
    assert points.grad.isfinite().all()
    prediction, labels = draw("iou_aware")
    far = prediction.boxes.detach().clone()
    far[0, 0] = math.inf
    assert torch.stack(prediction_losses(prediction.logits, far, labels, options("iou_aware"))).isfinite().all()


@pytest.mark.parametrize("counts", [COUNTS, (1, 1), (20, 20), (0, 20), (25, 2)], ids=str)
def test_equals_the_loss_of_detr(counts: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    prediction = predict(generator, "cross_entropy", 20, len(counts))
    labels = draw_labels(generator, counts)
    costs = {"class_cost": 1, "bbox_cost": 5, "giou_cost": 2, "bbox_loss_coefficient": 5, "giou_loss_coefficient": 2}
    config = SimpleNamespace(**costs, num_labels=NUM_CLASSES, eos_coefficient=0.1, auxiliary_loss=False)
    floats = [{**target, "boxes": target["boxes"].float()} for target in labels]
    logits, found = prediction.logits.float(), prediction.boxes.float()
    total, expected, _ = ForObjectDetectionLoss(logits, floats, "cpu", found, config)
    own = options("cross_entropy", num_queries=20)
    loss, parts = detection_loss([prediction], labels, own, loss_normalizers(labels, own))
    for name, part in parts.items():
        torch.testing.assert_close(part.float(), expected[name].detach())
    torch.testing.assert_close(loss.float(), total)
    theirs, ours = (torch.autograd.grad(value, list(prediction)) for value in (total, loss))
    for a, e in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-7)  # the reference implementation computes in float32


def test_equals_the_loss_of_lw_detr_with_groups_and_layers() -> None:
    num_groups = 3
    generator = torch.Generator().manual_seed(1)
    layers = [predict(generator, "iou_aware", num_groups * NUM_QUERIES) for _ in range(3)]
    labels = draw_labels(generator)
    costs = {"class_cost": 2, "bbox_cost": 5, "giou_cost": 2, "focal_alpha": 0.25, "class_loss_coefficient": 1}
    costs |= {"bbox_loss_coefficient": 5, "giou_loss_coefficient": 2, "decoder_layers": 2, "group_detr": num_groups}
    config = SimpleNamespace(**costs, num_labels=NUM_CLASSES, auxiliary_loss=True)
    encoder, first, last = layers
    both = [torch.stack(pair) for pair in zip(first, last, strict=True)]
    expected, _, _ = LwDetrForObjectDetectionLoss(last.logits, labels, "cpu", last.boxes, config, *both, *encoder)
    own = options("iou_aware")
    actual, parts = detection_loss(layers, labels, own, loss_normalizers(labels, own), num_groups)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)  # the reference computes in float32
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
        torch.testing.assert_close(loss_normalizers(labels, config), torch.tensor([own, 9.0], dtype=torch.float64))
        parts = torch.stack([loss_normalizers([target], config) for target in labels])
        torch.testing.assert_close(parts.sum(dim=0), torch.tensor([own, 9.0], dtype=torch.float64))


@all_losses
def test_images_without_objects_and_with_more_objects_than_queries(class_loss: str) -> None:
    prediction, labels = draw(class_loss)
    empty = [{name: values[:0] for name, values in target.items()} for target in labels]
    sums = prediction_losses(*prediction, empty, options(class_loss))
    assert float(sums[0]) > 0
    assert [float(value) for value in sums[1:]] == [0, 0]
    gradients = torch.autograd.grad(torch.stack(sums).sum(), list(prediction))
    assert gradients[0].abs().min() > 0
    assert gradients[1].abs().max() == 0
    prediction, labels = draw(class_loss, num_queries=2)
    of_image = [values[3] for values in (prediction.logits, prediction.boxes)]
    queries, objects = match_objects(*of_image, labels[3]["class_labels"], labels[3]["boxes"], options(class_loss))
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
