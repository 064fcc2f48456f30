"""Linear probe: a fresh classifier starts as logistic regression on the features of the training images.

Shapes: M images, F features, K classes, B batch, C channels, H W pixels.
"""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from ..model.task_image_classification import HfViTForImageClassification
from .arguments import ClassificationArguments


STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0)  # inverse strengths of the regularization
NUM_FOLDS = 5
MAX_ITERATIONS = 200
MOST_IMAGES = 20_000  # more change a linear classifier little
UNSEEN = 5.0  # how far the logits of classes without an image lie below those of the rarest class
NOISE = 1.0  # standard errors by which fine-tuning must be better than the probe


class Probe(NamedTuple):
    """A linear classifier: weights (K, F) and biases (K,), and its cross-validated accuracy on the training images."""

    weight: np.ndarray
    bias: np.ndarray
    accuracy: float
    num_images: int

    def __str__(self) -> str:
        return (
            f"Linear probe: {self.accuracy:.1%} of {self.num_images:,} training images right in {NUM_FOLDS}-fold "
            "cross-validation; the classifier starts from it."
        )


def prepare_probe(model: HfViTForImageClassification, args: ClassificationArguments) -> None:
    """Let a fresh classifier on a saved model see the CLS token and the mean patch; `ValueError` if it cannot."""
    if args.model_name_or_path is None:
        raise ValueError("probe_classifier=True needs features: set model_name_or_path, or probe_classifier=False.")
    config = model.config
    is_plain = config.pooling == "cls" and not config.use_pooler and not config.norm_after_pooling
    if is_plain and "pooling" not in args.overrides():
        config.pooling = "cls_mean"
        model.reset_classifier(config.num_labels)


@torch.no_grad()
def encode(model: HfViTForImageClassification, batches: Iterable[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the pooled features (M, F) of batches of images, and their classes (M,)."""
    was_training, features, classes = model.training, [], []
    model.eval()
    for batch in batches:
        features.append(model.model(batch["pixel_values"].to(model.device)).pooler_output.float().cpu())
        classes.append(batch["labels"])
    model.train(was_training)
    return torch.cat(features).numpy(), torch.cat(classes).numpy()


def fit_probe(features: np.ndarray, classes: np.ndarray, num_classes: int) -> Probe:
    """Fit logistic regression on standardized features, with the regularization that cross-validates best.

    Args:
        features: (M, F) float32.
        classes: (M,) class numbers from 0, of at least two classes.
        num_classes: K; a class without images gets logits below those of all others.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import KFold, cross_val_score

    mean, deviation = features.mean(axis=0), features.std(axis=0) + 1e-6
    scaled = (features - mean) / deviation
    folds = KFold(min(NUM_FOLDS, len(classes)), shuffle=True, random_state=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "lbfgs failed to converge")
        warnings.filterwarnings("ignore", message="The number of unique classes")
        models = [LogisticRegression(C=strength, max_iter=MAX_ITERATIONS) for strength in STRENGTHS]
        scores = [cross_val_score(model, scaled, classes, cv=folds).mean() for model in models]
        best = int(np.nanargmax(scores))
        fitted = models[best].fit(scaled, classes)
    weight, bias = fitted.coef_, fitted.intercept_
    if len(weight) == 1:  # of two classes scikit-learn keeps the difference of the logits
        weight, bias = np.concatenate((-weight, weight)) / 2, np.concatenate((-bias, bias)) / 2
    weight, bias = weight / deviation, bias - (weight / deviation) @ mean
    weights = np.zeros((num_classes, features.shape[1]))
    biases = np.full(num_classes, bias.min() - UNSEEN)
    weights[fitted.classes_], biases[fitted.classes_] = weight, bias
    return Probe(weights, biases, float(scores[best]), len(classes))


@torch.no_grad()
def start_from_probe(classifier: Any, probe: Probe) -> None:
    """Give a linear classifier the weights of a probe."""
    classifier.weight.copy_(torch.from_numpy(probe.weight))
    classifier.bias.copy_(torch.from_numpy(probe.bias))
