"""The linear probe with class weights."""

import pytest
import torch
from sklearn.linear_model import Ridge
from torch.nn.functional import one_hot

from hf_vit.training.finetuning.probe import PENALTIES, fit_probe


WEIGHTS = [0.2, 1.0, 4.0]


@pytest.fixture(scope="module")
def images() -> tuple[torch.Tensor, torch.Tensor]:
    """Return features (M, F) and classes (M,) of images. The first class is much more frequent than the others."""
    classes = torch.tensor([0] * 200 + [1] * 40 + [2] * 10)
    return torch.randn(250, 12) + 1.2 * one_hot(classes, 12), classes


def test_it_is_the_weighted_ridge_regression_of_scikit_learn(images: tuple[torch.Tensor, torch.Tensor]) -> None:
    features, classes = images
    probe, targets = fit_probe(features, classes, 3, WEIGHTS), one_hot(classes, 3).double().numpy()
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)[classes]
    weights = weights / weights.mean()
    mean = (weights[:, None] * features).mean(0)
    deviation = ((weights[:, None] * (features - mean) ** 2).sum(0) / 249).sqrt()
    errors = []
    for penalty in PENALTIES:
        ridge = Ridge(alpha=float(penalty)).fit(((features - mean) / deviation).numpy(), targets, weights.numpy())
        weight = torch.from_numpy(ridge.coef_) / deviation
        bias = torch.from_numpy(ridge.intercept_) - weight @ mean
        scale = probe.weight.norm() / weight.norm()
        errors.append(max((probe.weight - scale * weight).abs().max(), (probe.bias - scale * bias).abs().max()))
    assert min(errors) < 1e-9
    assert "weighted by class" in str(probe)


def test_equal_weights_change_nothing_and_others_find_rare_classes(images: tuple[torch.Tensor, torch.Tensor]) -> None:
    features, classes = images
    plain, equal, weighted = (fit_probe(features, classes, 3, weights) for weights in (None, [3.0] * 3, WEIGHTS))
    torch.testing.assert_close(equal.weight, plain.weight, rtol=1e-9, atol=1e-9)
    assert equal.accuracy == plain.accuracy

    def found(weight: torch.Tensor, bias: torch.Tensor) -> int:
        predictions = (features.double() @ weight.T + bias).argmax(dim=1)
        return int((predictions[classes == 2] == 2).sum())

    assert found(weighted.weight, weighted.bias) > found(plain.weight, plain.bias)
