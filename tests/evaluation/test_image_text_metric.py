"""Retrieval recall: equal to a plain loop; ties and NaN count as errors."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_vit.evaluation import features
from hf_vit.evaluation.features import RetrievalMetric, random_retrieval_recall, retrieval_ranks


COUNTS = torch.tensor([2, 1, 3, 2, 5, 1, 1, 2, 3, 2, 2, 1])


def draw(counts: Tensor = COUNTS, width: int = 4) -> tuple[Tensor, Tensor]:
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
    parts = (*draw(), COUNTS)
    of_images, of_texts = retrieval_ranks(*parts)
    assert (of_images.tolist(), of_texts.tolist()) == ranks_one_by_one(*parts)
    assert of_images.max() > 0
    assert of_texts.max() > 0


def test_what_is_all_alike_or_no_number_is_found_last() -> None:
    for value in (0.5, math.nan):
        images, texts = torch.full((len(COUNTS), 4), value), torch.full((int(COUNTS.sum()), 4), value)
        images += 1e-8 * torch.arange(len(images))[:, None]  # rounding noise of float32
        of_images, of_texts = retrieval_ranks(images, texts, COUNTS)
        assert of_images.tolist() == (len(texts) - COUNTS).tolist()
        assert of_texts.tolist() == [len(images) - 1] * len(texts)


def test_recall_does_not_depend_on_how_images_come() -> None:
    images, texts = draw()
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
