"""Linear probe: a linear classifier of features, fitted in closed form by ridge regression and discriminant analysis.

In shapes, N is the number of images, F the number of features, and K the number of classes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


PENALTIES = torch.logspace(-1, 6, 15, dtype=torch.float64)  # candidate ridge penalties for standardized features
SCALES = torch.logspace(-2, 0.5, 26, dtype=torch.float64)  # candidate factors of logits
LEAST = 1e-6  # minimum weight of an image, and minimum deviation of a feature


class Probe(NamedTuple):
    """Linear classifier of features.

    Args:
        weight: Weights (K, F).
        bias: Biases (K,).
        left_out: Logits (N, K) of each training image from a probe that was trained without it and its copies.
        accuracy: Accuracy of leave-one-out predictions by ridge regression, weighted in the same way as the images.
        penalty: The chosen ridge penalty.
        is_weighted: Whether the classes were weighted differently.
    """

    weight: Tensor
    bias: Tensor
    left_out: Tensor
    accuracy: float
    penalty: float
    is_weighted: bool = False

    def scores(self, features: Tensor) -> Tensor:
        """Return the logits (B, K) of features (B, F)."""
        return features.double() @ self.weight.T + self.bias

    def predict(self, features: Tensor) -> Tensor:
        """Return the class numbers (B,) of features (B, F)."""
        return self.scores(features).argmax(dim=1)

    def __str__(self) -> str:
        weighted = ", weighted by class" if self.is_weighted else ""
        return (
            f"Linear probe: leave-one-out accuracy {self.accuracy:.1%} on {len(self.left_out):,} training images"
            f"{weighted}; the classifier is initialized with the probe."
        )


def fit_probe(
    features: Tensor,
    classes: Tensor,
    num_classes: int,
    class_weights: Sequence[float] | None = None,
    *,
    image_weights: Tensor | None = None,
    groups: Tensor | None = None,
) -> Probe:
    """Fit a linear classifier: ridge regression to one-hot classes, then discriminant analysis of its scores.

    All scores of training images are leave-one-out predictions. The ridge penalty with the highest accuracy and the
    logit scale with the lowest loss are chosen.

    Args:
        features: Features of the images (N, F).
        classes: Class numbers (N,) int64.
        num_classes: Number of classes K.
        class_weights: Weight of the images of each class (K,), None for equal weights.
        image_weights: Additional weight of each image (N,), None for equal weights.
        groups: Numbers (N,); images with the same number are left out together. None leaves out single images.

    Source: https://hastie.su.domains/ElemStatLearn, sections 7.10 (leave-one-out residuals) and 12.5 (discriminant
    analysis by regression).
    """
    features, targets = features.double(), F.one_hot(classes, num_classes).double()  # (N, F), (N, K)
    weights = torch.tensor(class_weights or [1.0] * num_classes, dtype=torch.float64)[classes]
    weights = (weights if image_weights is None else weights * image_weights).clamp_min(LEAST)
    weights = (weights / weights.mean())[:, None]  # (N, 1)
    mean, share = (weights * features).mean(dim=0), (weights * targets).mean(dim=0)
    deviation = ((weights * (features - mean) ** 2).sum(dim=0) / (len(features) - 1)).sqrt().clamp_min(LEAST)
    factors = torch.linalg.svd(weights.sqrt() * (features - mean) / deviation, full_matrices=False)
    projected = factors.U.T @ (weights.sqrt() * (targets - share))  # (min(N, F), K)
    copies = [] if groups is None else find_copies(groups)
    best, accuracy, scores = PENALTIES[0], -1.0, targets
    for penalty in PENALTIES:
        left_out = leave_out(targets, weights, factors.U, factors.S**2 / (factors.S**2 + penalty), copies)
        right_share = float((weights[:, 0] * (left_out.argmax(dim=1) == classes)).mean())
        if right_share > accuracy + LEAST:  # among equal penalties, choose the smallest in spite of rounding errors
            best, accuracy, scores = penalty, right_share, left_out
    counted = weights * targets
    for rows in copies:  # an image with copies counts once, so that copies do not confirm their labels
        counted[rows] /= len(rows)
    matrix, offset = discriminate(scores, counted)
    logits = scores @ matrix.T + offset
    losses = torch.stack([F.cross_entropy(scale * logits, classes, reduction="none") for scale in SCALES])
    scale = SCALES[(losses * weights[:, 0]).mean(dim=1).argmin()]
    ridge = (factors.Vh.T @ ((factors.S / (factors.S**2 + best))[:, None] * projected)).T / deviation  # (K, F)
    weight, bias = scale * matrix @ ridge, scale * (matrix @ (share - ridge @ mean) + offset)
    return Probe(weight, bias, scale * logits, accuracy, float(best), class_weights is not None)


def leave_out(targets: Tensor, weights: Tensor, left: Tensor, shrinkage: Tensor, copies: Sequence[Tensor]) -> Tensor:
    """Return the ridge scores (N, K) of each image from a regression without the image and its copies.

    The shares of the classes are those of all images: without an image, the share of its class is smaller, which would
    reveal the class.

    Args:
        targets: One-hot classes (N, K).
        weights: Weights of the images (N, 1), with a mean of 1.
        left: Left singular vectors (N, R) of the standardized features.
        shrinkage: Factors (R,) by which the ridge penalty shrinks the predictions.
        copies: Indices of the images of each group that is left out together.
    """
    root, size, own = weights.sqrt(), weights / len(weights), weights * targets / len(weights)
    share = own.sum(dim=0)
    residual = targets - share - left @ (shrinkage[:, None] * (left.T @ (root * (targets - share)))) / root  # (N, K)
    left_out = targets - residual / (1 - size - (left**2 @ shrinkage)[:, None]).clamp_min(LEAST)
    for rows in copies:
        smoothed = size[rows].T + (left[rows] * shrinkage) @ left[rows].T * root[rows].T / root[rows]
        rest = torch.eye(len(rows), dtype=torch.float64) - smoothed
        left_out[rows] = targets[rows] - torch.linalg.lstsq(rest, residual[rows]).solution
        size[rows], own[rows] = size[rows].sum(), own[rows].sum(dim=0)
    return left_out + share - (share - own) / (1 - size)


def discriminate(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return matrix (K, K) and offset (K,) of the linear discriminant analysis of ridge scores.

    The covariance of the scores is regularized, more so if there are few images per class.

    Args:
        scores: Scores (N, K) of the images.
        targets: One-hot classes (N, K), multiplied by the weights of the images.
    """
    counts = targets.sum(dim=0)  # (K,)
    centers = targets.T @ scores / counts.clamp_min(LEAST)[:, None]  # (K, K)
    spread = (targets.sum(dim=1) * scores.T @ scores - centers.T @ (counts[:, None] * centers)) / counts.sum()
    spread += (len(counts) / len(scores) * spread.diagonal().mean() + LEAST**2) * torch.eye(len(counts))
    matrix = torch.linalg.solve(spread, centers.T).T
    prior = (counts / counts.sum()).clamp_min(LEAST).log()
    return matrix, prior - (matrix * centers).sum(dim=1) / 2


def find_copies(groups: Tensor) -> list[Tensor]:
    """Return the indices of the images of each group of several images."""
    order = groups.argsort()
    parts = order.split(groups.unique(return_counts=True)[1].tolist())
    return [rows for rows in parts if len(rows) > 1]
