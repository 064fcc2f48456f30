"""Scores that the Trainer reports, from saved predictions alone."""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import EvalPrediction

from ..model.task_classification import classification_loss
from . import MacroF1, TopKAccuracy


# Of a classifier; with more than five labels also "top_5_accuracy"
SCORES = ("loss", "accuracy", "macro_f1")


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
    loss = classification_loss(torch.from_numpy(logits).double(), torch.from_numpy(labels), None)
    ranked = np.argsort(-logits, axis=1, kind="stable")[:, :5]
    top_k = TopKAccuracy(keep_in_memory=True)
    scores = {"loss": loss.item(), **top_k.compute(predictions=ranked, references=labels)}
    if logits.shape[1] > 5:
        scores |= TopKAccuracy(keep_in_memory=True).compute(predictions=ranked, references=labels, k=5)
    return scores | MacroF1(keep_in_memory=True).compute(predictions=ranked[:, 0], references=labels)


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
