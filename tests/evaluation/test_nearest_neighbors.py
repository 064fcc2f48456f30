"""Nearest neighbor classification, compared with a plain loop and scikit-learn."""

import math
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from hf_vit.evaluation.features import NeighborAccuracy, classify_by_neighbors


def draw(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return 30 images to classify and 200 labeled ones, in 5 overlapping classes."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(5, (200,), generator=generator)
    centers = torch.randn(5, 16, generator=generator)
    known = centers[classes] + 1.5 * torch.randn(200, 16, generator=generator)
    return torch.randn(30, 16, generator=generator) + centers[torch.arange(30) % 5], known, classes


def by_hand(features: Tensor, known: Tensor, classes: Tensor, count: int, temperature: float) -> list[int]:
    answers = []
    for image in features.tolist():
        similar = []
        for other, number in zip(known.tolist(), classes.tolist(), strict=True):
            cosine = sum(a * b for a, b in zip(image, other, strict=True)) / math.hypot(*image) / math.hypot(*other)
            similar.append((cosine, number))
        votes: dict[int, float] = defaultdict(float)
        for cosine, number in sorted(similar, reverse=True)[:count]:
            votes[number] += math.exp(cosine / temperature)
        answers.append(max(votes, key=votes.__getitem__))
    return answers


@pytest.mark.parametrize(("count", "temperature"), [(20, 0.07), (1, 0.07), (50, 0.5), (500, 0.07)])
def test_neighbors_vote_as_dino_counts_them(count: int, temperature: float) -> None:
    features, known, classes = draw()
    found = classify_by_neighbors(features, known, classes, count, temperature)
    assert found.tolist() == by_hand(features, known, classes, count, temperature)


def test_neighbors_vote_as_those_of_scikit_learn() -> None:
    features, known, classes = draw(1)
    peer = KNeighborsClassifier(20, metric="cosine", weights=lambda distances: np.exp((1 - distances) / 0.07))
    expected = peer.fit(known.numpy(), classes.numpy()).predict(features.numpy())
    found = classify_by_neighbors(features, known, classes)
    assert found.tolist() == expected.tolist()
    # The expected classes differ from the most frequent class and from the single nearest neighbor.
    assert len(set(expected)) > 1
    assert found.tolist() != classify_by_neighbors(features, known, classes, 1).tolist()


def test_the_score_is_of_images_whose_class_is_known() -> None:
    metric = NeighborAccuracy(is_known=True)
    assert math.isnan(metric.compute()["knn_accuracy"])
    pairs = [(1, 1), (0, 1), (2, 2), (1, None), (0, 0)]
    metric.update([metric.record(SimpleNamespace(class_number=said), right) for said, right in pairs])
    assert metric.compute() == {"knn_accuracy": 3 / 4}
    metric.reset()
    metric.update([metric.record(SimpleNamespace(class_number=1), 0)])
    assert metric.compute() == {"knn_accuracy": 0}
    unknown = NeighborAccuracy(is_known=False)
    unknown.update([unknown.record(SimpleNamespace(class_number=None), None)])
    assert unknown.compute() == {}
