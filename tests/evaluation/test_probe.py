"""Test the linear probe: its leave-one-out predictions, copies of images, and weights."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from sklearn.linear_model import Ridge
from torch import Tensor
from torch.nn.functional import one_hot

from hf_vit.features.probe import fit_probe


WEIGHTS = [0.2, 1.0, 4.0]


def draw(count: int, size: int, strength: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return random features (N, F) and classes (N,) from 0 to 2."""
    generator, classes = torch.Generator().manual_seed(seed), torch.arange(count) % 3
    centers = torch.randn(3, size, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return 5 + strength * centers[classes] + torch.randn(count, size, generator=generator).double(), classes


def analyze(scores: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Return the discriminant analysis of scores (N, K) with weights (N, 1): log densities of Gaussians and priors."""
    count, classes = targets.shape
    counts = (targets * weights).sum(axis=0)
    centers = (targets * weights).T @ scores / counts[:, None]
    deviations = scores - targets @ centers
    covariance = (weights * deviations).T @ deviations / weights.sum()
    covariance += classes / count * np.diagonal(covariance).mean() * np.eye(classes)
    shares = np.log(counts / counts.sum())
    return lambda new: np.stack(
        [
            multivariate_normal(center, covariance).logpdf(new) + share
            for center, share in zip(centers, shares, strict=True)
        ],
        axis=1,
    )


def assert_same_logits(found: Tensor, expected: np.ndarray) -> None:
    """Assert that logits (N, K) are equal up to a constant per image and a common factor."""
    expected = expected - expected.mean(axis=1, keepdims=True)
    centered = (found - found.mean(dim=1, keepdim=True)).numpy()
    factor = (centered * expected).sum() / (expected**2).sum()
    np.testing.assert_allclose(centered, factor * expected, atol=1e-6 * np.abs(centered).max())


@pytest.mark.parametrize(("count", "size"), [(60, 12), (40, 60)])
def test_predictions_are_those_of_refits_without_the_image_and_its_copies(count: int, size: int) -> None:
    features, classes = draw(count, size, 0.5)
    groups = torch.arange(count)
    features[[7, 20]], classes[[7, 20]], groups[[7, 20]] = features[4] + 0.01, int(classes[4]), 4
    found = fit_probe(features, classes, 3, groups=groups)
    scaled = ((features - features.mean(dim=0)) / features.std(dim=0)).numpy()
    targets, scores = one_hot(classes, 3).double().numpy(), []
    for number in range(count):
        kept = (groups != groups[number]).numpy()
        ridge = Ridge(found.penalty).fit(scaled[kept], targets[kept])
        scores.append(ridge.predict(scaled[[number]])[0] + targets.mean(axis=0) - targets[kept].mean(axis=0))
    weights = np.where(groups == 4, 1 / 3, 1.0)[:, None]
    expected = analyze(np.array(scores), targets, weights)
    assert_same_logits(found.left_out, expected(np.array(scores)))
    assert_same_logits(found.scores(features), expected(Ridge(found.penalty).fit(scaled, targets).predict(scaled)))
    assert found.accuracy == pytest.approx((np.argmax(scores, axis=1) == classes.numpy()).mean())
    assert 0.5 < found.accuracy < 1
    others, truth = draw(600, size, 0.5, seed=1)
    assert (found.predict(others) == truth).double().mean() == pytest.approx(found.accuracy, abs=0.15)


@pytest.mark.parametrize(("count", "size"), [(300, 20), (60, 200)])
def test_features_without_information_do_not_reveal_classes(count: int, size: int) -> None:
    assert fit_probe(*draw(count, size, 0.0), 3).accuracy < 0.5


def test_classes_without_images_are_not_predicted() -> None:
    features, classes = draw(40, 60, 0.5)
    found = fit_probe(features, classes, 5)
    logits = found.scores(features)
    assert logits.shape == (40, 5)
    assert logits.isfinite().all()
    assert int(logits.argmax(dim=1).max()) < 3


def test_weights_of_classes_and_images() -> None:
    classes = torch.tensor([0] * 200 + [1] * 40 + [2] * 10)
    features = torch.randn(250, 12, generator=torch.Generator().manual_seed(0)) + 1.2 * one_hot(classes, 12)
    plain, equal, weighted = (fit_probe(features, classes, 3, weights) for weights in (None, [3.0] * 3, WEIGHTS))
    assert "weighted by class" in str(weighted)
    torch.testing.assert_close(equal.weight, plain.weight, rtol=1e-5, atol=1e-7)
    assert equal.accuracy == plain.accuracy
    same = fit_probe(features, classes, 3, image_weights=torch.tensor(WEIGHTS).double()[classes])
    torch.testing.assert_close(same.weight, weighted.weight, rtol=1e-5, atol=1e-7)
    # A higher weight increases the recall of a rare class.
    rare = features[classes == 2]
    assert (weighted.predict(rare) == 2).sum() > (plain.predict(rare) == 2).sum()
    # An image with a weight near 0 has hardly any influence.
    wrong, ignored = classes.clone(), torch.ones(250).double()
    wrong[:20], ignored[:20] = 2, 0
    agreement = fit_probe(features, wrong, 3, image_weights=ignored).predict(features) == plain.predict(features)
    assert agreement.double().mean() > 0.97
