"""Classification metrics for `evaluate` and the Trainer, and the majority-class baseline."""

from collections.abc import Sequence
from typing import Any, ClassVar

import datasets
import evaluate
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import EvalPrediction

from ..model.task_image_classification import classification_loss
from .base import StreamedMetric


class _ClassMetric(evaluate.Metric):
    """Base class of metrics that compare predicted with true class numbers.

    The docstring of a subclass becomes the description in its `MetricInfo`.
    """

    prediction_type: ClassVar[Any] = datasets.Value("int64")

    def _info(self) -> evaluate.MetricInfo:
        summary, _, inputs = str(self.__doc__).partition("\n\n")
        features = datasets.Features({"predictions": self.prediction_type, "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description=summary, citation="", inputs_description=inputs, features=features)


class TopKAccuracy(_ClassMetric):
    """Share of images whose true class is among the k most likely classes.

    `compute(predictions=, references=, k=1)` takes two arguments with one entry per image: `predictions` are lists of
    at least k class numbers, the most likely first, and `references` are the true class numbers. It returns
    `{"accuracy": ...}` for k = 1, else `{"top_{k}_accuracy": ...}`.
    """

    prediction_type = datasets.Sequence(datasets.Value("int64"))

    def _compute(self, predictions: list[list[int]], references: list[int], k: int = 1) -> dict[str, float]:
        ranked = np.asarray(predictions)
        if k < 1 or ranked.shape[1] < k:
            raise ValueError(
                f"k={k} must be between 1 and {ranked.shape[1]}, the number of predicted classes per image."
            )
        hits = (ranked[:, :k] == np.asarray(references)[:, None]).any(axis=1)
        return {"accuracy" if k == 1 else f"top_{k}_accuracy": float(hits.mean())}


class MacroF1(_ClassMetric):
    """Unweighted mean of the F1 scores of all classes. Rare and common classes have the same weight.

    `compute(predictions=, references=)` takes predicted and true class numbers, both (N,), and returns
    `{"macro_f1": ...}` in [0, 1]. A class that occurs neither in predictions nor in references is ignored, as in
    scikit-learn.
    """

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        from sklearn.metrics import f1_score  # Imported lazily: most training runs do not need scikit-learn

        return {"macro_f1": float(f1_score(references, predictions, average="macro", zero_division=0))}


def image_classification_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Compute the scores of a single-label classifier. Usable as `compute_metrics` of the Trainer.

    The returned `loss` is the exact mean over images and replaces the loss of the Trainer. The Trainer averages the
    loss over batches, and includes duplicates of images that fill the last batch of a process.

    Args:
        prediction: `predictions` (N, K) logits and `label_ids` (N,).

    Returns:
        `loss` (cross-entropy), `accuracy`, `macro_f1` and, with more than 5 labels, `top_5_accuracy`.

    Raises:
        ValueError: if the shapes of logits and labels do not match.
    """
    logits, labels = np.asarray(prediction.predictions), np.asarray(prediction.label_ids)
    if logits.ndim != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"Expected logits (N, num_labels) and class numbers (N,), but got {logits.shape} and {labels.shape}."
        )
    loss = classification_loss(torch.from_numpy(logits).double(), torch.from_numpy(labels), None)
    ranked = np.argsort(-logits, axis=1, kind="stable")[:, :5]
    top_k = TopKAccuracy(keep_in_memory=True)
    scores = {"loss": loss.item(), **top_k.compute(predictions=ranked, references=labels)}
    if logits.shape[1] > 5:
        scores |= TopKAccuracy(keep_in_memory=True).compute(predictions=ranked, references=labels, k=5)
    return scores | MacroF1(keep_in_memory=True).compute(predictions=ranked[:, 0], references=labels)


class LogitsMetric(StreamedMetric):
    """Base class of metrics that compare the logits (K,) of each image with its label or labels.

    Args:
        names: Names of the K classes or regression values.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = names

    def record(self, prediction: Tensor, target: Any) -> tuple[np.ndarray, Any]:
        """Return the logits (K,) and the target of an image."""
        return prediction.numpy(force=True), target

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return the logits (N, K) and the labels (N,) or (N, K) of all images added so far."""
        logits, labels = zip(*self.records, strict=True)
        return torch.from_numpy(np.stack(logits)), torch.from_numpy(np.array(labels))


class ClassificationMetric(LogitsMetric):
    """Scores of `image_classification_metrics`, including `loss`, and the confusion matrix."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self.score_names = ("accuracy", *(["top_5_accuracy"] if len(names) > 5 else []), "macro_f1")

    def compute(self) -> dict[str, float]:
        """Return the scores of all images added so far."""
        logits, labels = self.tensors()
        return image_classification_metrics(EvalPrediction(logits.numpy(), labels.numpy()))

    def score_classes(self, name: str) -> dict[str, float]:
        """Return the recall of each class that has images; it is the only score of a class."""
        matrix = self.confusion_matrix()
        rows = zip(self.names, matrix.diagonal(), matrix.sum(axis=1), strict=True)
        return {label: float(right / count) for label, right, count in rows if count}

    def losses(self, class_weights: Sequence[float] | None = None) -> np.ndarray:
        """Return the cross-entropy of each image, (M,) float64, multiplied by `class_weights[label]` if given."""
        logits, labels = self.tensors()
        losses = F.cross_entropy(logits.double(), labels, reduction="none")
        return (losses if class_weights is None else losses * torch.tensor(class_weights)[labels]).numpy()

    def confusion_matrix(self) -> np.ndarray:
        """Return the number of images for each pair of true class (row) and predicted class (column), (K, K) int64."""
        from sklearn.metrics import confusion_matrix  # Imported lazily: most training runs do not need scikit-learn

        logits, labels = self.tensors()
        counts: np.ndarray = confusion_matrix(labels, logits.numpy().argmax(axis=1), labels=range(len(self.names)))
        return counts


def majority_baseline(train_labels: Sequence[int], labels: Sequence[int], num_labels: int) -> dict[str, float]:
    """Return the scores of a baseline that ignores the image, evaluated on `labels`.

    For every image, the baseline predicts the class frequencies of `train_labels` as class probabilities. Its top
    prediction is therefore the most frequent training class.

    Raises:
        ValueError: if `train_labels` or `labels` is empty.
    """
    if not len(train_labels) or not len(labels):
        raise ValueError(
            f"Training and evaluation images need labels, but there are {len(train_labels)} training labels and "
            f"{len(labels)} evaluation labels."
        )
    counts = np.bincount(np.asarray(train_labels), minlength=num_labels)
    logits = np.log(np.maximum(counts, 1e-12) / counts.sum())
    return image_classification_metrics(EvalPrediction(np.tile(logits, (len(labels), 1)), np.asarray(labels)))
