"""Calibration of scores, prediction sets and similarity to the training images, fitted on held-out images.

Shapes: D width of features, G coverages, K labels, N images, pixels or detections.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..model.calibration import SET_METHODS, SIMILARITIES, HfViTCalibrationConfig, TrainingFeatures, nonconformity


COVERAGES = (*(number / 20 for number in range(10, 20)), 0.96, 0.97, 0.98, 0.99, 0.995)
MISSED_SHARES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
NUM_BINS = 15  # bins of the expected calibration error and of the reliability diagram
FOLDS = 5  # for scores on the images that the values were fitted on
LEAST_FITTED = 20  # minimum number of images, pixels or detections for a fit
FEW_ERRORS = 10  # with fewer errors, the card says that high scores are uncertain
COMPARED = ("expected calibration error", "negative log-likelihood")  # scores that must not become worse
NUM_DISTANCES = 500  # stored distances of held-out images
NEIGHBORS = 5
HEADER_BYTES = 1024  # bytes of a safetensors file in addition to its tensors
LEAST_VARIANCE = 1e-4  # share of the mean variance that is added to all directions of the features


class CalibrationError(ValueError):
    """The predictions of a model do not allow a calibration."""


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits (N, K) and class numbers, or of logits (N,) and hits in {0, 1}."""
    if logits.ndim == 1:
        return F.binary_cross_entropy_with_logits(logits, labels.to(logits))
    return F.cross_entropy(logits, labels)


def logits_of_best(ranked: Tensor) -> Tensor:
    """Return the logits (N,) of the largest scores, given logits (N, K) in descending order or logits (N,) of hits."""
    return ranked if ranked.ndim == 1 else ranked[:, 0] - ranked[:, 1:].logsumexp(dim=1)


def fit_scaling(logits: Tensor, labels: Tensor, has_offset: bool = False) -> dict[str, float]:
    """Return the `temperature` and, if requested, the `offset` of calibrated logits.

    The fit maximizes the likelihood of the N given predictions and, as a prior, of about one correct and one wrong
    prediction with the given scores. Therefore, the mean largest score stays below 1 - 1 / (N + 2).

    Args:
        logits: Logits (N, K) of classes, or (N,) of a hit.
        labels: Class numbers (N,) or hits (N,).
        has_offset: Whether to fit an offset (logistic scaling).

    Raises:
        CalibrationError: if logits are infinite or NaN.

    Sources: https://arxiv.org/abs/1706.04599; for the prior, Platt, Probabilistic outputs for support vector machines.
    """
    if not logits.isfinite().all():
        raise CalibrationError("Some logits are infinite or NaN. Use an earlier checkpoint, or float32.")
    if logits.ndim == 2 and logits.shape[1] == 1:
        return {"temperature": 1.0, "offset": 0.0}
    count, logits = len(labels), logits.double()
    ranked = logits if logits.ndim == 1 else logits.sort(dim=1, descending=True).values
    values = torch.zeros(1 + has_offset, dtype=torch.float64, requires_grad=True)  # log of the factor, and the offset
    optimizer = torch.optim.LBFGS([values], max_iter=200, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        factor, offset = values[0].clamp(-5, 5).exp(), values[1:].sum()
        best = logits_of_best(ranked * factor + offset)
        prior = (F.softplus(best) + F.softplus(-best)).mean() / (count - 1)
        slope_prior = has_offset * values[0].square() / (2 * count)  # scores of hits alone do not determine the slope
        loss = loss_of(logits * factor + offset, labels) + prior + slope_prior
        loss.backward()
        return loss

    optimizer.step(closure)
    factor = values[0].clamp(-5, 5).exp().item()
    # With more than two classes, the prior does not always ensure the limit.
    while logits.ndim == 2 and logits_of_best(ranked * factor).sigmoid().mean() > count / (count + 1):
        factor *= 0.98
    return {"temperature": 1 / factor, "offset": values[1:].sum().item()}


def score_errors(expected: Tensor, errors: Tensor) -> dict[str, float]:
    """Return two differences of expected errors (N,) from true ones (N,), relative to the mean true error."""
    differences = {
        "difference of the mean expected error": (expected.mean() - errors.mean()).abs(),
        "mean difference of expected errors": (expected - errors).abs().mean(),
    }
    return {name: (value / errors.mean()).item() for name, value in differences.items()}


def score_calibration(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the expected calibration error (15 bins), the Brier score and the negative log-likelihood.

    Args:
        logits: Logits (N, K) of classes, or (N,) of a hit.
        labels: Class numbers (N,) or hits (N,).
    """
    from torchmetrics.functional.classification import binary_calibration_error, multiclass_calibration_error

    logits = logits.double()
    if logits.ndim == 1:
        scores = logits.sigmoid()
        error = binary_calibration_error(scores, labels.long(), n_bins=NUM_BINS)
        brier = (scores - labels).square().mean()
    else:
        scores = logits.softmax(dim=-1)
        error = multiclass_calibration_error(scores, labels, num_classes=logits.shape[1], n_bins=NUM_BINS)
        brier = (scores - F.one_hot(labels, logits.shape[1])).square().sum(dim=-1).mean()
    found = {"expected calibration error": error, "Brier score": brier}
    found |= {"negative log-likelihood": loss_of(logits, labels)}
    return {name: value.item() for name, value in found.items()}


def confidences(logits: Tensor, labels: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the score (N,) of each prediction and whether it is correct, (N,)."""
    if logits.ndim == 1:
        return logits.double().sigmoid().numpy(), labels.numpy().astype(bool)
    best = logits.double().softmax(dim=-1).max(dim=-1)
    return best.values.numpy(), (best.indices == labels).numpy()


def cross_fitted(logits: Tensor, labels: Tensor, has_offset: bool) -> Tensor:
    """Return calibrated logits. The logits of each fold are calibrated by a fit on the other folds."""
    calibrated, fold = torch.empty_like(logits), torch.arange(len(logits)) % FOLDS
    for number in range(FOLDS):
        own = fold == number
        fitted = fit_scaling(logits[~own], labels[~own], has_offset)
        calibrated[own] = logits[own] / fitted["temperature"] + fitted["offset"]
    return calibrated


def fit_scores(
    logits: Tensor, labels: Tensor, has_offset: bool, old: HfViTCalibrationConfig, images: str
) -> tuple[dict[str, float], str]:
    """Return `temperature` and `offset` for held-out predictions, and a text about the fit for the model card.

    If cross-fitted scores have a larger calibration error or a lower likelihood than uncalibrated scores, the values
    of `old`, the previous calibration, are returned.

    Args:
        logits: Uncalibrated logits (N, K) of classes, or (N,) of a hit.
        labels: Class numbers (N,) or hits (N,).
        has_offset: Whether to fit an offset.
        old: Previous calibration.
        images: Description of the images, such as "60 validation images".

    Raises:
        CalibrationError: if logits are infinite or NaN.
    """
    fitted, folds = fit_scaling(logits, labels, has_offset), cross_fitted(logits, labels, has_offset)
    before, after = (score_calibration(values, labels) for values in (logits, folds))
    # All detections are predicted objects.
    found = logits.argmax(dim=1) if logits.ndim == 2 else torch.ones_like(labels) if has_offset else logits > 0
    errors = int((found != labels).sum())
    used = f"{images} ({errors:,} errors)"
    if worse := [name for name in COMPARED if after[name] > before[name]]:
        changes = " and ".join(f"{name} ({before[name]:.4f} before, {after[name]:.4f} after)" for name in worse)
        text = f"The scores remain as they were: on {used}, cross-fitting found a worse {changes}."
        return {"temperature": old.temperature, "offset": old.offset}, text
    few = f" With fewer than {FEW_ERRORS} errors, high scores are uncertain." if errors < FEW_ERRORS else ""
    return fitted, f"The scores were calibrated on {used}.{few}"


def fit_sets(logits: Tensor, labels: Tensor) -> dict[str, list[float]]:
    """Return the thresholds of prediction sets for each coverage that the number of images supports.

    Split conformal prediction (https://arxiv.org/abs/2107.07511): the threshold is the k-th smallest nonconformity of
    the correct labels of N images, with k = ceil((N + 1) * coverage).

    Args:
        logits: Uncalibrated logits (N, K); calibrated logits give larger sets (https://arxiv.org/abs/2412.06082).
        labels: Class numbers (N,).
    """
    ranks = {coverage: math.ceil((len(labels) + 1) * coverage - 1e-9) for coverage in COVERAGES}
    kept = {coverage: rank for coverage, rank in ranks.items() if rank <= len(labels)}
    found: dict[str, list[float]] = {"coverages": list(kept)}
    for method in SET_METHODS:
        scores = nonconformity(logits, method).gather(1, labels[:, None])[:, 0].sort().values
        found[f"{method}_thresholds"] = [scores[rank - 1].item() for rank in kept.values()]
    return found


def score_sets(logits: Tensor, labels: Tensor, options: HfViTCalibrationConfig) -> dict[str, dict[str, float]]:
    """Return the coverage and the mean size of the prediction sets of each method, by stored coverage."""
    found = {}
    for method in SET_METHODS:
        fits = nonconformity(logits, method)
        for coverage, threshold in zip(options.coverages, vars(options)[f"{method}_thresholds"], strict=True):
            sets = fits <= threshold
            covered, sizes = sets.gather(1, labels[:, None]), sets.sum(dim=1)
            means = {"coverage": covered.double().mean().item(), "mean size": sizes.double().mean().item()}
            found[f"{coverage:g} {method}"] = means
    return found


def fit_missed(images: Sequence[tuple[Sequence[tuple[float, bool]], int]]) -> dict[str, list[float]]:
    """Return the largest score threshold at which the mean share of missed objects stays below each share.

    Conformal risk control (https://arxiv.org/abs/2208.02814): if the shares that N images miss sum up to S, the
    expected share that a new image misses is at most (S + 1) / (N + 1).

    Args:
        images: Score and correctness of each detection, and the number of objects, of each image.
    """
    thresholds = np.unique([score for found, _ in images for score, is_hit in found if is_hit])
    missed = np.zeros(len(thresholds))
    for found, count in images:
        hits = np.sort([score for score, is_hit in found if is_hit])
        kept = len(hits) - np.searchsorted(hits, thresholds)  # detections with a score of at least the threshold
        missed += (count - kept) / count if count else 0
    bound, kept_shares = (missed + 1) / (len(images) + 1), dict[float, float]()
    for share in MISSED_SHARES:
        if len(possible := thresholds[bound <= share]):
            # Pipelines return scores above the threshold, so it lies slightly below that of the last object.
            kept_shares[share] = float(np.nextafter(np.float32(possible[-1]), np.float32(0)))
    return {"missed_shares": list(kept_shares), "missed_thresholds": list(kept_shares.values())}


def fit_features(train: Tensor, labels: Tensor, held_out: Tensor, max_bytes: float) -> TrainingFeatures | None:
    """Return a summary of the features of training images, or None if it needs more than `max_bytes`.

    Args:
        train: Pooled features of training images (N, D).
        labels: Class number of each image (N,).
        held_out: Pooled features of other images of the same kind (M, D), for the scale of distances.
        max_bytes: Size limit in bytes, which determines how many features are stored.

    Source: https://arxiv.org/abs/2505.18032
    """
    features = F.normalize(train.double(), dim=-1)
    classes, numbers = labels.unique(return_inverse=True)
    means = torch.stack([features[numbers == number].mean(dim=0) for number in range(len(classes))])
    centered = features - means[numbers]
    covariance = centered.T @ centered / len(features)
    covariance += LEAST_VARIANCE * covariance.trace() / len(covariance) * torch.eye(len(covariance)).double()
    values, directions = torch.linalg.eigh(covariance)
    whitening = (directions * values.rsqrt()).float()  # (D, D)
    num_distances = min(len(held_out), NUM_DISTANCES)
    left = max_bytes - 4 * (whitening.numel() + means.numel()) - 8 * num_distances - HEADER_BYTES
    count = min(len(features), int(left / (2 * features.shape[1])))
    if count < NEIGHBORS:
        return None
    chosen = torch.randperm(len(features), generator=torch.Generator().manual_seed(0))[:count]
    none = torch.zeros(0)
    stored, neighbors = features[chosen].half(), torch.tensor(NEIGHBORS)
    summary = TrainingFeatures(whitening, means.float() @ whitening, stored, neighbors, mahalanobis=none, knn=none)
    places = torch.linspace(0, len(held_out) - 1, num_distances).round().long()
    return replace(summary, **{kind: summary.distances(held_out, kind).sort().values[places] for kind in SIMILARITIES})
