"""How well a linear classifier tells classes apart by features.

Shapes: M training images, B images to classify, D features.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, Features, Value

from ..data import hold_out


# Inverse strengths of the regularization, among which one is chosen
STRENGTHS = tuple(10.0**exponent for exponent in range(-5, 3))
MAX_ITERATIONS = 1000


def probe(features: np.ndarray, classes: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, float]:
    """Classifies images by logistic regression on standardized features.

    The regularization is the one that gets most right of a tenth of the training images, the stronger one where
    several do; the classifier is then trained on all of them.

    Args:
        features: (M, D) of the training images.
        classes: (M,) class numbers.
        others: (B, D).

    Returns:
        (B,) class numbers, and the inverse strength C of the regularization.

    Raises:
        ValueError: if a class has too few images to hold some out.
    """
    strength = STRENGTHS[int(np.argmax(scores_on_held_out(features, classes)))]
    return classify(features, classes, others, strength), strength


def scores_on_held_out(features: np.ndarray, classes: np.ndarray) -> list[float]:
    """Returns the accuracy of each of `STRENGTHS` on a tenth of training images (M, D), learned from the others."""
    kept, held_out = held_out_rows(classes)
    with warnings.catch_warnings():
        # Weak regularization may need more steps than it gets: it is scored as it is, and the chosen one still warns.
        warnings.filterwarnings("ignore", "lbfgs failed to converge")
        return [
            float((classify(features[kept], classes[kept], features[held_out], strength) == classes[held_out]).mean())
            for strength in STRENGTHS
        ]


def held_out_rows(classes: np.ndarray) -> tuple[Sequence[int], Sequence[int]]:
    """Returns which rows to learn from, and which to choose by; every class has a tenth of the latter."""
    names = [str(number) for number in range(int(classes.max()) + 1)]
    features = Features({"row": Value("int64"), "label": ClassLabel(names=names)})
    halves = hold_out(Dataset.from_dict({"row": range(len(classes)), "label": classes}, features=features))
    return halves["train"]["row"][:], halves["test"]["row"][:]


def classify(features: np.ndarray, classes: np.ndarray, others: np.ndarray, strength: float) -> np.ndarray:
    """Learns from features (M, D) with classes (M,), and returns the classes (B,) of others (B, D)."""
    from sklearn.linear_model import LogisticRegression  # here, as the extraction does without
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model: Any = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=MAX_ITERATIONS))
    answers: np.ndarray = model.fit(features, classes).predict(others)
    return answers
