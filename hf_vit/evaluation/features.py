"""Scores of features: accuracy of nearest neighbors and of a linear classifier, and retrieval of images and texts.

Shapes: M training images, B images to classify, D features; N images, T texts, n texts of an image, E embedding width.
"""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
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


RANKS = (1, 5, 10)
DIRECTIONS = ("image_to_text", "text_to_image")
TIE = 1e-6  # of cosine similarities: what is nearer to each other, single precision does not tell apart
MAX_COMPARED = 2**24  # pairs of image and text at a time


def retrieval_average_precision(
    features: Tensor, classes: Tensor, gallery: Tensor, gallery_classes: Tensor, own: Tensor | None = None
) -> Tensor:
    """Returns the average precision (B,) of a search for images of the class of each query, by cosine similarity.

    Images that are equally similar count as found at once, as in scikit-learn's `average_precision_score`.

    Args:
        features: (B, D) of the queries.
        classes: (B,) class numbers.
        gallery: (M, D) of the images to search.
        gallery_classes: (M,) class numbers.
        own: (B,) index of each query in the gallery, where it is left out; None if the queries are not there.

    Returns:
        (B,) average precision in [0, 1], NaN where the gallery has no image of the class.
    """
    similarity = F.normalize(features.float(), dim=1) @ F.normalize(gallery.float(), dim=1).T  # (B, M)
    is_right = classes[:, None] == gallery_classes  # (B, M)
    if own is not None:
        queries = torch.arange(len(own), device=own.device)
        similarity[queries, own], is_right[queries, own] = -torch.inf, False
    similarity, order = similarity.sort(dim=1, descending=True)
    is_right = is_right.gather(1, order)
    # Of each image, how many are at least as similar, and how many of those are right
    found = torch.searchsorted(-similarity, -similarity, right=True)
    right = is_right.cumsum(dim=1).gather(1, found - 1)
    return (right / found * is_right).sum(dim=1) / is_right.sum(dim=1)


class ComparedImage(NamedTuple):
    """The embeddings of an image (E,) and of its texts (n, E), of length 1."""

    image_embeds: Tensor
    text_embeds: Tensor


class ImageRecord(NamedTuple):
    """An image (E,) and its texts (n, E) in float32, and the captions."""

    image: Tensor
    texts: Tensor
    captions: tuple[str, ...]


class RetrievalMetric(StreamedMetric):
    """Recall among all images that are evaluated, in [0, 1].

    `text_to_image_recall_at_k` is the share of texts whose image is among the k that are nearest, and
    `image_to_text_recall_at_k` the share of images of which any text is, for k of 1, 5 and 10; `mean_recall` is the
    mean of the six. A wrong one that is as near as the right one counts as nearer.
    """

    score_names = ("mean_recall", *(f"{way}_recall_at_{k}" for way in DIRECTIONS for k in RANKS))

    def record(self, prediction: ComparedImage, target: Mapping[str, Any]) -> ImageRecord:
        """Returns the image and its texts as a record."""
        image, texts = (part.detach().float().cpu() for part in (prediction.image_embeds, prediction.text_embeds))
        return ImageRecord(image, texts, tuple(target["captions"]))

    def embeddings(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns all images (N, E), all texts (T, E), and how many of the texts belong to each image, (N,)."""
        images = torch.stack([record.image for record in self.records])
        texts = torch.cat([record.texts for record in self.records])
        return images, texts, torch.tensor([len(record.texts) for record in self.records])

    def compute(self) -> dict[str, float]:
        """Returns the scores of all images so far, NaN without any."""
        if not self.records:
            return dict.fromkeys(self.score_names, math.nan)
        ranks = retrieval_ranks(*self.embeddings())
        return with_mean([float((of_way < k).double().mean()) for of_way in ranks for k in RANKS])


def with_mean(recalls: Sequence[float]) -> dict[str, float]:
    """Returns the six recalls by name, with their mean."""
    return dict(zip(RetrievalMetric.score_names, [math.fsum(recalls) / len(recalls), *recalls], strict=True))


def retrieval_ranks(images: Tensor, texts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the ranks of the right texts and images.

    Args:
        images: (N, E) of length 1.
        texts: (T, E) of length 1, image by image.
        counts: (N,), how many of the texts belong to each image.

    Returns:
        For each image the number of wrong texts that are at least as near as its nearest text, (N,), and for each text
        that of wrong images that are at least as near as its own, (T,). What is no number counts as near.
    """
    images, texts = images.double(), texts.double()
    owners = torch.repeat_interleave(torch.arange(len(images)), counts)
    of_images, of_texts = [], []
    for rows in torch.arange(len(images)).split(max(1, MAX_COMPARED // len(texts))):
        similarity = images[rows] @ texts.T  # (b, T)
        is_own = rows[:, None] == owners
        nearest = similarity.masked_fill(~is_own, -torch.inf).amax(dim=1, keepdim=True)
        of_images.append((~(similarity < nearest - TIE) & ~is_own).sum(dim=1))
    for rows in torch.arange(len(texts)).split(max(1, MAX_COMPARED // len(images))):
        similarity = texts[rows] @ images.T  # (b, N)
        own = similarity.gather(1, owners[rows, None])
        of_texts.append((~(similarity < own - TIE)).sum(dim=1) - 1)  # which counts itself
    return torch.cat(of_images), torch.cat(of_texts)


def chance_of_retrieval(counts: Sequence[int]) -> dict[str, float]:
    """Returns the recalls that are to be expected of an order at random.

    Args:
        counts: How many texts each of the N images has.
    """
    total = sum(counts)

    def none_among(k: int, count: int) -> float:  # probability that none of `count` texts is among the first k
        return math.prod(max(total - count - place, 0) / (total - place) for place in range(min(k, total)))

    by_chance = [math.fsum(1 - none_among(k, count) for count in counts) / len(counts) for k in RANKS]
    return with_mean([*by_chance, *(min(1.0, k / len(counts)) for k in RANKS)])
