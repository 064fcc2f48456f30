"""Scores of several labels per image and of regression, where NaN is a missing label; baselines without images.

Shapes: N images, K labels or values.
"""

import math
import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..model.task_image_classification import classification_loss
from .base import StreamedMetric, mean_of_known


class LabelValueMetric(StreamedMetric):
    """Base of metrics that compare the logits (K,) of an image with K labels or values, NaN where one is missing.

    Args:
        names: Names of the labels or values.
    """

    problem_type: str

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = names

    def record(self, prediction: Tensor, target: Sequence[float]) -> tuple[np.ndarray, Sequence[float]]:
        """Returns the logits (K,) and the labels of an image."""
        return prediction.numpy(force=True), target

    def scores(self, logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """Returns the scores of logits and labels, both (N, K) float64."""
        raise NotImplementedError

    def compute(self) -> dict[str, float]:
        """Returns `loss` and the scores of all images so far; those of nothing are NaN."""
        logits, labels = (np.array(values, dtype=np.float64) for values in zip(*self.records, strict=True))
        loss = classification_loss(torch.from_numpy(logits), torch.from_numpy(labels), self.problem_type)
        return {"loss": loss.item(), **self.scores(logits, labels)}

    def constant_scores(self, logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """Returns the scores on labels (N, K) of the same logits (K,) for every image."""
        self.reset()
        self.update((logits, row) for row in labels)
        return self.compute()


class MultiLabelMetric(LabelValueMetric):
    """Mean average precision, and F1 of the labels with a probability above 0.5.

    `mean_ap` is the mean over the classes that are right for any image, `macro_f1` that over those that are right
    or answered for any, `micro_f1` is of all answers together. Source: scikit-learn's definitions.
    """

    problem_type = "multi_label_classification"
    score_names = ("mean_ap", "macro_f1", "micro_f1")

    def per_class(self) -> dict[str, dict[str, float]]:
        """Returns `ap` and `f1` of each class."""
        logits, labels = (np.array(values, dtype=np.float64) for values in zip(*self.records, strict=True))
        aps, f1s, _ = self._of_classes(logits, labels)
        return {name: {"ap": ap, "f1": f1} for name, ap, f1 in zip(self.names, aps, f1s, strict=True)}

    def scores(self, logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """Returns the scores of logits and labels, both (N, K) float64."""
        aps, f1s, micro = self._of_classes(logits, labels)
        return {"mean_ap": mean_of_known(aps), "macro_f1": mean_of_known(f1s), "micro_f1": micro}

    def _of_classes(self, logits: np.ndarray, labels: np.ndarray) -> tuple[list[float], list[float], float]:
        """Returns the average precision and the F1 of each class, NaN where there is none, and the F1 of all."""
        from sklearn.metrics import (
            average_precision_score,  # here, as training needs this module but not always its score
        )

        aps, counts = [], np.zeros((2, len(self.names)))  # of right answers, and of answers and right labels together
        for number in range(len(self.names)):
            is_known = ~np.isnan(labels[:, number])
            is_right, own = labels[is_known, number] > 0.5, logits[is_known, number]
            aps.append(float(average_precision_score(is_right, own)) if is_right.any() else math.nan)
            counts[:, number] = (is_right & (own > 0)).sum(), is_right.sum() + (own > 0).sum()
        f1s = [2 * hits / total if total else math.nan for hits, total in counts.T.tolist()]
        hits, total = counts.sum(axis=1).tolist()
        return aps, f1s, 2 * hits / total if total else math.nan


class RegressionMetric(LabelValueMetric):
    """Mean absolute error, root of the mean squared error and coefficient of determination, means over K values."""

    problem_type = "regression"
    score_names = ("r2", "mae", "rmse")

    def per_class(self) -> dict[str, dict[str, float]]:
        """Returns the scores of each value, if there are several."""
        logits, labels = (np.array(values, dtype=np.float64) for values in zip(*self.records, strict=True))
        several = len(self.names) > 1
        return {
            name: self.scores(logits[:, [number]], labels[:, [number]])
            for number, name in enumerate(self.names if several else ())
        }

    def scores(self, logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """Returns the scores of values that are predicted and right, both (N, K) float64."""
        with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
            warnings.simplefilter("ignore", RuntimeWarning)  # of values without a label, which are NaN
            squares = np.nanmean((logits - labels) ** 2, axis=0)  # (K,)
            r2 = 1 - squares / np.nanvar(labels, axis=0)
            found = {"r2": r2, "mae": np.nanmean(abs(logits - labels), axis=0), "rmse": squares**0.5}
        return {name: mean_of_known(values[np.isfinite(values)].tolist()) for name, values in found.items()}
