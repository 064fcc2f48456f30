"""The score above which predictions are given as answers."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike


# Of the best F1, or half of what a single object makes of it, within limits: less makes no threshold the better one
TOLERANCE, MAX_TOLERANCE = 0.01, 0.1


class Threshold(NamedTuple):
    """A score above which predictions are given as answers, and what that is worth on images that have chosen it.

    Args:
        value: The score.
        quality: The F1 of the answers.
        nms: The overlap (IoU) with a surer one above which a box is left out before, if any.
        measure: What the quality is, if not the F1.
    """

    value: float
    quality: float
    nms: float | None = None
    measure: str = "F1"


def best_threshold(scores: ArrayLike, is_correct: ArrayLike, num_truths: int) -> Threshold | None:
    """Returns the threshold of the best F1, the harmonic mean of precision and recall.

    The F1 of few images jumps from score to score. So of the thresholds that are about as good as the best one, the
    middle one is taken.

    Args:
        scores: (N,) of all predictions.
        is_correct: (N,) bool, whether a prediction is the right one of a truth. No truth has two of them.
        num_truths: Number of what there is to be found.

    Returns:
        The threshold; None where no prediction is correct.
    """
    values, hits = np.asarray(scores, dtype=np.float64), np.asarray(is_correct, dtype=bool)
    if not hits.any():
        return None
    order = np.argsort(-values, kind="stable")
    values, hits = values[order], hits[order].cumsum()
    last = np.flatnonzero(np.diff(values, append=-np.inf))  # of equal scores all are answers, or none
    f1 = 2 * hits[last] / (last + 1 + num_truths)
    # between the least score that is above and the largest that is not
    ends = np.append(values[last[1:]], min(0.0, 2 * values[-1]))
    cuts = (values[last] + ends) / 2
    is_good = f1 >= f1.max() * (1 - min(max(TOLERANCE, 0.5 / num_truths), MAX_TOLERANCE))
    good = cuts[is_good]
    value = min(max(float(f"{good[len(good) // 2]:.3g}"), 0.0), 1.0)
    return Threshold(value, f1_at(values, hits, num_truths, value))


def f1_at(scores: np.ndarray, hits: np.ndarray, num_truths: int, threshold: float) -> float:
    """Returns the F1 of predictions above a threshold, given falling scores (N,) and how many are right so far."""
    count = int((scores > threshold).sum())
    return float(2 * hits[count - 1] / (count + num_truths)) if count else 0.0
