"""Test that multi-label and regression metrics agree with scikit-learn and exclude missing labels."""

import numpy as np
import pytest
import torch
from sklearn import metrics

from hf_vit.evaluation.label_values import LabelValueMetric, MultiLabelMetric, RegressionMetric
from hf_vit.model.task_image_classification import classification_loss


N, K = 60, 4
NAMES = list("abcd")


def filled(metric: LabelValueMetric, logits: np.ndarray, labels: np.ndarray) -> LabelValueMetric:
    pairs = zip(torch.from_numpy(logits), labels.tolist(), strict=True)
    metric.update(metric.record(*pair) for pair in pairs)
    return metric


def test_scores_of_several_labels_count_no_missing_labels() -> None:
    rng = np.random.default_rng(0)
    # Logits are rounded, so that many of them are equal.
    logits, labels = rng.normal(size=(N, K)).round(1), (rng.random((N, K)) < 0.3).astype(float)
    metric = filled(MultiLabelMetric(NAMES), logits, labels)
    scores, answers = metric.compute(), logits > 0
    assert scores == pytest.approx(
        {
            "loss": np.mean([metrics.log_loss(labels[:, k], 1 / (1 + np.exp(-logits[:, k]))) for k in range(K)]),
            "mean_ap": metrics.average_precision_score(labels, logits, average="macro"),
            "macro_f1": metrics.f1_score(labels, answers, average="macro"),
            "micro_f1": metrics.f1_score(labels, answers, average="micro"),
        },
        abs=1e-12,
    )
    assert metric.per_class()["b"]["f1"] == pytest.approx(metrics.f1_score(labels[:, 1], answers[:, 1]))
    # Missing labels are excluded from all scores.
    rng = np.random.default_rng(1)
    logits, labels = rng.normal(size=(N, K)), (rng.random((N, K)) < 0.4).astype(float)
    labels[rng.random((N, K)) < 0.3] = np.nan
    labels[:, 3] = np.where(np.isnan(labels[:, 3]), np.nan, 0.0)  # no label of the last class is positive
    scores, known = filled(MultiLabelMetric(NAMES), logits, labels).compute(), ~np.isnan(labels)
    parts = [(labels[known[:, k], k], logits[known[:, k], k]) for k in range(K)]
    aps = [metrics.average_precision_score(*part) for part in parts[:3]]
    f1s = [metrics.f1_score(right, own > 0, zero_division=0) for right, own in parts]
    assert (scores["mean_ap"], scores["macro_f1"]) == pytest.approx((np.mean(aps), np.mean(f1s)))
    assert scores["micro_f1"] == pytest.approx(metrics.f1_score(labels[known], logits[known] > 0))
    assert scores["loss"] == pytest.approx(metrics.log_loss(labels[known], 1 / (1 + np.exp(-logits[known]))))


def test_scores_of_values_and_of_a_constant_answer() -> None:
    rng = np.random.default_rng(2)
    labels = rng.normal(50, 10, (N, K))
    values = labels + rng.normal(size=(N, K))
    scores = filled(RegressionMetric(NAMES), values, labels).compute()
    names = {"loss": "mean_squared_error", "r2": "r2_score", "mae": "mean_absolute_error"}
    names["rmse"] = "root_mean_squared_error"
    assert scores == pytest.approx({key: getattr(metrics, name)(labels, values) for key, name in names.items()})
    labels[: N // 2, 0] = np.nan
    metric = filled(RegressionMetric(NAMES), values, labels)
    expected = metrics.r2_score(labels[N // 2 :, 0], values[N // 2 :, 0])
    assert metric.per_class()["a"]["r2"] == pytest.approx(expected)
    others = metrics.r2_score(labels[:, 1:], values[:, 1:])
    assert metric.compute()["r2"] == pytest.approx((expected + 3 * others) / 4)
    # The average precision of a constant prediction is the fraction of positive images.
    labels = np.array([[1.0, 0], [0, 0], [1, 1], [0, np.nan]])
    scores = MultiLabelMetric(["a", "b"]).constant_scores(np.array([0.1, -2.0]), labels)
    assert scores["mean_ap"] == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert scores["micro_f1"] == pytest.approx(2 * 2 / (4 + 3))


@pytest.mark.parametrize("problem_type", ["multi_label_classification", "regression"])
def test_the_loss_leaves_missing_labels_out(problem_type: str) -> None:
    logits = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[0, 1, 1], [1, 0, 1], [0, 0, 1], [1, 1, 0]], dtype=torch.float64)
    whole = classification_loss(logits, labels, problem_type)
    is_multi = problem_type.startswith("multi")
    loss_of = torch.nn.functional.binary_cross_entropy_with_logits if is_multi else torch.nn.functional.mse_loss
    torch.testing.assert_close(whole, loss_of(logits, labels))
    missing = labels.clone()
    missing[0, 1] = missing[3] = float("nan")
    known = ~missing.isnan()
    loss = classification_loss(logits, missing, problem_type)
    torch.testing.assert_close(loss, loss_of(logits[known], labels[known]))
    loss.backward()
    assert logits.grad is not None
    assert torch.equal(logits.grad != 0, known)
    nothing = classification_loss(logits, torch.full_like(labels, float("nan")), problem_type)
    assert nothing.item() == 0
