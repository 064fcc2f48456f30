"""Confusion matrix as a module of `evaluate`."""

import datasets
import evaluate
import numpy as np


class ConfusionMatrix(evaluate.Metric):
    """How many images of each class were taken for which.

    `compute(predictions=, references=, num_labels=K)` takes class numbers (N,) and returns
    `{"confusion_matrix": (K, K) int64}` with a row for each right class and a column for each answer.
    """

    def _info(self) -> evaluate.MetricInfo:
        """Describes the inputs."""
        return evaluate.MetricInfo(
            description="How many images of each class were taken for which.",
            citation="",
            inputs_description="predictions and references: class numbers (N,).",
            features=datasets.Features(
                {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions: list[int], references: list[int], num_labels: int) -> dict[str, np.ndarray]:
        """Counts."""
        from sklearn.metrics import confusion_matrix  # here, as training needs this module but not always its score

        return {"confusion_matrix": confusion_matrix(references, predictions, labels=range(num_labels))}
