"""Calibrated scores, prediction sets, and similarity of images to the training images.

Shapes: B batch, D width of pooled features, K labels, M stored training images.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from safetensors.torch import load_file
from torch import Tensor
from transformers.utils import cached_file

from .nested_options import HfViTTaskConfig, option


SIMILARITY_FILE = "similarity.safetensors"
SET_METHODS = ("thr", "aps")
SIMILARITIES = ("mahalanobis", "knn")
Numbers = list[float | int] | tuple[float | int, ...]


@strict
@dataclass
class HfViTCalibrationConfig(HfViTTaskConfig):
    """Values fitted on held-out images after training. Models remove them if their weights or label names change.

    Args:
        enabled: Whether the temperature, the offset and the scale of errors are applied.
        model_class: Class of the model that the values were fitted for; other classes ignore them.
        temperature: Number that divides the logits (https://arxiv.org/abs/1706.04599); below 1, scores get larger.
        offset: Number that is added to the divided logits of all classes of objects, or of the scores of masks
            (logistic scaling).
        num_images: Number of images that the values were fitted on.
        coverages: Shares of images whose prediction set contains the correct label.
        thr_thresholds: For each coverage, the threshold of sets of labels with a high probability (THR,
            https://arxiv.org/abs/1609.00451), on uncalibrated logits.
        aps_thresholds: For each coverage, the threshold of sets of the most likely labels with a high cumulative
            probability (APS, https://arxiv.org/abs/2006.02544, not randomized), on uncalibrated logits.
        error_scale: Factor of expected errors, such as those of keypoints; 0 if it was not fitted.
        missed_shares: Shares of objects that detection may miss (https://arxiv.org/abs/2208.02814).
        missed_thresholds: For each share, the largest score threshold at which at most this share is missed.
        fingerprint: Numbers that describe the weights and label names that the values were fitted for, see
            `weight_changes`; empty if unknown.
    """

    enabled: bool = True
    model_class: str = ""
    temperature: float | int = option(1.0, "(0, inf)")
    offset: float | int = option(0.0, "(-inf, inf)")
    num_images: int = option(0, "[0, inf)")
    coverages: Numbers = ()
    thr_thresholds: Numbers = ()
    aps_thresholds: Numbers = ()
    error_scale: float | int = option(0.0, "[0, inf)")
    missed_shares: Numbers = ()
    missed_thresholds: Numbers = ()
    fingerprint: Numbers = ()

    @property
    def changes_scores(self) -> bool:
        """Whether the temperature or the offset changes scores."""
        return self.enabled and (self.temperature != 1 or self.offset != 0)

    @property
    def applied_error_scale(self) -> float:
        """The factor of expected errors; 0 if it was not fitted or the calibration is disabled."""
        return self.error_scale if self.enabled else 0.0


def calibration_command(name_or_path: str) -> str:
    """Returns the command that calibrates a model, for error messages."""
    folder = Path(name_or_path)
    if not name_or_path or not (folder / "config.json").is_file():
        return "Save or download it, and run: hf-vit calibrate FOLDER DATA"
    data = "" if (folder / "recipe.yaml").is_file() else " DATA"  # training runs store the name of their data
    return f"Run: hf-vit calibrate {shlex.quote(name_or_path)}{data}"


def find_threshold(
    name: str, wanted: float, known: Numbers, thresholds: Numbers, *, is_least: bool, name_or_path: str = ""
) -> float:
    """Returns the threshold of the nearest known value that is at least (or at most) `wanted`."""
    if not known:
        raise ValueError(f"{name}={wanted} needs a calibrated model. {calibration_command(name_or_path)}")
    pairs = list(zip(known, thresholds, strict=True))
    suited = [pair for pair in pairs if (pair[0] >= wanted if is_least else pair[0] <= wanted)]
    if not suited:
        advice = f"Calibrate on more images. {calibration_command(name_or_path)}"
        raise ValueError(f"{name}={wanted} is not within {min(known)} to {max(known)}, as calibrated. {advice}")
    return min(suited)[1] if is_least else max(suited)[1]


def calibrate(logits: Tensor, options: HfViTCalibrationConfig, has_no_object: bool = False) -> Tensor:
    """Returns calibrated logits (..., K). The last class gets no offset if it is `no object`."""
    if not options.changes_scores:
        return logits
    logits = logits / options.temperature
    if has_no_object:
        return torch.cat([logits[..., :-1] + options.offset, logits[..., -1:]], dim=-1)
    return logits + options.offset


def undo_calibration(logits: Tensor, options: HfViTCalibrationConfig) -> Tensor:
    """Returns logits before `calibrate`."""
    return (logits - options.offset) * options.temperature if options.changes_scores else logits


def calibrate_score(score: float, options: HfViTCalibrationConfig) -> float:
    """Returns a calibrated score in [0, 1]."""
    logit = torch.tensor(score, dtype=torch.float64).logit(eps=1e-9)
    return calibrate(logit, options).sigmoid().item() if options.changes_scores else score


def undo_score(score: float, options: HfViTCalibrationConfig) -> float:
    """Returns a score in [0, 1] before `calibrate_score`."""
    logit = torch.tensor(score, dtype=torch.float64).logit()
    return undo_calibration(logit, options).sigmoid().item() if options.changes_scores else score


def nonconformity(logits: Tensor, method: str) -> Tensor:
    """Returns how badly each label fits, given uncalibrated logits (B, K): (B, K) float64 in [0, 1].

    A prediction set contains all labels with values up to a threshold. The value of the most likely label is 0, so
    that it belongs to every set. For others, it is 1 - p for THR, and the probability of all more likely labels for
    APS.
    """
    probabilities = logits.double().softmax(dim=-1)
    ranked = probabilities.sort(dim=-1, descending=True, stable=True)
    values = 1 - ranked.values if method == "thr" else ranked.values.cumsum(dim=-1) - ranked.values
    values = torch.cat([torch.zeros_like(values[:, :1]), values[:, 1:]], dim=-1)
    return torch.empty_like(values).scatter(-1, ranked.indices, values)


@dataclass(frozen=True)
class TrainingFeatures:
    """Summary of the features of the training images, which `hf-vit calibrate` stores in `similarity.safetensors`.

    Features are L2-normalized pooled vectors, for which distances separate unlike images better
    (https://arxiv.org/abs/2505.18032).
    """

    whitening: Tensor  # (D, D), after which features of a class have unit covariance
    means: Tensor  # (K, D), means of the classes after whitening
    features: Tensor  # (M, D), features of some training images
    neighbors: Tensor  # (), rank of the nearest neighbor whose distance is used
    mahalanobis: Tensor  # (N,), distances of held-out images from the nearest mean, ascending
    knn: Tensor  # (N,), distances of held-out images from their neighbor, ascending

    @classmethod
    def load(cls, name_or_path: str) -> "TrainingFeatures":
        """Opens the file of a saved model or of a repository on the Hub; raises `ValueError` if there is none."""
        file = cached_file(
            name_or_path,
            SIMILARITY_FILE,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if file is None:
            advice = calibration_command(name_or_path)
            raise ValueError(f"similarity needs {SIMILARITY_FILE}, which {name_or_path!r} lacks. {advice}")
        return cls(**load_file(file))

    def distances(self, pooled: Tensor, kind: str) -> Tensor:
        """Returns the distance of pooled vectors (B, D) from the training images, (B,) float32."""
        features = F.normalize(pooled.float().cpu(), dim=-1)
        if kind == "mahalanobis":
            return torch.cdist(features @ self.whitening.float(), self.means.float()).amin(dim=-1)
        nearest = torch.cdist(features, self.features.float()).topk(int(self.neighbors), largest=False)
        return nearest.values[:, -1]

    def similarity(self, pooled: Tensor, kind: str) -> Tensor:
        """Returns the share of held-out images that are at least as far from the training images, (B,) in [0, 1]."""
        known: Tensor = vars(self)[kind]
        nearer = torch.searchsorted(known, self.distances(pooled, kind).contiguous())
        return 1 - nearer.double() / len(known)
