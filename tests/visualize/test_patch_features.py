"""Patch colors and similarities equal scikit-learn and plain loops."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from torch import Tensor

from hf_vit import HfViTForDepthEstimation
from hf_vit.visualize import feature_colors, patch_features, patch_similarity
from hf_vit.visualize.patches import principal_components

from ..helpers.models import pixels, small_config


def random_features(*grids: tuple[int, int], size: int = 6) -> list[Tensor]:
    """Return image features with a different standard deviation in each dimension."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*grid, size, generator=generator).double() * torch.arange(1, size + 1) + 5 for grid in grids]


def project(rows: np.ndarray, count: int) -> np.ndarray:
    """Project rows on scikit-learn's components, with signs that make the largest entries positive."""
    pca = PCA(count, svd_solver="full").fit(rows)
    largest = np.take_along_axis(pca.components_, np.abs(pca.components_).argmax(1, keepdims=True), 1)
    return pca.transform(rows) * np.sign(largest[:, 0])


def test_features_are_the_patches_of_the_last_hidden_state_without_padding() -> None:
    config = small_config("registers")
    model = HfViTForDepthEstimation(config).eval()
    images, mask = pixels(config, 2, (3, 4)), torch.ones(2, 3, 4, dtype=torch.bool)
    mask[0, 2:], mask[0, :, 3:] = False, False
    first, second = patch_features(model, images, mask)
    assert (first.shape, second.shape) == ((2, 3, 32), (3, 4, 32))
    hidden_states = model.base_model(images, patch_attention_mask=mask).last_hidden_state
    for row, column in np.ndindex(2, 3):
        torch.testing.assert_close(first[row, column], hidden_states[0, 4 + 4 * row + column])
    torch.testing.assert_close(first, patch_features(model, images[:1, :, :16, :24])[0], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"Call model\.eval\(\)"):
        patch_features(model.train(), images)


def test_similarity_is_the_cosine_with_each_patch() -> None:
    (features,) = random_features((3, 4))
    similarity = patch_similarity(features, (1, 2))
    assert similarity.shape == (3, 4)
    for place in np.ndindex(3, 4):
        first, second = features[1, 2], features[place]
        expected = (first * second).sum() / (first.square().sum() * second.square().sum()).sqrt()
        assert float(similarity[place]) == pytest.approx(float(expected))
    with pytest.raises(ValueError, match=r"no patch \(0, 4\)"):
        patch_similarity(features, (0, 4))


def test_colors_are_the_principal_components_of_all_images_together() -> None:
    features = random_features((3, 4), (5, 2))
    rows = np.concatenate([own.reshape(-1, 6).numpy() for own in features])
    values = project(rows, 3)
    expected = (values - values.min(0)) / (values.max(0) - values.min(0))
    first, second = feature_colors(features)
    np.testing.assert_allclose(first, expected[:12].reshape(3, 4, 3), atol=1e-9)
    np.testing.assert_allclose(second, expected[12:].reshape(5, 2, 3), atol=1e-9)
    assert torch.equal(feature_colors([torch.ones(2, 3, 6)])[0], torch.zeros(2, 3, 3).double())
    with pytest.raises(ValueError, match="3 patches with 6 features"):
        feature_colors(random_features((1, 3)))


@pytest.mark.parametrize("shape", [(20, 6), (4, 6)])
def test_principal_components_are_scikit_learns(shape: tuple[int, int]) -> None:
    rows = random_features((shape[0], 1), size=shape[1])[0][:, 0]
    components = principal_components(rows, 3)
    expected = PCA(3, svd_solver="full").fit(rows.numpy())
    np.testing.assert_allclose(components.abs(), np.abs(expected.components_), atol=1e-9)
    assert bool((components.gather(1, components.abs().argmax(1, keepdim=True)) > 0).all())
