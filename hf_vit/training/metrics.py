"""Scores that the Trainer reports, from saved predictions alone."""

from collections.abc import Sequence

import numpy as np
from transformers import EvalPrediction


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Share of the images whose likeliest label is the right one: the Trainer's `compute_metrics` for one label each.

    Args:
        prediction: `predictions` (N, num_labels) and `label_ids` (N,).

    Returns:
        `accuracy` in [0, 1].

    Raises:
        ValueError: if the two do not have these shapes.
    """
    logits, labels = np.asarray(prediction.predictions), np.asarray(prediction.label_ids)
    if logits.ndim != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"Accuracy needs logits (N, num_labels) and class numbers (N,), not {logits.shape} and {labels.shape}."
        )
    return {"accuracy": float(np.mean(logits.argmax(axis=1) == labels))}


def majority_accuracy(train_labels: Sequence[int], labels: Sequence[int]) -> float:
    """Accuracy on `labels` of always answering the commonest of `train_labels`: what a model has to beat.

    Raises:
        ValueError: if one of the two is empty.
    """
    if not len(train_labels) or not len(labels):
        raise ValueError(
            f"Both need labels, but there are {len(train_labels)} to train on and {len(labels)} to score."
        )
    values, counts = np.unique(np.asarray(train_labels), return_counts=True)
    return float(np.mean(np.asarray(labels) == values[counts.argmax()]))
