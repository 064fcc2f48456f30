"""Metrics of features: k-nearest-neighbor accuracy, and retrieval of images and texts.

Shapes: M training images, B images to classify, D features; N images, T texts, n texts per image, E embedding size.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
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
    """Classify images by a weighted vote of their nearest neighbors, as in DINO (https://arxiv.org/abs/2104.14294).

    Each of the nearest images votes for its class with weight exp(s / temperature), where s is its cosine similarity.

    Args:
        features: (B, D) features of the images to classify.
        known_features: (M, D) features of images of known class.
        known_classes: (M,) class numbers, starting at 0.
        num_neighbors: Number of neighbors that vote. If there are fewer images, all vote.
        temperature: Lower values give more weight to the nearest neighbors.

    Returns:
        (B,) class numbers.
    """
    similarity = F.normalize(features.float(), dim=1) @ F.normalize(known_features.float(), dim=1).T  # (B, M)
    nearest, index = similarity.topk(min(num_neighbors, len(known_features)), dim=1)
    votes = similarity.new_zeros(len(features), int(known_classes.max()) + 1)
    votes.scatter_add_(1, known_classes[index], (nearest / temperature).exp())
    return votes.argmax(dim=1)


class NeighborAccuracy(StreamedMetric):
    """Accuracy of nearest-neighbor classification over the images with a known class: `knn_accuracy` in [0, 1].

    Args:
        is_known: Whether the images have class labels. Without labels, the metric has no scores.
    """

    def __init__(self, is_known: bool) -> None:
        super().__init__()
        self.score_names = ("knn_accuracy",) if is_known else ()

    def record(self, prediction: Any, target: int | None) -> bool | None:
        """Return whether the predicted class number equals the true one, or None if either is unknown."""
        return None if prediction.class_number is None or target is None else prediction.class_number == target

    def compute(self) -> dict[str, float]:
        """Return `knn_accuracy` of all images; empty if classes are unknown."""
        return self.score(self.records)

    def score(self, records: Iterable[bool | None]) -> dict[str, float]:
        """Return `knn_accuracy` of the given records; empty if classes are unknown."""
        known = [record for record in records if record is not None]
        score = sum(known) / len(known) if known else math.nan
        return dict.fromkeys(self.score_names, score)


RANKS = (1, 5, 10)
DIRECTIONS = ("image_to_text", "text_to_image")
TIE = 1e-6  # Cosine similarities that differ by less than this are ties: float32 cannot distinguish them.
MAX_COMPARED = 2**24  # Maximum number of image-text pairs compared at once, to limit memory.


def retrieval_average_precision(
    features: Tensor, classes: Tensor, gallery: Tensor, gallery_classes: Tensor, own: Tensor | None = None
) -> Tensor:
    """Return the average precision of image retrieval by cosine similarity.

    For each query image, the images of the same class should rank first. Images of equal similarity share one rank, as
    in `average_precision_score` of scikit-learn.

    Args:
        features: (B, D) features of the queries.
        classes: (B,) class numbers of the queries.
        gallery: (M, D) features of the images to search.
        gallery_classes: (M,) class numbers of the images to search.
        own: (B,) index of each query in the gallery. The query is excluded from its results. None if the gallery does
            not contain the queries.

    Returns:
        (B,) average precision of each query in [0, 1]; NaN if the gallery has no image of the same class.
    """
    similarity = F.normalize(features.float(), dim=1) @ F.normalize(gallery.float(), dim=1).T  # (B, M)
    is_right = classes[:, None] == gallery_classes  # (B, M)
    if own is not None:
        queries = torch.arange(len(own), device=own.device)
        similarity[queries, own], is_right[queries, own] = -torch.inf, False
    similarity, order = similarity.sort(dim=1, descending=True)
    is_right = is_right.gather(1, order)
    # Per gallery image: number of images at least as similar to the query, in all classes and in the query's class
    found = torch.searchsorted(-similarity, -similarity, right=True)
    right = is_right.cumsum(dim=1).gather(1, found - 1)
    return (right / found * is_right).sum(dim=1) / is_right.sum(dim=1)


class ComparedImage(NamedTuple):
    """Normalized embeddings of an image (E,) and of the texts that describe it (n, E)."""

    image_embeds: Tensor
    text_embeds: Tensor


class ImageRecord(NamedTuple):
    """Record of an image: float32 embeddings of the image (E,) and of its n captions (n, E), and the captions."""

    image: Tensor
    texts: Tensor
    captions: tuple[str, ...]


class RetrievalMetric(StreamedMetric):
    """Recall of image-text retrieval among all evaluated images, in [0, 1].

    Recall is computed for k = 1, 5 and 10. `text_to_image_recall_at_k` is the share of texts for which the right image
    is among the k nearest images. `image_to_text_recall_at_k` is the share of images for which a right text is among
    the k nearest texts. `mean_recall` is the mean of the six values. In case of ties, wrong candidates rank before
    right ones.
    """

    score_names = ("mean_recall", *(f"{way}_recall_at_{k}" for way in DIRECTIONS for k in RANKS))

    def record(self, prediction: ComparedImage, target: Mapping[str, Any]) -> ImageRecord:
        """Return the embeddings of an image and of its captions, and the captions, as a record."""
        image, texts = (part.detach().float().cpu() for part in (prediction.image_embeds, prediction.text_embeds))
        return ImageRecord(image, texts, tuple(target["captions"]))

    def embeddings(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the embeddings of all images (N, E) and texts (T, E), and the number of texts per image (N,)."""
        images = torch.stack([record.image for record in self.records])
        texts = torch.cat([record.texts for record in self.records])
        return images, texts, torch.tensor([len(record.texts) for record in self.records])

    def compute(self) -> dict[str, float]:
        """Return the scores of all images added so far; NaN if there are no images."""
        if not self.records:
            return dict.fromkeys(self.score_names, math.nan)
        ranks = retrieval_ranks(*self.embeddings())
        return with_mean_recall([float((of_way < k).double().mean()) for of_way in ranks for k in RANKS])


def with_mean_recall(recalls: Sequence[float]) -> dict[str, float]:
    """Return a dict with the six recall values of `RetrievalMetric` and their mean."""
    return dict(zip(RetrievalMetric.score_names, [math.fsum(recalls) / len(recalls), *recalls], strict=True))


def retrieval_ranks(images: Tensor, texts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rank of the best right text for each image, and the rank of the right image for each text.

    A rank is the number of wrong candidates that are at least as near as the right one. This number includes all wrong
    candidates with NaN in their embedding.

    Args:
        images: (N, E) normalized embeddings.
        texts: (T, E) normalized embeddings. The texts of the first image come first.
        counts: (N,) number of texts of each image.

    Returns:
        Ranks (N,) for images and (T,) for texts, starting at 0.
    """
    images, texts, numbers = images.double(), texts.double(), torch.arange(len(images))
    owners = torch.repeat_interleave(numbers, counts)

    def ranks(queries: Tensor, own: Tensor, candidates: Tensor, others: Tensor) -> Tensor:
        found = []
        for rows in torch.arange(len(queries)).split(max(1, MAX_COMPARED // len(candidates))):
            similarity = queries[rows] @ candidates.T
            is_right = own[rows, None] == others
            nearest = similarity.masked_fill(~is_right, -torch.inf).amax(dim=1, keepdim=True)
            found.append((~(similarity < nearest - TIE) & ~is_right).sum(dim=1))
        return torch.cat(found)

    return ranks(images, numbers, texts, owners), ranks(texts, owners, images, numbers)


def random_retrieval_recall(counts: Sequence[int]) -> dict[str, float]:
    """Return the expected scores of `RetrievalMetric` for a random ranking.

    Args:
        counts: Number of texts of each of the N images.
    """
    total = sum(counts)

    def none_among(k: int, count: int) -> float:  # Probability that none of `count` texts is in the top k
        return math.prod(max(total - count - place, 0) / (total - place) for place in range(min(k, total)))

    by_chance = [math.fsum(1 - none_among(k, count) for count in counts) / len(counts) for k in RANKS]
    return with_mean_recall([*by_chance, *(min(1.0, k / len(counts)) for k in RANKS)])
