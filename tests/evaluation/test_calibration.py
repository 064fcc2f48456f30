"""Test the fits of calibration, and the coverage of prediction sets and missed-object thresholds on drawn data."""

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_vit.evaluation.calibration import (
    CalibrationError,
    cross_fitted,
    fit_features,
    fit_missed,
    fit_scaling,
    fit_scores,
    fit_sets,
    score_calibration,
    score_sets,
)
from hf_vit.evaluation.detection import DetectionMetric
from hf_vit.model.calibration import HfViTCalibrationConfig, calibrate, find_threshold, nonconformity, undo_calibration


def draw(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return logits (count, 8), and labels drawn with the probabilities of these logits."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(count, 8, generator=generator)
    return logits, torch.multinomial(logits.softmax(dim=1), 1, generator=generator)[:, 0]


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_temperature_is_recovered(factor: float) -> None:
    logits, labels = draw(8000)
    found = fit_scaling(factor * logits, labels)
    assert found == {"temperature": pytest.approx(factor, rel=0.06), "offset": 0}
    scored = [
        score_calibration(values, labels)
        for values in (
            factor * logits,
            factor * logits / found["temperature"],
            cross_fitted(factor * logits, labels, False),
        )
    ]
    assert all(after[name] < before[name] for before, *others in [scored] for after in others for name in before)


def test_logistic_scaling_is_recovered_and_undone() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(20000, generator=generator)
    hits = (torch.rand(20000, generator=generator) < (0.6 * logits - 1).sigmoid()).double()
    found = fit_scaling(logits, hits, has_offset=True)
    assert found == {"temperature": pytest.approx(1 / 0.6, rel=0.06), "offset": pytest.approx(-1, abs=0.06)}
    options = HfViTCalibrationConfig(**found)
    torch.testing.assert_close(undo_calibration(calibrate(logits, options), options), logits)


@pytest.mark.parametrize("num_classes", [2, 3, 10, 100])
@pytest.mark.parametrize("count", [20, 48, 400])
def test_right_predictions_do_not_become_certain(count: int, num_classes: int) -> None:
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        scale = torch.rand(count, 1, generator=generator).mul(5).exp()
        logits = scale * torch.randn(count, num_classes, generator=generator)
        if seed == 0:  # close competitors of many images, far ones of others
            logits = torch.cat([torch.ones(count, 1), torch.zeros(count, num_classes - 1)], dim=1)
            logits[::2, 2:] -= 20
        temperature = fit_scaling(logits, logits.argmax(dim=1))["temperature"]
        assert (logits.double() / temperature).softmax(dim=1).amax(dim=1).mean() < 1 - 1 / (count + 2)


def test_hits_alone_do_not_become_certain() -> None:
    for count in (20, 48, 400):
        logits = 3 * torch.randn(count, generator=torch.Generator().manual_seed(0)).double()
        for hits, sign in ((torch.ones(count), 1), (torch.zeros(count), -1)):
            found = fit_scaling(logits, hits, has_offset=True)
            scores = sign * (logits / found["temperature"] + found["offset"])
            assert 1 - 2 / count < scores.sigmoid().mean() < 1 - 1 / (count + 2)
            assert 0.5 < found["temperature"] < 5  # hits do not determine it
        temperature = fit_scaling(logits, (logits > 0).double())["temperature"]
        assert (logits.abs() / temperature).sigmoid().mean() < 1 - 1 / (count + 2)


def test_one_class_has_no_temperature() -> None:
    assert fit_scaling(torch.randn(30, 1), torch.zeros(30).long()) == {"temperature": 1, "offset": 0}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_invalid_logits_raise_an_error(value: float) -> None:
    logits, labels = draw(30)
    logits[3, 2] = value
    with pytest.raises(CalibrationError, match="Some logits are infinite or NaN"):
        fit_scaling(logits, labels)


def test_few_errors_are_noted_and_worse_scores_are_not_used() -> None:
    old = HfViTCalibrationConfig(temperature=1.5)
    logits, labels = draw(2000)
    scaling, note = fit_scores(3 * logits, labels, False, old, "60 images")
    assert scaling["temperature"] == pytest.approx(3, rel=0.1)
    errors = int((logits.argmax(dim=1) != labels).sum())
    assert note == f"The scores were calibrated on 60 images ({errors} errors)."
    few = 3 * logits, torch.cat([labels[:9], logits.argmax(dim=1)[9:]])
    assert "With fewer than 10 errors, high scores are uncertain." in fit_scores(*few, False, old, "60 images")[1]
    # The scores of these images are calibrated already, so that a fit on other images makes them worse.
    scaling, note = fit_scores(*draw(40, 1), False, old, "40 images")
    assert scaling == {"temperature": 1.5, "offset": 0}
    assert "The scores remain as they were: on 40 images" in note
    assert "negative log-likelihood (" in note


def test_scores_of_detections_become_logits_with_their_hits() -> None:
    metric = DetectionMetric(["cell", "platelet"])
    target = {"boxes": np.array([[0, 0, 10, 10.0]]), "class_labels": [0]}
    assert [len(values) for values in metric.score_logits()] == [0, 0]
    boxes, labels = np.array([[0, 0, 10, 9.0], [0, 0, 10, 10.0], [0, 0, 10, 10.0]]), [0, 1, 0]
    metric.update([metric.record({"boxes": boxes, "class_labels": labels, "scores": [0.8, 0.5, 0.2]}, target)])
    logits, hits = metric.score_logits()
    assert sorted(zip(logits.sigmoid().tolist(), hits.tolist(), strict=True)) == [
        (pytest.approx(0.2), 0),
        (pytest.approx(0.5), 0),
        (pytest.approx(0.8), 1),
    ]


def test_calibration_scores_match_their_definitions() -> None:
    logits = torch.tensor([[2.0, 0.0], [2.0, 0.0], [0.0, 2.0], [0.0, 2.0]])
    labels, p = torch.tensor([0, 0, 1, 0]), float(torch.tensor(2.0).sigmoid())
    scores = score_calibration(logits, labels)
    assert scores["expected calibration error"] == pytest.approx(p - 0.75, abs=1e-6)
    assert scores["Brier score"] == pytest.approx(2 * (3 * (1 - p) ** 2 + p**2) / 4)
    assert scores["negative log-likelihood"] == pytest.approx(-(3 * np.log(p) + np.log(1 - p)) / 4)


@pytest.mark.parametrize("count", [60, 700])
def test_prediction_sets_cover_the_label(count: int) -> None:
    found: dict[str, list[float]] = {"thr": [], "aps": []}
    for seed in range(10):
        logits, labels = draw(count + 3000, seed)
        options = HfViTCalibrationConfig(**fit_sets(logits[:count], labels[:count]))
        scores = score_sets(logits[count:], labels[count:], options)
        for method, values in found.items():
            values.append(scores[f"0.9 {method}"]["coverage"])
        assert max(options.coverages) <= count / (count + 1)
    assert all(0.88 < np.mean(values) < 0.94 for values in found.values())


def test_aps_sets_contain_the_most_likely_labels_up_to_the_threshold() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1]]).log()
    assert (nonconformity(logits, "aps") <= 0.6).tolist() == [[True, True, False], [False, True, False]]
    assert (nonconformity(logits, "thr") <= 0.71).tolist() == [[True, True, False], [False, True, False]]
    assert (nonconformity(logits, "thr") <= 0).sum(dim=1).tolist() == [1, 1]  # never empty


def test_values_outside_the_stored_range_raise_an_error() -> None:
    found = fit_sets(*draw(20))
    known = found["coverages"], found["thr_thresholds"]
    assert max(found["coverages"]) == 0.95
    with pytest.raises(ValueError, match=r"coverage=0\.99 is not within 0\.5 to 0\.95, .* on more images"):
        find_threshold("coverage", 0.99, *known, is_least=True)
    assert find_threshold("coverage", 0.87, *known, is_least=True) == known[1][known[0].index(0.9)]
    assert find_threshold("max_missed", 0.17, (0.1, 0.15, 0.2), (0.1, 0.2, 0.3), is_least=False) == 0.2


def test_missed_objects_are_limited() -> None:
    random = np.random.default_rng(0)

    def image() -> tuple[list[tuple[float, bool]], int]:
        return [(float(score), bool(random.random() < 0.97)) for score in random.beta(3, 1.5, size=5)], 5

    missed = []
    for _ in range(20):
        found = fit_missed([image() for _ in range(200)])
        threshold = dict(zip(found["missed_shares"], found["missed_thresholds"], strict=True))[0.2]
        new = [image() for _ in range(300)]
        missed += [1 - sum(right and score > threshold for score, right in pairs) / count for pairs, count in new]
    assert 0.17 < np.mean(missed) < 0.21


def test_images_unlike_the_training_images_have_no_similarity() -> None:
    generator = torch.Generator().manual_seed(0)
    centers = 3 * torch.randn(4, 16, generator=generator)
    labels = torch.arange(400) % 4
    train, held, new, other = (
        centers[labels] + torch.randn(400, 16, generator=generator) + shift for shift in (0.0, 0.0, 0.0, 4.0)
    )
    summary = fit_features(train, labels, held, max_bytes=15_000)
    assert summary is not None
    assert len(summary.features) < len(train)
    assert sum(value.nbytes for value in vars(summary).values()) <= 15_000
    for kind in ("mahalanobis", "knn"):
        assert summary.similarity(new, kind).mean() == pytest.approx(0.5, abs=0.08)
        assert summary.similarity(other, kind).mean() < 0.02
    assert fit_features(train, labels, held, max_bytes=1000) is None
