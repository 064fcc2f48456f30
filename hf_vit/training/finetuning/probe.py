"""Linear probe: a new classifier is initialized by ridge regression on the features of the training images.

In shapes, M is the number of images, F the number of features, and K the number of classes.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...model.task_image_classification import HfViTForImageClassification


PENALTIES = torch.logspace(-1, 6, 15, dtype=torch.float64)  # candidate ridge penalties for standardized features
SCALES = torch.logspace(-0.5, 2, 26, dtype=torch.float64)  # candidate factors that scale scores to logits
MOST_IMAGES = 20_000  # maximum number of images for a probe; more images hardly improve a linear classifier


class Probe(NamedTuple):
    """Linear classifier with weights (K, F), biases (K,) and its leave-one-out accuracy on the training images."""

    weight: Tensor
    bias: Tensor
    accuracy: float
    num_images: int
    is_weighted: bool = False  # whether the classes were weighted differently

    def __str__(self) -> str:
        weighted = ", weighted by class" if self.is_weighted else ""
        return (
            f"Linear probe: leave-one-out accuracy {self.accuracy:.1%} on {self.num_images:,} training images"
            f"{weighted}; the classifier is initialized with the probe."
        )


@torch.no_grad()
def encode(model: HfViTForImageClassification, batches: Iterable[Mapping[str, Any]]) -> tuple[Tensor, Tensor]:
    """Return the pooled features (M, F) and the classes (M,) of all images in the batches."""
    was_training, features, classes = model.training, [], []
    model.eval()
    for batch in batches:
        features.append(model.model(batch["pixel_values"].to(model.device)).pooler_output.float().cpu())
        classes.append(batch["labels"])
    model.train(was_training)
    return torch.cat(features), torch.cat(classes)


def fit_probe(
    features: Tensor, classes: Tensor, num_classes: int, class_weights: Sequence[float] | None = None
) -> Probe:
    """Fit a linear classifier by ridge regression to one-hot classes.

    The ridge penalty and the logit scale with the best leave-one-out predictions are chosen.

    Args:
        features: Features of the images (M, F).
        classes: Class indices (M,) int64.
        num_classes: Number of classes K.
        class_weights: Weight of the images of each class (K,), None for equal weights.

    Source: the closed form of the leave-one-out residual, e.g. https://hastie.su.domains/ElemStatLearn, section 7.10.
    """
    features = features.double()
    weights = torch.tensor(class_weights or [1.0] * num_classes, dtype=torch.float64)[classes].clamp_min(1e-6)
    weights = (weights / weights.mean())[:, None]  # (M, 1)
    root, mean = weights.sqrt(), (weights * features).mean(dim=0)
    variance = (weights * (features - mean) ** 2).sum(dim=0) / (len(features) - 1)
    deviation = variance.sqrt().clamp_min(1e-6)
    targets = F.one_hot(classes, num_classes).double()  # (M, K)
    share = (weights * targets).mean(dim=0)
    left, values, right = torch.linalg.svd(root * (features - mean) / deviation, full_matrices=False)
    projected = left.T @ (root * (targets - share))  # (min(M, F), K)
    best, accuracy, scores = PENALTIES[0], -1.0, targets
    for penalty in PENALTIES:
        shrinkage = values**2 / (values**2 + penalty)
        fitted = share + left @ (shrinkage[:, None] * projected) / root
        leverage = weights[:, 0] / len(classes) + (left**2) @ shrinkage
        left_out = targets - (targets - fitted) / (1 - leverage).clamp_min(1e-6)[:, None]  # (M, K)
        right_share = float((weights[:, 0] * (left_out.argmax(dim=1) == classes)).mean())
        if right_share > accuracy:
            best, accuracy, scores = penalty, right_share, left_out
    losses = torch.stack([F.cross_entropy(scale * scores, classes, reduction="none") for scale in SCALES])
    losses = (losses * weights[:, 0]).mean(dim=1)
    scale = SCALES[losses.argmin()]
    shrunk = (values / (values**2 + best))[:, None] * projected
    weight = scale * (right.T @ shrunk).T / deviation  # (K, F)
    return Probe(weight, scale * share - weight @ mean, accuracy, len(classes), class_weights is not None)


@torch.no_grad()
def start_from_probe(classifier: Any, probe: Probe) -> None:
    """Copy the weights of a probe into a linear classifier."""
    classifier.weight.copy_(probe.weight)
    classifier.bias.copy_(probe.bias)
