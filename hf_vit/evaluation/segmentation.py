"""Scores of semantic segmentation, from a confusion matrix of pixels."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from ..model.image_targets import IGNORED_LABEL
from .base import StreamedMetric, as_array, check_labels, check_same_size, mean_of_known


Record = dict[str, np.ndarray]


class SemanticSegmentationMetric(StreamedMetric):
    """Mean IoU, accuracies and Dice over the pixels of all images together, as mmsegmentation counts them.

    IoU and Dice of a class count where it occurs in targets or predictions (torchmetrics does so too), its accuracy
    where it occurs in targets. Elsewhere they are NaN and left out of the means.

    Args:
        names: The K class names.
        ignore_index: Target of the pixels that do not count.
    """

    score_names = ("mean_iou", "pixel_accuracy", "mean_accuracy", "mean_dice")

    def __init__(self, names: Sequence[str], ignore_index: int = IGNORED_LABEL) -> None:
        super().__init__()
        self.names = list(names)
        self.ignore_index = ignore_index

    def record(self, prediction: ArrayLike | Tensor, target: ArrayLike | Tensor) -> Record:
        """Returns the cells of the confusion matrix in which one image has pixels, and how many.

        Args:
            prediction: (H, W) class numbers.
            target: (H, W) class numbers, or `ignore_index`.

        Raises:
            ValueError: if the sizes differ, or class numbers are too large or negative.
        """
        answers, labels = as_array(prediction, np.int64), as_array(target, np.int64)
        check_same_size(answers, labels)
        counted = labels != self.ignore_index
        answers, labels = answers[counted], labels[counted]
        check_labels(answers, self.names, "prediction")
        check_labels(labels, self.names, "target")
        counts = np.bincount(labels * len(self.names) + answers)
        cells = np.flatnonzero(counts)
        return {"cells": cells, "counts": counts[cells]}

    @property
    def confusion_matrix(self) -> np.ndarray:
        """Numbers of pixels (K, K), a row for each right class and a column for each answer."""
        counts = np.zeros(len(self.names) ** 2, dtype=np.int64)
        for record in self.records:
            counts[record["cells"]] += record["counts"]
        return counts.reshape(len(self.names), len(self.names))

    def per_class(self) -> dict[str, dict[str, float]]:
        """Returns `iou`, `accuracy` (the share of its pixels that were found) and `dice` of each class."""
        matrix = self.confusion_matrix
        right, labels, answers = matrix.diagonal(), matrix.sum(axis=1), matrix.sum(axis=0)
        with np.errstate(invalid="ignore"):  # 0 / 0 is the NaN of an absent class
            scores = {
                "iou": right / (labels + answers - right),
                "accuracy": right / labels,
                "dice": 2 * right / (labels + answers),
            }
        return {
            name: {score: float(values[number]) for score, values in scores.items()}
            for number, name in enumerate(self.names)
        }

    def compute(self) -> dict[str, float]:
        """Returns `mean_iou`, `pixel_accuracy`, `mean_accuracy` and `mean_dice`, all in [0, 1]."""
        classes = self.per_class().values()
        matrix = self.confusion_matrix
        pixels = matrix.sum()
        return {
            "mean_iou": mean_of_known(scores["iou"] for scores in classes),
            "pixel_accuracy": float(matrix.trace() / pixels) if pixels else math.nan,
            "mean_accuracy": mean_of_known(scores["accuracy"] for scores in classes),
            "mean_dice": mean_of_known(scores["dice"] for scores in classes),
        }
