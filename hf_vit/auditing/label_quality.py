"""Find images whose label may be wrong, and objects and masks that a trained model contradicts.

Shapes: N images, D features, K classes, H W pixels, G given boxes, B predicted boxes.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..features.probe import fit_probe
from ..model.image_targets import IGNORED_LABEL


UNKNOWN = 0.01  # probability that an image belongs to no class
LABEL_CUT = 0.9  # score of a label above which its image is reported
LEAST_IMAGES = 2  # minimum number of images of a class; labels of smaller classes cannot be checked
TEMPERATURE = 0.1  # of the softmin over pixels or objects: lower values give more weight to the worst
LEAST_SUPPORT = 0.05  # support by predicted boxes that is hardly different from none


def out_of_sample_probabilities(features: np.ndarray, labels: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return class probabilities (N, K) of each image from a linear probe that was trained without the image.

    The probes are trained twice. In the second pass, images whose label the first pass contradicts have less weight.

    Args:
        features: (N, D) features.
        labels: (N,) class numbers from 0 to K - 1.
        groups: (N,) numbers; copies of an image have the same number, and are held out together.
    """
    weights, numbers = None, torch.from_numpy(labels)
    for _ in range(2):
        probe = fit_probe(
            torch.from_numpy(features),
            numbers,
            int(labels.max()) + 1,
            image_weights=weights,
            groups=torch.from_numpy(groups),
        )
        probabilities: np.ndarray = probe.left_out.softmax(dim=1).numpy()
        weights = torch.from_numpy(1 - find_label_issues(probabilities, labels)[0]).sqrt()
    return probabilities


def find_label_issues(probabilities: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a score (N,) in [0, 1] of each label, higher if it is probably wrong, and the best other class (N,).

    The score is q / (p + q + `UNKNOWN`), where p is the probability of the given class, and q the highest probability
    of another class. It ranks images that belong to no class behind those that clearly belong to another one.

    Args:
        probabilities: (N, K) out-of-sample class probabilities.
        labels: (N,) class numbers.
    """
    rows, others = np.arange(len(labels)), probabilities.copy()
    own, others[rows, labels] = others[rows, labels], -1
    best = others.max(axis=1)
    return best / (own + best + UNKNOWN), others.argmax(axis=1)


class ObjectIssue(NamedTuple):
    """A given box that the predictions contradict, or a predicted box that is not given ("overlooked")."""

    kind: str  # "overlooked", "swapped" (another class is predicted), or "unconfirmed" (no box confirms it)
    score: float  # confidence that the annotation is wrong, in [0, 1]
    box: list[float]  # (4,) corners in pixels
    label: int  # number of the given class, or of the class of an overlooked object
    suggestion: int  # number of the predicted class


def find_object_issues(target: Mapping[str, Tensor], prediction: Mapping[str, Tensor]) -> list[ObjectIssue]:
    """Compare given and predicted boxes. Return an issue for each given and each predicted box.

    A predicted box supports a given box by its score times their IoU. Let p and q be the highest support by boxes of
    the given class and of other classes. The score of a given box is q / (p + q + `LEAST_SUPPORT`) if q is higher, and
    1 - p otherwise. The score of a predicted box is its own score times (1 - IoU) with the nearest given box.

    Args:
        target: `boxes` (G, 4) as corners in pixels, `class_labels` (G,) and `is_crowd` (G,).
        prediction: `boxes` (B, 4), `labels` (B,) and `scores` (B,).
    """
    from torchvision.ops import box_iou  # imported lazily: torchvision is optional

    boxes, scores = prediction["boxes"].float(), prediction["scores"].numpy(force=True)
    classes, labels = target["class_labels"].numpy(force=True), prediction["labels"].numpy(force=True)
    overlap = box_iou(target["boxes"].float(), boxes).numpy(force=True)  # (G, B)
    is_same = classes[:, None] == labels
    supports = [np.where(chosen, overlap * scores, 0) for chosen in (is_same, ~is_same)]
    own, other = (support.max(axis=1, initial=0) for support in supports)  # (G,)
    issues = []
    for g, box in enumerate(target["boxes"].tolist()):
        if target["is_crowd"][g]:
            continue
        label = suggestion = int(classes[g])
        kind, score = "unconfirmed", 1 - float(own[g])
        if other[g] > own[g]:
            suggestion = int(labels[supports[1][g].argmax()])
            kind, score = "swapped", float(other[g] / (own[g] + other[g] + LEAST_SUPPORT))
        issues.append(ObjectIssue(kind, score, box, label, suggestion))
    unmatched = scores * (1 - overlap.max(axis=0, initial=0))
    for box, label, score in zip(boxes.tolist(), labels.tolist(), unmatched.tolist(), strict=True):
        issues.append(ObjectIssue("overlooked", score, box, label, label))
    return issues


def mask_issue_score(mask: Tensor, probabilities: Tensor) -> float:
    """Return one minus the softmin of the probabilities of the given labels over the pixels, in [0, 1].

    The score ranks masks with wrong regions first (Lad and Mueller, https://arxiv.org/abs/2307.05080). It is 0 if no
    pixel has a label.

    Args:
        mask: (H, W) class numbers, 255 for ignored pixels.
        probabilities: (K, H, W) class probabilities.
    """
    own = probabilities.gather(0, mask.clamp(max=len(probabilities) - 1)[None])[0][mask != IGNORED_LABEL]
    weights = ((1 - own) / TEMPERATURE).softmax(dim=0)
    return float(1 - (weights * own).sum()) if len(own) else 0.0
