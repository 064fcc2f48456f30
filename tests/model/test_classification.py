"""Test that losses of image classification equal values computed by hand or by torch."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Trainer, TrainingArguments

from hf_vit import HfViTForImageClassification
from hf_vit.model.task_image_classification import classification_loss, soften_labels
from hf_vit.training import HfViTTrainer, image_classification_metrics

from ..helpers.models import pixels
from . import checks


build = partial(checks.build, HfViTForImageClassification)
LOG_3, HALF = math.log(3.0), (-math.log(3 / 4) - math.log(1 / 2)) / 2
TWO = [[0.0, LOG_3], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("logits", "labels", "problem_type", "expected"),
    [
        (TWO, [1, 0], None, HALF),
        (TWO, [1, 0], "single_label_classification", HALF),
        ([[0.0, LOG_3], [5.0, 0.0]], [1, -100], None, -math.log(3 / 4)),  # the label -100 is ignored
        ([[LOG_3, 0.0]], [[1.0, 0.0]], "multi_label_classification", HALF),
        ([[LOG_3, 0.0]], [[1, 0]], "multi_label_classification", HALF),
        ([[2.0], [2.0]], [1.0, 4.0], None, 2.5),
        ([[2.0], [2.0]], [[1.0], [4.0]], None, 2.5),
        ([[2.0], [2.0]], [1, 4], None, 2.5),
        ([[2.0], [2.0]], [1.0, 4.0], "regression", 2.5),
        ([[2.0], [2.0]], [[1.0], [4.0]], "regression", 2.5),
        ([[2.0], [2.0]], [1, 4], "regression", 2.5),
        ([[0.0, 0.0]], [[1.0, 3.0]], "regression", 5.0),
    ],
)
def test_loss_by_hand(logits: list[Any], labels: list[Any], problem_type: str | None, expected: float) -> None:
    loss = classification_loss(torch.tensor(logits), torch.tensor(labels), problem_type)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    if expected == HALF and labels == [1, 0]:
        for dtype in (torch.int32, torch.int16, torch.uint8):
            typed = torch.tensor(labels, dtype=dtype)
            assert torch.equal(classification_loss(torch.tensor(logits), typed, None), loss)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("problem_type", "labels"),
    [
        ("single_label_classification", torch.tensor([1, 0])),
        ("multi_label_classification", torch.tensor([[1.0, 0.0], [0.0, 1.0]])),
        ("regression", torch.tensor([[2020.3, 1.0], [100000.0, 0.0]])),
    ],
)
def test_loss_of_half_precision_logits_is_computed_in_float32(
    problem_type: str, labels: Tensor, dtype: torch.dtype
) -> None:
    logits = torch.tensor([[2020.0, 2000.0], [3.0, 11.0]], dtype=dtype)
    with torch.autocast("cpu", dtype):
        loss = classification_loss(logits, labels, problem_type)
    assert loss.dtype == torch.float32
    exact = labels.double() if labels.is_floating_point() else labels
    expected = classification_loss(logits.double(), exact, problem_type)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_softened_labels_equal_torch_label_smoothing() -> None:
    logits, labels = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 4, 2, 2])
    for smoothing in (0.0, 0.1, 0.5):
        soft = soften_labels(labels, 5, smoothing)
        torch.testing.assert_close(soft.sum(1), torch.ones(4))
        loss = classification_loss(logits, soft, "single_label_classification")
        torch.testing.assert_close(loss, F.cross_entropy(logits, labels, label_smoothing=smoothing))
    with pytest.raises(ValueError, match=r"label_smoothing=1.5 must lie in \[0, 1\)"):
        soften_labels(torch.tensor([1]), 5, 1.5)
    with pytest.raises(ValueError, match="Label 7 is out of range"):
        soften_labels(torch.tensor([7]), 5)


def test_mixed_labels_and_label_smoothing_of_the_trainer(tmp_path: Path) -> None:
    model = build(problem_type="single_label_classification")
    images = pixels(model.config, batch=3)
    first, second = torch.tensor([0, 1, 2]), torch.tensor([4, 3, 2])
    mixed = 0.3 * soften_labels(first, 5) + 0.7 * soften_labels(second, 5)
    expected = 0.3 * model(images, labels=first).loss + 0.7 * model(images, labels=second).loss
    torch.testing.assert_close(model(images, labels=mixed).loss, expected)
    trainer = Trainer(model, TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, use_cpu=True))
    loss = trainer.compute_loss(model, {"pixel_values": images, "labels": first})
    torch.testing.assert_close(loss, F.cross_entropy(model(images).logits, first, label_smoothing=0.1))


def test_two_heads_of_a_distilled_model(tmp_path: Path) -> None:
    model = build(use_distillation_token=True)
    images, labels = pixels(model.config), torch.tensor([1, 3])
    outputs = model(images, labels=labels)
    torch.testing.assert_close(outputs.logits, (outputs.cls_logits + outputs.distillation_logits) / 2)
    assert not torch.allclose(outputs.cls_logits, outputs.distillation_logits)
    torch.testing.assert_close(outputs.loss, F.cross_entropy(outputs.logits, labels))
    plain = build()(images)
    assert (plain.cls_logits, plain.distillation_logits) == (None, None)
    model.config.output_hidden_states = True
    data = [{"pixel_values": image, "labels": torch.tensor(1)} for image in images]
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, disable_tqdm=True)
    trainer = HfViTTrainer(model, arguments, eval_dataset=data, compute_metrics=image_classification_metrics)
    assert "eval_accuracy" in trainer.evaluate()


@pytest.mark.parametrize(
    ("labels", "problem_type", "message"),
    [
        (torch.tensor([0, 5]), None, r"Label 5 is out of range: the model has 5 labels, 0 to 4"),
        (torch.tensor([0, -1]), None, "Label -1 is out of range"),
        (torch.tensor([0, 1, 2]), None, r"\(batch,\) = \(2,\), not \(3,\)"),
        (torch.ones(2, 5), None, "'multi_label_classification', 'single_label_classification' or 'regression'"),
        (torch.ones(2, 4), "multi_label_classification", r"= \(2, 5\), not \(2, 4\)"),
        (torch.ones(2, 4), "single_label_classification", r"soft labels must be .*\(2, 5\)"),
        (torch.ones(2, 5) * 2, "multi_label_classification", r"2.0 is not a probability"),
        (torch.full((2, 5), float("nan")), "single_label_classification", "nan is not a probability"),
        (torch.tensor([True, False]), None, "not bool"),
        (torch.ones(2), "regression", r"regression must be .*\(2, 5\), not \(2,\)"),
    ],
)
def test_wrong_labels_are_refused(labels: Tensor, problem_type: str | None, message: str) -> None:
    model = build(problem_type=problem_type)
    with pytest.raises(ValueError, match=message):
        model(pixels(model.config), labels=labels)
    with pytest.raises(ValueError, match="'multilabel' is unknown"):
        classification_loss(torch.zeros(1, 2), torch.zeros(1, 2), "multilabel")
