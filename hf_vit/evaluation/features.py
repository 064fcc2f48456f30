"""How well features tell classes apart: by the classes of the nearest training images, and by a linear classifier.

Shapes: M training images, B images to classify, D features.
"""

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch.nn.functional as F
from datasets import ClassLabel, Dataset, Features, Value
from torch import Tensor

from ..data import hold_out
from .base import StreamedMetric


NUM_NEIGHBORS, TEMPERATURE = 20, 0.07
# Inverse strengths of the regularization, among which one is chosen
STRENGTHS = tuple(10.0**exponent for exponent in range(-5, 3))
MAX_ITERATIONS = 1000


def classify_by_neighbors(
    features: Tensor,
    known_features: Tensor,
    known_classes: Tensor,
    num_neighbors: int = NUM_NEIGHBORS,
    temperature: float = TEMPERATURE,
) -> Tensor:
    """Gives each image the class that the most similar images have, as DINO does (https://arxiv.org/abs/2104.14294).

    Each of the nearest images by cosine similarity s votes for its class with the weight exp(s / temperature).

    Args:
        features: (B, D) of images to classify.
        known_features: (M, D) of images whose class is known.
        known_classes: (M,) class numbers from 0.
        num_neighbors: How many images vote; all of them, if there are fewer.
        temperature: The lower, the more the nearest ones count.

    Returns:
        (B,) class numbers.
    """
    similarity = F.normalize(features.float(), dim=1) @ F.normalize(known_features.float(), dim=1).T  # (B, M)
    nearest, index = similarity.topk(min(num_neighbors, len(known_features)), dim=1)
    votes = similarity.new_zeros(len(features), int(known_classes.max()) + 1)
    votes.scatter_add_(1, known_classes[index], (nearest / temperature).exp())
    return votes.argmax(dim=1)


class NeighborAccuracy(StreamedMetric):
    """Share of the images with a known class that their neighbors get right, `knn_accuracy` in [0, 1].

    Args:
        is_known: Whether classes are known at all; else there is no score.
    """

    def __init__(self, is_known: bool) -> None:
        super().__init__()
        self.score_names = ("knn_accuracy",) if is_known else ()

    def record(self, prediction: Any, target: int | None) -> bool | None:
        """Compares the `class_number` of a prediction with the right one; None where one of them is not known."""
        return None if prediction.class_number is None or target is None else prediction.class_number == target

    def compute(self) -> dict[str, float]:
        """Return the score, if there is one."""
        return self.score(self.records)

    def score(self, records: Iterable[bool | None]) -> dict[str, float]:
        """Return the score of some images, if there is one."""
        known = [record for record in records if record is not None]
        score = sum(known) / len(known) if known else math.nan
        return dict.fromkeys(self.score_names, score)


def probe(features: np.ndarray, classes: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, float]:
    """Classifies images (B, D) by logistic regression on standardized features (M, D) with classes (M,).

    The regularization is the one that gets most right of a tenth of the training images, the stronger one where
    several do; the classifier is then trained on all of them. Returns the classes (B,) and the inverse strength C of
    the regularization; `ValueError` if a class has too few images to hold some out.
    """
    kept, held_out = held_out_rows(classes)
    with warnings.catch_warnings():
        # Weak regularization may need more steps than it gets: it is evaluated as is, and the chosen one still warns.
        warnings.filterwarnings("ignore", "lbfgs failed to converge")
        scores = [
            float((classify(features[kept], classes[kept], features[held_out], strength) == classes[held_out]).mean())
            for strength in STRENGTHS
        ]
    strength = STRENGTHS[int(np.argmax(scores))]
    return classify(features, classes, others, strength), strength


def held_out_rows(classes: np.ndarray) -> tuple[Sequence[int], Sequence[int]]:
    """Returns the rows to train on and those to choose by; every class has a tenth of the latter."""
    names = [str(number) for number in range(int(classes.max()) + 1)]
    features = Features({"row": Value("int64"), "label": ClassLabel(names=names)})
    halves = hold_out(Dataset.from_dict({"row": range(len(classes)), "label": classes}, features=features))
    return halves["train"]["row"][:], halves["test"]["row"][:]


def classify(features: np.ndarray, classes: np.ndarray, others: np.ndarray, strength: float) -> np.ndarray:
    """Trains on features (M, D) with classes (M,), and returns the classes (B,) of others (B, D)."""
    from sklearn.linear_model import LogisticRegression  # here, as the extraction does without
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model: Any = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=MAX_ITERATIONS))
    answers: np.ndarray = model.fit(features, classes).predict(others)
    return answers
