"""Scores of classifiers, and the majority baseline."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import EvalPrediction

from ..model.task_image_classification import classification_loss
from .base import StreamedMetric


def image_classification_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Scores a classifier of one label per image: the Trainer's `compute_metrics`.

    The Trainer writes `loss` over its own, which is a mean over batches and counts the images twice that several
    processes share to fill their last batch. This one is the mean over images, whatever the batches.

    Args:
        prediction: `predictions` (N, K) logits and `label_ids` (N,).

    Returns:
        `loss` (cross-entropy), `accuracy`, `macro_f1` and, with more than 5 labels, `top_5_accuracy`.

    Raises:
        ValueError: if the two do not have these shapes.
    """
    logits, labels = np.asarray(prediction.predictions), np.asarray(prediction.label_ids)
    if logits.ndim != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"The scores need logits (N, num_labels) and class numbers (N,), not {logits.shape} and {labels.shape}."
        )
    from sklearn.metrics import f1_score  # here, as trainings need this module but not always its scores

    loss = classification_loss(torch.from_numpy(logits).double(), torch.from_numpy(labels), None)
    ranked = np.argsort(-logits, axis=1, kind="stable")[:, :5]
    is_right = ranked == labels[:, None]
    scores = {"loss": loss.item(), "accuracy": float(is_right[:, 0].mean())}
    if logits.shape[1] > 5:
        scores["top_5_accuracy"] = float(is_right.any(axis=1).mean())
    macro_f1 = f1_score(labels, ranked[:, 0], average="macro", zero_division=0)
    return {**scores, "macro_f1": float(macro_f1)}


class ClassificationMetric(StreamedMetric):
    """The scores of `image_classification_metrics`, including `loss`, and the confusion matrix.

    Args:
        names: Names of the classes.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = names
        self.score_names = ("accuracy", *(["top_5_accuracy"] if len(names) > 5 else []), "macro_f1")

    def record(self, prediction: Tensor, target: int) -> tuple[np.ndarray, int]:
        """Returns the logits (K,) and the class number of an image."""
        return prediction.numpy(force=True), target

    def compute(self) -> dict[str, float]:
        """Returns the scores of all images so far."""
        return image_classification_metrics(self._all())

    def confusion_matrix(self) -> np.ndarray:
        """Returns the number of images by right class and answer, (K, K) int64."""
        from sklearn.metrics import confusion_matrix

        logits, labels = self._all()
        counts: np.ndarray = confusion_matrix(labels, logits.argmax(axis=1), labels=range(len(self.names)))
        return counts

    def _all(self) -> EvalPrediction:
        logits, labels = zip(*self.records, strict=True)
        return EvalPrediction(np.stack(logits), np.array(labels))


def majority_baseline(train_labels: Sequence[int], labels: Sequence[int], num_labels: int) -> dict[str, float]:
    """Scores on `labels` of always giving the same answer: what a model has to beat.

    The answer ranks the classes by how common they are among `train_labels`, and gives each that share as probability.

    Raises:
        ValueError: if one of the two is empty.
    """
    if not len(train_labels) or not len(labels):
        raise ValueError(
            f"Both need labels, but there are {len(train_labels)} to train on and {len(labels)} to score."
        )
    counts = np.bincount(np.asarray(train_labels), minlength=num_labels)
    logits = np.log(np.maximum(counts, 1e-12) / counts.sum())
    return image_classification_metrics(EvalPrediction(np.tile(logits, (len(labels), 1)), np.asarray(labels)))
