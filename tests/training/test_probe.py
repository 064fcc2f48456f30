"""Test the linear probe: its leave-one-out accuracy, and class weights."""

import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.model_selection import LeaveOneOut, cross_val_predict
from torch.nn.functional import one_hot

from hf_vit.training.finetuning.probe import PENALTIES, fit_probe


WEIGHTS = [0.2, 1.0, 4.0]


def test_the_accuracy_is_that_of_images_left_out_one_by_one() -> None:
    generator, classes = torch.Generator().manual_seed(0), torch.arange(40) % 3
    centers = torch.randn(3, 60, generator=generator, dtype=torch.float64)
    noise = torch.randn(40, 60, generator=generator, dtype=torch.float64)
    features = 5 + 0.5 * centers[classes] + 2 * noise
    found = fit_probe(features, classes, 3)
    scaled = (features - features.mean(dim=0)) / features.std(dim=0)
    # Ridge accepts one penalty per target, so a single fit on repeated targets covers all penalties.
    ridge, targets = Ridge(PENALTIES.repeat_interleave(3).numpy()), one_hot(classes, 3).repeat(1, len(PENALTIES))
    answers = cross_val_predict(ridge, scaled, targets, cv=LeaveOneOut()).reshape(40, -1, 3).argmax(axis=2)
    assert found.accuracy == pytest.approx((answers == classes[:, None].numpy()).mean(axis=0).max())
    assert 0.5 < found.accuracy < 1
    predictions = (features @ found.weight.T + found.bias).argmax(dim=1)
    assert (predictions == classes).double().mean() > found.accuracy
    # The probe does not predict classes without images.
    found = fit_probe(features, classes, 5)
    logits = features @ found.weight.T + found.bias
    assert logits.shape == (40, 5)
    assert int(logits.argmax(dim=1).max()) < 3


def test_class_weights_are_those_of_the_ridge_regression_of_scikit_learn() -> None:
    classes = torch.tensor([0] * 200 + [1] * 40 + [2] * 10)
    features = torch.randn(250, 12) + 1.2 * one_hot(classes, 12)
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
    # Equal class weights do not change the probe. A higher weight increases the recall of a rare class.
    plain, equal = (fit_probe(features, classes, 3, weights) for weights in (None, [3.0] * 3))
    torch.testing.assert_close(equal.weight, plain.weight, rtol=1e-9, atol=1e-9)
    assert equal.accuracy == plain.accuracy
    rare = features[classes == 2].double()
    weighted_found, plain_found = (
        ((rare @ each.weight.T + each.bias).argmax(dim=1) == 2).sum() for each in (probe, plain)
    )
    assert weighted_found > plain_found
