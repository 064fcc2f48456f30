"""Test the losses of joint-embedding models, such as the Epps-Pulley statistic, and their inputs."""

from typing import Any

import numpy as np
import pytest
import torch

from hf_vit import HfViTForJointEmbedding
from hf_vit.model.task_joint_embedding import draw_slices, gaussian_loss, view_loss

from ..helpers.models import TRAINING_CASES, small_config


CASE = TRAINING_CASES["joint_embedding"]


def make_model(**options: Any) -> HfViTForJointEmbedding:
    return HfViTForJointEmbedding(small_config(**{**CASE.overrides, **options}))


def test_the_statistic_is_an_integral_over_characteristic_functions() -> None:
    embeds, slices = torch.randn(9, 2, 5, dtype=torch.float64), draw_slices(5, 7, torch.device("cpu"))
    assert slices.shape == (5, 7)
    torch.testing.assert_close(slices.norm(dim=0), torch.ones(7))
    points = np.linspace(-3, 3, 33)
    window = np.exp(-(points**2) / 2)
    expected = []
    for view in (0, 1):
        for values in (embeds[:, view] @ slices.double()).T.numpy():
            empirical = np.exp(1j * points[:, None] * values).mean(axis=1)
            expected.append(len(values) * np.trapezoid(np.abs(empirical - window) ** 2 * window, points))
    assert float(gaussian_loss(embeds, slices)) == pytest.approx(np.mean(expected), rel=1e-6)


def test_the_statistic_is_that_of_the_authors_code_and_close_to_the_papers_listing() -> None:
    # Source: MINIMAL.md in https://github.com/rbalestr-lab/lejepa. The listing in the paper uses linspace(-5, 5, 17).
    for values in (torch.randn(64, 2, 5), torch.rand(64, 2, 5), 0.5 * torch.randn(64, 2, 5)):
        slices = draw_slices(5, 9, torch.device("cpu"))
        projected, found = (values @ slices)[..., None], {}
        for name, points in (("code", torch.linspace(0, 3, 17)), ("listing", torch.linspace(-5, 5, 17))):
            window = (-points.square() / 2).exp()
            angles = projected * points
            error = (angles.cos().mean(dim=0) - window).square() + angles.sin().mean(dim=0).square()
            found[name] = torch.trapezoid(error * window, points).mean() * len(values)
        # The integrand is symmetric, and our code integrates over positive points only.
        found["code"] *= 2
        torch.testing.assert_close(gaussian_loss(values, slices), found["code"])
        assert float(found["code"] / found["listing"]) == pytest.approx(1, abs=0.05)


def test_view_loss_is_the_distance_to_the_mean_of_the_global_views() -> None:
    # The mean embedding of the global views is 1 in both examples.
    embeds = torch.tensor([[[0.0], [2.0], [5.0]], [[1.0], [1.0], [1.0]]])
    assert float(view_loss(embeds, 2)) == pytest.approx((1 + 1 + 16) / 6)


def test_loss_is_the_weighted_sum_and_trains_every_projector_weight() -> None:
    model = make_model().train()
    outputs = model(**CASE.make_batch(model.config, 4))
    weight = model.options.gaussian_weight
    expected = (1 - weight) * outputs.view_loss + weight * outputs.gaussian_loss
    torch.testing.assert_close(outputs.loss, expected)
    assert outputs.embeds.shape == (4, 4, 8)
    outputs.loss.backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in model.projector.parameters())


def test_single_images_have_the_embeddings_of_views() -> None:
    model = make_model().eval()
    views = CASE.make_batch(model.config, 3)["pixel_values"]
    with torch.no_grad():
        together, alone = model(views), model(views[:, 1])
    torch.testing.assert_close(alone.embeds, together.embeds[:, 1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(alone.pooler_output, together.pooler_output[:, 1], rtol=1e-4, atol=1e-5)
    assert alone.loss is None
