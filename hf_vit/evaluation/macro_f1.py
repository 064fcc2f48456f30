"""Macro F1 as a module of `evaluate`."""

import datasets
import evaluate


class MacroF1(evaluate.Metric):
    """The F1 score of every class, averaged with equal weight, so that rare classes count as much as common ones.

    `compute(predictions=, references=)` takes class numbers (N,) and returns `{"macro_f1": ...}` in [0, 1]. A class
    that is neither predicted nor right for any image does not count (scikit-learn's rule).
    """

    def _info(self) -> evaluate.MetricInfo:
        """Describes the inputs."""
        return evaluate.MetricInfo(
            description="The F1 score of every class, averaged with equal weight.",
            citation="",
            inputs_description="predictions and references: class numbers (N,).",
            features=datasets.Features(
                {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        """Averages over the classes."""
        from sklearn.metrics import f1_score  # here, as training needs this module but not always its score

        return {"macro_f1": float(f1_score(references, predictions, average="macro", zero_division=0))}
