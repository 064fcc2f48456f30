"""Compare nearest neighbors and retrieval with plain loops and scikit-learn. Ties and NaN count as errors."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from hf_vit.evaluation import features
from hf_vit.evaluation.features import (
    NeighborAccuracy,
    RetrievalMetric,
    classify_by_neighbors,
    random_retrieval_recall,
    retrieval_ranks,
)


def draw(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return features of 30 images to classify, and features and labels of 200 images. The 5 classes overlap."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(5, (200,), generator=generator)
    centers = torch.randn(5, 16, generator=generator)
    known = centers[classes] + 1.5 * torch.randn(200, 16, generator=generator)
    return torch.randn(30, 16, generator=generator) + centers[torch.arange(30) % 5], known, classes


@pytest.mark.parametrize("seed", [0, 1])
def test_neighbors_vote_as_those_of_scikit_learn(seed: int) -> None:
    features, known, classes = draw(seed)
    answers = {}
    for count, temperature in ((20, 0.07), (1, 0.07), (50, 0.5), (500, 0.07), (200, 0.02), (200, 0.5)):
        votes = {"metric": "cosine", "weights": lambda distances, t=temperature: np.exp((1 - distances) / t)}
        peer = KNeighborsClassifier(min(count, len(known)), **votes).fit(known.numpy(), classes.numpy())
        answers[count, temperature] = peer.predict(features.numpy()).tolist()
        found = classify_by_neighbors(features, known, classes, count, temperature).tolist()
        assert found == answers[count, temperature]
    assert classify_by_neighbors(features, known, classes).tolist() == answers[20, 0.07]
    # The test is not trivial: classes depend on the image, the number of neighbors and the temperature.
    assert len(set(answers[20, 0.07])) > 1
    assert answers[20, 0.07] != answers[1, 0.07]
    assert answers[200, 0.02] != answers[200, 0.5]


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


COUNTS = torch.tensor([2, 1, 3, 2, 5, 1, 1, 2, 3, 2, 2, 1])


def draw_pairs(counts: Tensor = COUNTS, width: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(len(counts), width, generator=generator)
    texts = images.repeat_interleave(counts, dim=0) + torch.randn(int(counts.sum()), width, generator=generator)
    return F.normalize(images, dim=1), F.normalize(texts, dim=1)


def ranks_one_by_one(images: Tensor, texts: Tensor, counts: Tensor) -> tuple[list[int], list[int]]:
    owners = [number for number, count in enumerate(counts.tolist()) for _ in range(count)]
    similarity = (images.double() @ texts.double().T).tolist()
    of_images, of_texts = [], []
    for image, row in enumerate(similarity):
        best = max(value for value, owner in zip(row, owners, strict=True) if owner == image)
        of_images.append(sum(value >= best for value, owner in zip(row, owners, strict=True) if owner != image))
    for text, owner in enumerate(owners):
        column = [row[text] for row in similarity]
        of_texts.append(sum(value >= column[owner] for image, value in enumerate(column) if image != owner))
    return of_images, of_texts


@pytest.mark.parametrize("max_compared", [1, 40, 10**6])
def test_ranks_are_those_of_a_plain_loop(max_compared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "MAX_COMPARED", max_compared)
    parts = (*draw_pairs(), COUNTS)
    of_images, of_texts = retrieval_ranks(*parts)
    assert (of_images.tolist(), of_texts.tolist()) == ranks_one_by_one(*parts)
    assert of_images.max() > 0
    assert of_texts.max() > 0


def test_equal_and_nan_embeddings_get_the_worst_rank() -> None:
    for value in (0.5, math.nan):
        images, texts = torch.full((len(COUNTS), 4), value), torch.full((int(COUNTS.sum()), 4), value)
        images += 1e-8 * torch.arange(len(images))[:, None]  # adds differences as small as rounding errors
        of_images, of_texts = retrieval_ranks(images, texts, COUNTS)
        assert of_images.tolist() == (len(texts) - COUNTS).tolist()
        assert of_texts.tolist() == [len(images) - 1] * len(texts)


def test_recall_does_not_depend_on_how_images_come() -> None:
    images, texts = draw_pairs()
    own = texts.split(COUNTS.tolist())
    said = [SimpleNamespace(image_embeds=image, text_embeds=part) for image, part in zip(images, own, strict=True)]
    metric = RetrievalMetric()
    records = [metric.record(one, {"captions": ["?"] * len(one.text_embeds)}) for one in said]
    metric.update(records)
    scores = metric.compute()
    of_images, of_texts = ranks_one_by_one(images, texts, COUNTS)
    assert scores["image_to_text_recall_at_5"] == pytest.approx(sum(rank < 5 for rank in of_images) / len(of_images))
    assert scores["text_to_image_recall_at_1"] == pytest.approx(sum(rank < 1 for rank in of_texts) / len(of_texts))
    assert scores["mean_recall"] == pytest.approx(sum(list(scores.values())[1:]) / 6)
    metric.reset()
    for record in reversed(records):
        metric.update([record])
    assert metric.compute() == pytest.approx(scores, rel=1e-12)
    metric.reset()
    assert math.isnan(metric.compute()["mean_recall"])


def test_chance_is_what_random_numbers_reach() -> None:
    expected = random_retrieval_recall(COUNTS.tolist())
    generator = torch.Generator().manual_seed(1)
    drawn = []
    for _ in range(300):
        images = F.normalize(torch.randn(len(COUNTS), 64, generator=generator), dim=1)
        texts = F.normalize(torch.randn(int(COUNTS.sum()), 64, generator=generator), dim=1)
        ranks = retrieval_ranks(images, texts, COUNTS)
        drawn.append([float((of_way < k).double().mean()) for of_way in ranks for k in (1, 5, 10)])
    found = torch.tensor(drawn).mean(dim=0).tolist()
    assert list(expected.values())[1:] == pytest.approx(found, abs=0.03)
    assert random_retrieval_recall([5] * 140)["text_to_image_recall_at_10"] == pytest.approx(1 / 14)
    assert random_retrieval_recall([1, 1])["image_to_text_recall_at_5"] == 1
