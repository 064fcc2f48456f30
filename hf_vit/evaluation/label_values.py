"""Scores of several labels per image and of regression, where NaN is a missing label; baselines without images.

Shapes: N images, K labels or values.
"""

from abc import abstractmethod

import numpy as np
import pandas as pd
import torch

from ..model.task_image_classification import classification_loss
from .classification import LogitsMetric


class LabelValueMetric(LogitsMetric):
    """Base of metrics that compare the logits (K,) of an image with K labels or values, NaN where one is missing."""

    problem_type: str

    def tables(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Returns the logits and the labels of all images so far, a column of float64 for each name."""
        parts = zip(*self.records, strict=True)
        logits, labels = (pd.DataFrame(np.array(part, dtype=np.float64), columns=[*self.names]) for part in parts)
        return logits, labels

    @abstractmethod
    def table(self) -> pd.DataFrame:
        """Returns the scores, in columns, of each class or value, in rows."""

    def per_class(self) -> dict[str, dict[str, float]]:
        """Returns the scores of each class or value, if there are several."""
        return self.table().to_dict("index") if len(self.names) > 1 else {}

    def compute(self) -> dict[str, float]:
        """Returns `loss` and the means of the scores over classes or values; those of nothing are NaN."""
        logits, labels = (torch.from_numpy(table.to_numpy(copy=True)) for table in self.tables())
        loss = classification_loss(logits, labels, self.problem_type)
        return dict(zip(("loss", *self.score_names), (loss.item(), *self.table().mean()), strict=False))

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

    def table(self) -> pd.DataFrame:
        """Returns `ap` and `f1` of each class."""
        from sklearn.metrics import average_precision_score, f1_score  # here, as not every training needs them

        logits, labels = self.tables()
        found = {}
        for name in self.names:
            is_right = labels[name].dropna() > 0.5
            own = logits[name][is_right.index]
            ap = average_precision_score(is_right, own) if is_right.any() else np.nan
            found[name] = {"ap": ap, "f1": f1_score(is_right, own > 0, zero_division=np.nan)}
        return pd.DataFrame(found).T

    def compute(self) -> dict[str, float]:
        """Returns `loss` and the scores of all images so far; those of nothing are NaN."""
        from sklearn.metrics import f1_score

        logits, labels = (table.to_numpy() for table in self.tables())
        is_known = ~np.isnan(labels)
        micro = f1_score(labels[is_known] > 0.5, logits[is_known] > 0, zero_division=np.nan)
        return {**super().compute(), "micro_f1": float(micro)}


class RegressionMetric(LabelValueMetric):
    """Mean absolute error, root of the mean squared error and coefficient of determination, means over K values."""

    problem_type = "regression"
    score_names = ("r2", "mae", "rmse")

    def table(self) -> pd.DataFrame:
        """Returns the scores, in columns, of each value, in rows."""
        logits, labels = self.tables()
        errors = logits - labels
        squares, deviations = (errors**2).mean(), labels.var(ddof=0)
        r2 = 1 - squares / deviations.where(deviations > 0)
        return pd.DataFrame({"r2": r2, "mae": errors.abs().mean(), "rmse": squares**0.5})
