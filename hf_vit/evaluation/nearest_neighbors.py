"""How well features tell classes apart, by the classes of the nearest training images."""

import math
from collections.abc import Iterable
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from .base import StreamedMetric


NUM_NEIGHBORS, TEMPERATURE = 20, 0.07


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


class Classified(Protocol):
    """What is said of an image."""

    @property
    def class_number(self) -> int | None:
        """Its class, None where no classes are known."""


class NeighborAccuracy(StreamedMetric):
    """Share of the images with a known class that their neighbors get right, `knn_accuracy` in [0, 1].

    Args:
        is_known: Whether classes are known at all; else there is no score.
    """

    def __init__(self, is_known: bool) -> None:
        """Starts without images."""
        self.score_names = ("knn_accuracy",) if is_known else ()
        self.reset()

    def reset(self) -> None:
        """Forgets all images."""
        self._num_right = self._num_images = 0

    def record(self, prediction: Classified, target: int | None) -> bool | None:
        """Compares the class that the neighbors say with the right one; None where one of them is not known."""
        return None if prediction.class_number is None or target is None else prediction.class_number == target

    def update(self, records: Iterable[bool | None]) -> None:
        """Takes in the records of images."""
        known = [record for record in records if record is not None]
        self._num_images += len(known)
        self._num_right += sum(known)

    def compute(self) -> dict[str, float]:
        """Returns the score, if there is one."""
        score = self._num_right / self._num_images if self._num_images else math.nan
        return dict.fromkeys(self.score_names, score)
