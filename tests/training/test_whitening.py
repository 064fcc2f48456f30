"""Patch embeddings initialized by whitening the patches of training images."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hf_vit import HfViTModel
from hf_vit.training.models import LEAST_VARIANCE, NUM_IMAGES, whiten_patches

from ..helpers.models import small_config
from ..helpers.pretraining import A_FEW, make_task, write_colors


PATCH = 4
SIZE = 3 * PATCH * PATCH  # values of a patch


def smooth_images(num_images: int = 40) -> Tensor:
    """Return images with correlated neighboring pixels and a nonzero mean."""
    noise = torch.randn(num_images, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    return 3 * nn.functional.avg_pool2d(noise, 3, stride=1, padding=1) + 0.5


def embed(hidden_size: int, images: Tensor, seed: int = 0) -> tuple[nn.Conv2d, Tensor]:
    """Return a whitened projection and its outputs for the patches (M, D)."""
    config = small_config(hidden_size=hidden_size, patch_size=PATCH, image_size=24, num_hidden_layers=1)
    model = HfViTModel(config)
    whiten_patches(model, images, seed)
    projection = model.embeddings.patch_embeddings.projection
    return projection, projection(images).flatten(2).mT.flatten(0, 1).detach()


def covariance(states: Tensor) -> Tensor:
    return (states - states.mean(dim=0)).T @ (states - states.mean(dim=0)) / len(states)


def test_embedded_patches_are_white() -> None:
    images = smooth_images()
    _, states = embed(64, images)
    assert states.mean(dim=0).abs().max() < 1e-4
    patches = nn.functional.unfold(images, PATCH, stride=PATCH).mT.flatten(0, 1)
    before = torch.linalg.eigvalsh(covariance(patches))
    assert before[-1] / before[0] > 50  # far from white
    found = torch.linalg.eigvalsh(covariance(states))
    assert found[: 64 - SIZE].abs().max() < 1e-4
    expected = 64 / SIZE * (before / (before + LEAST_VARIANCE))
    torch.testing.assert_close(found[-SIZE:], expected.sort().values, rtol=1e-3, atol=1e-4)


def test_narrow_models_keep_the_directions_of_most_variance() -> None:
    images = smooth_images()
    _, states = embed(32, images)
    assert torch.linalg.eigvalsh(covariance(states)).min() > 0.8
    patches = nn.functional.unfold(images, PATCH, stride=PATCH).mT.flatten(0, 1)
    centered = patches - patches.mean(dim=0)
    rest = centered - states @ torch.linalg.lstsq(states, centered).solution
    variances = torch.linalg.eigvalsh(covariance(patches))
    assert rest.square().sum() / len(rest) == pytest.approx(float(variances[:-32].sum()), rel=1e-2)


def test_the_seed_draws_the_rotation() -> None:
    images = smooth_images(8)
    first, again, other = (embed(64, images, seed)[0].weight for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert (first - other).abs().max() > 0.01


def test_a_training_starts_with_whitened_patches(tmp_path: Path) -> None:
    data = write_colors(tmp_path / "colors")
    for options in ([], ["--streaming", "true", *A_FEW]):
        task = make_task(data, tmp_path / "output", "--whiten_patches", "true", *options)
        trainer = task.make_trainer()
        embeddings = trainer.model.base_model.embeddings.patch_embeddings
        batches = task.plain_batches(trainer.model, trainer.processing_class, NUM_IMAGES)
        inputs = torch.cat([batch["pixel_values"] for batch in batches])
        states = embeddings.projection(inputs).flatten(2).mT.flatten(0, 1).detach()
        assert states.mean(dim=0).abs().max() < 1e-4
        assert 0.4 < covariance(states).diagonal().mean() < 1.01  # random weights give 0.02


def test_a_model_that_has_learned_keeps_its_patches(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--whiten_patches is for models from scratch.* somewhere has learned"):
        make_task(tmp_path, tmp_path / "output", "--whiten_patches", "true", "--model_name_or_path", "somewhere")


def test_gray_images_in_three_channels_leave_colors_out() -> None:
    gray = smooth_images()[:, :1]
    images = gray * torch.tensor([1.0, 1.1, 0.9]).view(3, 1, 1) + torch.tensor([0.1, 0.0, -0.2]).view(3, 1, 1)
    projection, states = embed(64, images)
    assert states.std() > 0.3
    color = torch.randn(8, 3, 24, 24, generator=torch.Generator().manual_seed(1))
    axis = torch.tensor([1.0, 1.1, 0.9]).view(3, 1, 1)
    # Remove the variance along the gray axis.
    color = color - axis * (color * axis).sum(dim=1, keepdim=True) / axis.square().sum()
    assert (projection(color) - projection(torch.zeros_like(color))).abs().max() < 1e-3


def test_patches_that_are_all_the_same_change_nothing() -> None:
    model = HfViTModel(small_config())
    before = model.embeddings.patch_embeddings.projection.weight.clone()
    whiten_patches(model, torch.full((4, 3, 32, 32), 0.5), 0)
    assert torch.equal(model.embeddings.patch_embeddings.projection.weight, before)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(0, 3, 32, 32), "have no patches"),
        (torch.full((2, 3, 32, 32), float("nan")), "infinite or NaN"),
        (torch.full((2, 3, 32, 32), float("inf")), "infinite or NaN"),
    ],
)
def test_samples_without_finite_patches_are_refused(images: Tensor, message: str) -> None:
    model = HfViTModel(small_config())
    before = model.embeddings.patch_embeddings.projection.weight.clone()
    with pytest.raises(ValueError, match=message):
        whiten_patches(model, images, 0)
    assert torch.equal(model.embeddings.patch_embeddings.projection.weight, before)
