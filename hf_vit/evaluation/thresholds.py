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
    # between the least score that is above and the largest that is not, as far as that is in [0, 1]
    ends = np.append(values[last[1:]], 0.0)
    is_possible = (values[last] > 0) & (ends <= 1)
    highs, lows, f1 = values[last][is_possible].clip(max=1), ends[is_possible].clip(min=0), f1[is_possible]
    if not f1.any():
        return None
    good = np.flatnonzero(f1 >= f1.max() * (1 - min(max(TOLERANCE, 0.5 / num_truths), MAX_TOLERANCE)))
    middle = good[len(good) // 2]
    value = number_between(lows[middle], highs[middle])
    return Threshold(value, f1_at(values, hits, num_truths, value))


def number_between(low: float, high: float) -> float:
    """Returns the middle of two scores in as few digits, three at least, as keep it there in single precision too."""
    for digits in range(3, 18):
        value = float(f"{(low + high) / 2:.{digits}g}")
        if low < np.float32(value) < high and low < value < high:
            return value
    return float(low)  # with which only the upper score passes


def f1_at(scores: np.ndarray, hits: np.ndarray, num_truths: int, threshold: float) -> float:
    """Returns the F1 of predictions above a threshold, given falling scores (N,) and how many are right so far."""
    count = int((scores > threshold).sum())
    return float(2 * hits[count - 1] / (count + num_truths)) if count else 0.0
