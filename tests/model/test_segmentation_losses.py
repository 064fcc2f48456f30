"""Test that losses of semantic segmentation agree with reference implementations in float64."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_vit import HfViTSegmentationConfig
from hf_vit.model.task_semantic_segmentation import segmentation_loss


NUM_CLASSES, IGNORED = 4, 255
CLASS_WEIGHTS = [0.5, 2.0, 1.0, 0.0]


def batch(count: int = 3) -> tuple[Tensor, Tensor]:
    """Return logits at half the label resolution, and labels. Each image ignores more pixels than the previous one."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(count, NUM_CLASSES, 4, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(NUM_CLASSES, (count, 8, 10), generator=generator)
    for index in range(count):
        labels[index, : 2 * index] = IGNORED
        labels[index, :, :index] = IGNORED
    labels[1] = labels[1].where(labels[1] != 2, 0)  # class 2 is absent from this image
    return logits.requires_grad_(), labels


def loss(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return segmentation_loss(logits, labels, HfViTSegmentationConfig(**options))


def probabilities(logits: Tensor) -> np.ndarray:
    """Return class probabilities (B, H, W, K) at twice the resolution of the logits."""
    upsampled = F.interpolate(logits.detach(), scale_factor=2, mode="bilinear", align_corners=False)
    exponents = np.exp(upsampled.movedim(1, -1).numpy())
    return exponents / exponents.sum(-1, keepdims=True)


@pytest.mark.parametrize("class_weights", [None, CLASS_WEIGHTS])
def test_cross_entropy_is_the_mean_of_torchs_own_over_each_image(class_weights: list[float] | None) -> None:
    logits, labels = batch()
    weights = None if class_weights is None else torch.tensor(class_weights, dtype=torch.float64)
    upsampled = F.interpolate(logits, scale_factor=2, mode="bilinear", align_corners=False)
    pairs = zip(upsampled.split(1), labels.split(1), strict=True)
    expected = torch.stack([F.cross_entropy(*pair, weights, ignore_index=IGNORED) for pair in pairs]).mean()
    actual = loss(logits, labels, class_weights=class_weights)
    assert float(actual) == pytest.approx(float(expected), rel=1e-12)
    gradients = [torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(("gamma", "class_weights"), [(0, CLASS_WEIGHTS), (0.5, None), (2.0, CLASS_WEIGHTS)])
def test_focal_loss_by_hand(gamma: float, class_weights: list[float] | None) -> None:
    logits, labels = batch()
    means = []
    for image, target in zip(probabilities(logits), labels.numpy(), strict=True):
        known = target != IGNORED
        right = np.take_along_axis(image[known], target[known][:, None], axis=1)[:, 0]
        weights = np.ones(NUM_CLASSES) if class_weights is None else np.array(class_weights)
        means.append(np.average((1 - right) ** gamma * -np.log(right), weights=weights[target[known]]))
    options = {"cross_entropy_weight": 0.0, "focal_weight": 3.0, "focal_gamma": gamma, "class_weights": class_weights}
    assert float(loss(logits, labels, **options)) == pytest.approx(3 * np.mean(means), rel=1e-12)


def test_dice_loss_by_hand() -> None:
    logits, labels = batch()
    means = []
    for image, target in zip(probabilities(logits), labels.numpy(), strict=True):
        scores, counted = [], target != IGNORED
        for number in np.unique(target[counted]):
            truth, predicted = target[counted] == number, image[counted][:, number]
            scores.append(1 - 2 * predicted[truth].sum() / (predicted.sum() + truth.sum()))
        means.append(np.mean(scores))
    actual = loss(logits, labels, cross_entropy_weight=0.0, dice_weight=0.7)
    assert float(actual) == pytest.approx(0.7 * np.mean(means), rel=1e-12)
    perfect = 1e3 * F.one_hot(labels.where(labels != IGNORED, 0), NUM_CLASSES).movedim(-1, 1).double()
    assert float(loss(perfect, labels, cross_entropy_weight=0.0, dice_weight=1.0)) == 0


def test_losses_add_up_by_their_weights() -> None:
    logits, labels = batch()
    parts = {"cross_entropy_weight": 0.3, "dice_weight": 0.7, "focal_weight": 1.1}
    alone = [loss(logits, labels, **{**dict.fromkeys(parts, 0.0), name: 1.0}) for name in parts]
    expected = sum(weight * float(own) for weight, own in zip(parts.values(), alone, strict=True))
    assert float(loss(logits, labels, **parts)) == pytest.approx(expected, rel=1e-12)


ALL = {"cross_entropy_weight": 1.0, "dice_weight": 1.0, "focal_weight": 1.0, "focal_gamma": 0.5}


def test_loss_of_a_batch_is_the_mean_of_those_of_its_images() -> None:
    logits, labels = batch(5)
    alone = [float(loss(*pair, **ALL)) for pair in zip(logits.split(1), labels.split(1), strict=True)]
    assert len(set(alone)) == 5
    assert float(loss(logits, labels, **ALL)) == pytest.approx(np.mean(alone), rel=1e-12)


def test_pixels_that_do_not_count_change_nothing() -> None:
    logits, labels = batch()
    other_index = labels.where(labels != IGNORED, -7)
    assert torch.equal(loss(logits, labels, **ALL), loss(logits, other_index, semantic_loss_ignore_index=-7, **ALL))
    labels = labels.clone()
    labels[:, :, 5:] = IGNORED  # only logits that affect this ignored half are changed
    changed = logits.detach().clone()
    changed[..., 4:] += 3
    assert torch.equal(loss(changed, labels, **ALL), loss(logits, labels, **ALL))


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_an_image_in_which_no_pixel_counts_adds_exactly_zero(scale: float) -> None:
    logits, labels = batch(2)
    labels[1] = IGNORED
    logits = (scale * logits.detach()).float().requires_grad_()  # a large scale saturates most pixels
    total = loss(logits, labels, class_weights=CLASS_WEIGHTS, **ALL)
    assert float(total) == pytest.approx(float(loss(logits[:1], labels[:1], class_weights=CLASS_WEIGHTS, **ALL)) / 2)
    total.backward()
    assert logits.grad.isfinite().all()
    assert [bool(own.any()) for own in logits.grad] == [True, False]
    assert float(loss(logits[1:], labels[1:], **ALL)) == 0


def test_half_precision_logits_are_compared_in_float32() -> None:
    logits, labels = batch()
    half = logits.detach().bfloat16()
    assert loss(half, labels, **ALL).dtype == torch.float32
    assert float(loss(half, labels, **ALL)) == pytest.approx(float(loss(half.double(), labels, **ALL)), rel=1e-5)
