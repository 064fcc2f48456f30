"""Image classification losses and label formats, compared with values computed by hand or by torch."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Trainer, TrainingArguments

from hf_vit import HfViTForImageClassification
from hf_vit.model.task_image_classification import classification_loss, soften_labels
from hf_vit.training import HfViTTrainer, image_classification_metrics

from ..helpers.models import pixels, small_config
from ..helpers.references import draw_weights


def build(**overrides: Any) -> HfViTForImageClassification:
    model = HfViTForImageClassification(small_config(**overrides))
    draw_weights(model)
    return model.eval()


def test_single_label_loss_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [0.0, 0.0]])
    expected = (-math.log(3 / 4) - math.log(1 / 2)) / 2
    for problem_type in (None, "single_label_classification"):
        loss = classification_loss(logits, torch.tensor([1, 0]), problem_type)
        assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_ignored_label() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [5.0, 0.0]])
    assert classification_loss(logits, torch.tensor([1, -100]), None).item() == pytest.approx(
        -math.log(3 / 4), rel=1e-6
    )


def test_multi_label_loss_by_hand() -> None:
    logits = torch.tensor([[math.log(3.0), 0.0]])
    expected = (-math.log(3 / 4) - math.log(1 / 2)) / 2
    for labels in (torch.tensor([[1.0, 0.0]]), torch.tensor([[1, 0]])):
        loss = classification_loss(logits, labels, "multi_label_classification")
        assert loss.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("labels", [torch.tensor([1.0, 4.0]), torch.tensor([[1.0], [4.0]]), torch.tensor([1, 4])])
@pytest.mark.parametrize("problem_type", [None, "regression"])
def test_regression_loss_by_hand(labels: Tensor, problem_type: str | None) -> None:
    assert classification_loss(torch.tensor([[2.0], [2.0]]), labels, problem_type).item() == pytest.approx(2.5)


def test_regression_of_several_values() -> None:
    loss = classification_loss(torch.zeros(1, 2), torch.tensor([[1.0, 3.0]]), "regression")
    assert loss.item() == pytest.approx(5.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("problem_type", "labels"),
    [
        ("single_label_classification", torch.tensor([1, 0])),
        ("multi_label_classification", torch.tensor([[1.0, 0.0], [0.0, 1.0]])),
        ("regression", torch.tensor([[2020.3, 1.0], [100000.0, 0.0]])),
    ],
)
def test_loss_keeps_its_digits_in_half_precision(problem_type: str, labels: Tensor, dtype: torch.dtype) -> None:
    logits = torch.tensor([[2020.0, 2000.0], [3.0, 11.0]], dtype=dtype)
    with torch.autocast("cpu", dtype):
        loss = classification_loss(logits, labels, problem_type)
    assert loss.dtype == torch.float32
    expected = classification_loss(
        logits.double(), labels.double() if labels.is_floating_point() else labels, problem_type
    )
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_class_numbers_of_any_integer_type() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [0.0, 0.0]])
    expected = classification_loss(logits, torch.tensor([1, 0]), None)
    for dtype in (torch.int32, torch.int16, torch.uint8):
        assert torch.equal(classification_loss(logits, torch.tensor([1, 0], dtype=dtype), None), expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_softened_labels_equal_torch_label_smoothing(smoothing: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(4, 5, generator=generator), torch.tensor([0, 4, 2, 2])
    soft = soften_labels(labels, 5, smoothing)
    torch.testing.assert_close(soft.sum(1), torch.ones(4))
    loss = classification_loss(logits, soft, "single_label_classification")
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels, label_smoothing=smoothing))


def test_mixed_labels_give_the_mixed_loss() -> None:
    model = build(problem_type="single_label_classification")
    images = pixels(model.config, batch=3)
    first, second = torch.tensor([0, 1, 2]), torch.tensor([4, 3, 2])
    mixed = 0.3 * soften_labels(first, 5) + 0.7 * soften_labels(second, 5)
    expected = 0.3 * model(images, labels=first).loss + 0.7 * model(images, labels=second).loss
    torch.testing.assert_close(model(images, labels=mixed).loss, expected)


def test_label_smoothing_of_the_trainer(tmp_path: Any) -> None:
    model = build()
    images, labels = pixels(model.config, batch=4), torch.tensor([0, 4, 2, 2])
    arguments = TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, use_cpu=True)
    trainer = Trainer(model, arguments)
    loss = trainer.compute_loss(model, {"pixel_values": images, "labels": labels})
    torch.testing.assert_close(loss, F.cross_entropy(model(images).logits, labels, label_smoothing=0.1))


def test_two_heads_of_a_distilled_model() -> None:
    model = build(use_distillation_token=True)
    images, labels = pixels(model.config), torch.tensor([1, 3])
    outputs = model(images, labels=labels)
    torch.testing.assert_close(outputs.logits, (outputs.cls_logits + outputs.distillation_logits) / 2)
    assert not torch.allclose(outputs.cls_logits, outputs.distillation_logits)
    torch.testing.assert_close(outputs.loss, F.cross_entropy(outputs.logits, labels))
    plain = build()(images)
    assert plain.cls_logits is None
    assert plain.distillation_logits is None


@pytest.mark.parametrize(
    ("labels", "problem_type", "message"),
    [
        (torch.tensor([0, 5]), None, r"Label 5 is out of range: the model has 5 labels, 0 to 4"),
        (torch.tensor([0, -1]), None, "Label -1 is out of range"),
        (torch.tensor([0, 1, 2]), None, r"\(batch,\) = \(2,\), not \(3,\)"),
        (torch.ones(2, 5), None, "'multi_label_classification', 'single_label_classification' or 'regression'"),
        (torch.ones(2, 4), "multi_label_classification", r"= \(2, 5\), not \(2, 4\)"),
        (torch.ones(2, 4), "single_label_classification", r"soft labels must be .*\(2, 5\)"),
        (torch.ones(2, 5) * 2, "multi_label_classification", r"2.0 is no probability"),
        (torch.full((2, 5), float("nan")), "single_label_classification", "nan is no probability"),
        (torch.tensor([True, False]), None, "not bool"),
        (torch.ones(2), "regression", r"regression must be .*\(2, 5\), not \(2,\)"),
    ],
)
def test_wrong_labels_are_refused(labels: Tensor, problem_type: str | None, message: str) -> None:
    model = build(problem_type=problem_type)
    with pytest.raises(ValueError, match=message):
        model(pixels(model.config), labels=labels)


def test_unknown_problem_is_refused() -> None:
    with pytest.raises(ValueError, match="'multilabel' is unknown"):
        classification_loss(torch.zeros(1, 2), torch.zeros(1, 2), "multilabel")


def test_a_distilled_model_evaluates_in_the_trainer(tmp_path: Any) -> None:
    model = build(use_distillation_token=True)
    model.config.output_hidden_states = True
    data = [{"pixel_values": image, "labels": torch.tensor(1)} for image in pixels(model.config, batch=3)]
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, disable_tqdm=True)
    trainer = HfViTTrainer(model, arguments, eval_dataset=data, compute_metrics=image_classification_metrics)
    assert "eval_accuracy" in trainer.evaluate()


def test_soften_labels_refuses_what_is_out_of_range() -> None:
    with pytest.raises(ValueError, match=r"label_smoothing=1.5 must lie in \[0, 1\)"):
        soften_labels(torch.tensor([1]), 5, 1.5)
    with pytest.raises(ValueError, match="Label 7 is out of range"):
        soften_labels(torch.tensor([7]), 5)


@pytest.mark.parametrize(
    "problem_type", [None, "single_label_classification", "multi_label_classification", "regression"]
)
def test_gradients_do_not_depend_on_accumulation(problem_type: str | None, tmp_path: Any) -> None:
    """Eight accumulated batches of 1 match one batch of 8 in loss and gradients; `num_items_in_batch` is ignored."""
    targets = {
        None: torch.arange(8) % 5,
        "single_label_classification": soften_labels(torch.arange(8) % 5, 5, 0.2),
        "multi_label_classification": (torch.arange(40).reshape(8, 5) % 3 == 0).float(),
        "regression": torch.arange(40).reshape(8, 5) / 10,
    }
    images = pixels(small_config(), batch=8)
    data = [{"pixel_values": i, "labels": t} for i, t in zip(images, targets[problem_type], strict=True)]

    def gradients(batch_size: int, steps: int) -> tuple[dict[str, Tensor], float]:
        model = build(problem_type=problem_type)
        kept: dict[str, Tensor] = {}

        class Recorder(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:
                kept.update({name: p.grad.clone() for name, p in model.named_parameters()})

        arguments = TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=steps,
            max_steps=1,
            max_grad_norm=0.0,
            logging_steps=1,
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            train_sampling_strategy="sequential",
        )
        optimizer = Recorder(model.parameters(), lr=0.0)
        trainer = Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))
        trainer.train()
        return kept, trainer.state.log_history[0]["loss"]

    expected, expected_loss = gradients(8, 1)
    accumulated, loss = gradients(1, 8)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for name, gradient in expected.items():
        torch.testing.assert_close(accumulated[name], gradient, rtol=1e-4, atol=1e-6)
