"""Metrics of multi-label classification and regression. NaN marks a missing label.

Shapes: N images, K labels or values.
"""

from abc import abstractmethod

import numpy as np
import pandas as pd
import torch

from ..model.task_image_classification import classification_loss
from .classification import LogitsMetric


class LabelValueMetric(LogitsMetric):
    """Base class of metrics that compare the logits (K,) of an image with K labels or values (NaN if missing)."""

    problem_type: str

    def tables(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Return two float64 tables with the logits and the labels of all images, with one column per name."""
        parts = zip(*self.records, strict=True)
        logits, labels = (pd.DataFrame(np.array(part, dtype=np.float64), columns=[*self.names]) for part in parts)
        return logits, labels

    @abstractmethod
    def table(self) -> pd.DataFrame:
        """Return a table of scores with one row per class or regression value."""

    def per_class(self) -> dict[str, dict[str, float]]:
        """Return a dict of scores for each class or regression value; empty if there is only one."""
        return self.table().to_dict("index") if len(self.names) > 1 else {}

    def compute(self) -> dict[str, float]:
        """Return `loss`, and the mean of each score over classes or regression values; NaN without data."""
        logits, labels = (torch.from_numpy(table.to_numpy(copy=True)) for table in self.tables())
        loss = classification_loss(logits, labels, self.problem_type)
        return dict(zip(("loss", *self.score_names), (loss.item(), *self.table().mean()), strict=False))

    def constant_scores(self, logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """Return the scores of a baseline that predicts the same logits (K,) for every image, given labels (N, K)."""
        self.reset()
        self.update((logits, row) for row in labels)
        return self.compute()


class MultiLabelMetric(LabelValueMetric):
    """Mean average precision, and F1 scores of labels predicted with a probability above 0.5.

    `mean_ap` is the mean average precision over classes with a positive label. `macro_f1` is the mean F1 over classes
    with a positive label or a positive prediction. `micro_f1` is computed over all labels together. Definitions follow
    scikit-learn.
    """

    problem_type = "multi_label_classification"
    score_names = ("mean_ap", "macro_f1", "micro_f1")

    def table(self) -> pd.DataFrame:
        """Return `ap` and `f1` of each class."""
        from sklearn.metrics import average_precision_score, f1_score  # imported lazily: most runs do not use sklearn

        logits, labels = self.tables()
        found = {}
        for name in self.names:
            is_right = labels[name].dropna() > 0.5
            own = logits[name][is_right.index]
            ap = average_precision_score(is_right, own) if is_right.any() else np.nan
            found[name] = {"ap": ap, "f1": f1_score(is_right, own > 0, zero_division=np.nan)}
        return pd.DataFrame(found).T

    def compute(self) -> dict[str, float]:
        """Return `loss` and the scores of all images added so far; NaN without data."""
        from sklearn.metrics import f1_score

        logits, labels = (table.to_numpy() for table in self.tables())
        is_known = ~np.isnan(labels)
        micro = f1_score(labels[is_known] > 0.5, logits[is_known] > 0, zero_division=np.nan)
        return {**super().compute(), "micro_f1": float(micro)}


class RegressionMetric(LabelValueMetric):
    """R², mean absolute error and root mean squared error, each averaged over the K regression values."""

    problem_type = "regression"
    score_names = ("r2", "mae", "rmse")

    def table(self) -> pd.DataFrame:
        """Return a table of scores with one row per regression value."""
        logits, labels = self.tables()
        errors = logits - labels
        squares, deviations = (errors**2).mean(), labels.var(ddof=0)
        r2 = 1 - squares / deviations.where(deviations > 0)
        return pd.DataFrame({"r2": r2, "mae": errors.abs().mean(), "rmse": squares**0.5})
