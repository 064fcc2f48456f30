"""Test that depth losses agree with reference implementations in float64."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_vit import HfViTDepthConfig
from hf_vit.model.task_depth_estimation import depth_loss


INVALID = (0.0, -1.0, float("nan"), float("inf"), float("-inf"))
METRIC = [{"loss": "silog"}, {"loss": "l1"}, {"loss": "mse"}, {"loss": "silog", "silog_lambda": 1.0}]
RELATIVE = {"depth_estimation_type": "relative"}
ALL = [*METRIC, RELATIVE]
all_losses = pytest.mark.parametrize("options", ALL, ids=str)


def batch(count: int = 3) -> tuple[Tensor, Tensor, np.ndarray]:
    """Return predicted depth, true depth with invalid values of all kinds, and the mask of valid pixels."""
    generator = torch.Generator().manual_seed(0)
    predicted, labels = 1 + 4 * torch.rand(2, count, 9, 12, generator=generator, dtype=torch.float64)
    for index in range(count):
        for number, value in enumerate(INVALID):
            labels[index, number :: 5 + index, number::4] = value
    valid = np.isfinite(labels.numpy()) & (labels.numpy() > 0)
    return predicted.requires_grad_(), labels, valid


def loss(predicted: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return depth_loss(predicted, labels, HfViTDepthConfig(**options))


def silog(own: np.ndarray, label: np.ndarray, silog_lambda: float = 0.5) -> float:
    ratio = np.log(own) - np.log(label)
    return np.sqrt((ratio**2).mean() - silog_lambda * ratio.mean() ** 2)


@pytest.mark.parametrize(
    ("options", "reference"),
    [
        *(({"loss": "silog", "silog_lambda": share}, partial(silog, silog_lambda=share)) for share in (0.0, 0.5, 1.0)),
        ({}, silog),  # this is the default loss for metric depth
        ({"loss": "l1"}, lambda own, label: np.abs(own - label).mean()),
        ({"loss": "mse"}, lambda own, label: ((own - label) ** 2).mean()),
    ],
)
def test_losses_of_metric_depth_by_hand(options: dict[str, Any], reference: Callable[..., float]) -> None:
    predicted, labels, valid = batch()
    images = zip(predicted.detach().numpy(), labels.numpy(), valid, strict=True)
    expected = np.mean([reference(own[counted], label[counted]) for own, label, counted in images])
    assert float(loss(predicted, labels, **options)) == pytest.approx(expected, rel=1e-12)


def normalized(values: np.ndarray, valid: np.ndarray) -> np.ndarray:
    known = np.sort(values[valid])
    centered = values - known[(len(known) - 1) // 2]  # subtract the lower median
    return centered / np.abs(centered[valid]).mean()


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_scale_and_shift_invariant_loss_by_hand(weight: float) -> None:
    predicted, labels, valid = batch()
    expected = []
    for own, label, counted in zip(predicted.detach().numpy(), labels.numpy(), valid, strict=True):
        inverse = 1 / np.where(counted, label, 1)
        error = normalized(own, counted) - normalized(inverse, counted)
        total = np.abs(error[counted]).mean()
        for step in (1, 2, 4, 8):
            coarse, known = error[::step, ::step], counted[::step, ::step]
            down = np.abs(np.diff(coarse, axis=0))[known[1:] & known[:-1]]
            across = np.abs(np.diff(coarse, axis=1))[known[:, 1:] & known[:, :-1]]
            slopes = down.sum() + across.sum()
            total += weight * slopes / max(known.sum(), 1)
        expected.append(total)
    actual = loss(predicted, labels, **RELATIVE, gradient_loss_weight=weight)
    assert float(actual) == pytest.approx(np.mean(expected), rel=1e-12)


def test_relative_loss_is_invariant_to_scale_and_shift() -> None:
    predicted, labels, _ = batch()
    expected = float(loss(predicted, labels, **RELATIVE))
    for scale, shift in ((7.0, 3.0), (0.01, -2.0)):
        assert float(loss(scale * predicted + shift, labels, **RELATIVE)) == pytest.approx(expected, rel=1e-9)
    assert float(loss(-predicted, labels, **RELATIVE)) != pytest.approx(expected, rel=1e-3)
    inverse = 1 / labels.where(labels.isfinite() & (labels > 0), 1)
    assert float(loss(5 * inverse + 2, labels, **RELATIVE)) == pytest.approx(0, abs=1e-12)


@all_losses
def test_loss_is_zero_if_exact_and_gradients_are_finite_if_constant(options: dict[str, Any]) -> None:
    _, labels, _ = batch()
    known = labels.where(labels.isfinite() & (labels > 0), 2)
    predicted = (1 / known if options is RELATIVE else known).float().requires_grad_()
    total = loss(predicted, labels.float(), **options)
    assert float(total) == pytest.approx(0, abs=1e-6)
    total.backward()
    assert predicted.grad.isfinite().all()
    for constant in (0.0, 2.0):
        flat = torch.full(labels.shape, constant, requires_grad=True)
        loss(flat, labels, **options).backward()
        assert flat.grad.isfinite().all()


@all_losses
def test_an_image_without_a_valid_pixel_adds_exactly_zero(options: dict[str, Any]) -> None:
    for value in INVALID:
        predicted, labels, _ = batch(2)
        labels[1] = value
        total = loss(predicted, labels, **options)
        assert float(total) == pytest.approx(float(loss(predicted[:1], labels[:1], **options)) / 2, rel=1e-12), value
        total.backward()
        assert predicted.grad.isfinite().all(), value
        assert predicted.grad[0].any(), value
        assert not predicted.grad[1].any(), value
        assert float(loss(predicted[1:], labels[1:], **options)) == 0, value


def test_predictions_are_resized_to_the_labels_which_may_have_a_channel() -> None:
    predicted, labels, _ = batch()
    coarse = predicted.detach()[:, ::3, ::4]
    resized = F.interpolate(coarse[:, None], size=(9, 12), mode="bilinear", align_corners=False)[:, 0]
    for options in ALL:
        assert torch.equal(loss(coarse, labels, **options), loss(resized, labels, **options))
        assert torch.equal(loss(predicted, labels[:, None], **options), loss(predicted, labels, **options))
    with pytest.raises(ValueError, match=r"labels must be floats \(batch, height, width\)"):
        loss(predicted, labels[:, None].expand(-1, 3, -1, -1))


def test_half_precision_is_compared_in_float32() -> None:
    predicted, labels, _ = batch()
    half = predicted.detach().bfloat16()
    for options in ALL:
        assert loss(half, labels.bfloat16(), **options).dtype == torch.float32
        expected = float(loss(half.double(), labels, **options))
        assert float(loss(half, labels.float(), **options)) == pytest.approx(expected, rel=1e-4)


def test_depth_beyond_max_depth_is_excluded_from_the_loss() -> None:
    predicted, labels, _ = batch()
    near = labels.where(~(labels > 3), 0)
    limit = labels.where(~(labels > 3), 3)  # a depth that equals the maximum is valid
    for options in METRIC:
        assert torch.equal(loss(predicted, labels, **options, max_depth=3), loss(predicted, near, **options))
        assert torch.equal(loss(predicted, limit, **options, max_depth=3), loss(predicted, limit, **options))
        assert float(loss(predicted, labels + 9, **options, max_depth=5)) == 0
    # Depth is not limited if it is relative or if max_depth is None.
    for unlimited, limited in (({**RELATIVE, "max_depth": None}, RELATIVE), ({"max_depth": None}, {"max_depth": 1e9})):
        assert torch.equal(loss(predicted, 20 * labels, **unlimited), loss(predicted, 20 * labels, **limited))
    assert float(loss(predicted, 20 * labels, max_depth=None)) > 0
