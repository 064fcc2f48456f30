"""Find images whose label is probably wrong, and objects and masks that a trained model contradicts.

Shapes: N images, D features, K classes, H W pixels, G given boxes, B predicted boxes.
"""

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ..model.image_targets import IGNORED_LABEL


NUM_FOLDS = 5
STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1)  # candidates for the inverse regularization strength C of the probe
MAX_ITERATIONS = 300
LEAST_IMAGES = 2  # minimum number of images of a class; labels of smaller classes cannot be checked
TEMPERATURE = 0.1  # of the softmin over pixels or objects: lower values give more weight to the worst
MATCH_IOU = 0.5  # minimum IoU of two boxes of the same object
LEAST_SIMILAR = 0.1  # minimum IoU of two boxes that can be matched


class LabelIssues(NamedTuple):
    """Result of the check of N labels.

    Args:
        score: (N,) probability that the label is wrong; NaN for images that were not checked.
        is_suspicious: (N,) whether the label is probably wrong.
        suggestion: (N,) number of the class that is suggested instead.
    """

    score: np.ndarray
    is_suspicious: np.ndarray
    suggestion: np.ndarray


def out_of_sample_probabilities(features: np.ndarray, labels: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return class probabilities (N, K) of each image from a linear probe that was trained without the image.

    Args:
        features: (N, D) features.
        labels: (N,) class numbers from 0 to K - 1.
        groups: (N,) numbers; copies of an image have the same number, and are held out together.
    """
    from sklearn.linear_model import LogisticRegression  # imported lazily: other functions do not use scikit-learn
    from sklearn.metrics import log_loss
    from sklearn.model_selection import StratifiedGroupKFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    num_classes = int(labels.max()) + 1
    probabilities = np.zeros((len(labels), num_classes))

    def predict(strength: float, train: np.ndarray, others: np.ndarray) -> np.ndarray:
        model: Any = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=MAX_ITERATIONS))
        found = np.zeros((len(others), num_classes))
        found[:, np.unique(labels[train])] = model.fit(features[train], labels[train]).predict_proba(features[others])
        return found

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "lbfgs failed to converge")
        warnings.filterwarnings("ignore", "The least populated class")
        folds = list(StratifiedGroupKFold(NUM_FOLDS, shuffle=True, random_state=0).split(features, labels, groups))
        train, held_out = folds[0]
        losses = [
            log_loss(labels[held_out], predict(strength, train, held_out), labels=np.arange(num_classes))
            for strength in STRENGTHS
        ]
        for train, held_out in folds:
            probabilities[held_out] = predict(STRENGTHS[int(np.argmin(losses))], train, held_out)
    return probabilities


def find_label_issues(probabilities: np.ndarray, labels: np.ndarray) -> LabelIssues:
    """Find wrong labels by confident learning (Northcutt et al., https://arxiv.org/abs/1911.00068).

    A label is suspicious if the probability of another class reaches the mean probability of this class among the
    images that have its label, and exceeds the probability of the given class.

    Args:
        probabilities: (N, K) out-of-sample class probabilities.
        labels: (N,) class numbers.
    """
    rows, classes = np.arange(len(labels)), range(probabilities.shape[1])
    own = probabilities[rows, labels]
    confident = np.array([probabilities[labels == c, c].mean() if (labels == c).any() else np.inf for c in classes])
    reached = np.where(probabilities >= confident, probabilities, 0)
    suggestion = reached.argmax(axis=1)
    is_suspicious = (suggestion != labels) & (reached[rows, suggestion] > own)
    others = probabilities.copy()
    others[rows, labels] = -1
    # The margin ranks an image with two likely classes behind one that the probe contradicts.
    score = (1 - own + others.max(axis=1)) / 2
    return LabelIssues(score, is_suspicious, np.where(is_suspicious, suggestion, others.argmax(axis=1)))


class ObjectIssue(NamedTuple):
    """A difference between the given and the predicted boxes of an image.

    Args:
        kind: "overlooked" (no given box), "badly_located", "swapped" (another class) or "unconfirmed" (no predicted
            box).
        score: Confidence of the difference, in [0, 1].
        box: (4,) box in pixels: the given box, or the predicted box of an overlooked object.
        label: Number of the given class, or of the class of an overlooked object.
        suggestion: Number of the predicted class.
    """

    kind: str
    score: float
    box: list[float]
    label: int
    suggestion: int


def find_object_issues(target: Mapping[str, Tensor], prediction: Mapping[str, Tensor]) -> list[ObjectIssue]:
    """Compare given and predicted boxes, similar to ObjectLab (Tkachenko et al., https://arxiv.org/abs/2309.00832).

    Given and predicted boxes are matched one to one by IoU times score.

    Args:
        target: `boxes` (G, 4) as corners in pixels, `class_labels` (G,) and `is_crowd` (G,).
        prediction: `boxes` (B, 4), `labels` (B,) and `scores` (B,).
    """
    from scipy.optimize import linear_sum_assignment  # imported lazily: scipy is optional
    from torchvision.ops import box_iou  # imported lazily: torchvision is optional

    given, classes = target["boxes"].float(), target["class_labels"].tolist()
    boxes, labels, scores = prediction["boxes"].float(), prediction["labels"].tolist(), prediction["scores"].tolist()
    overlap = box_iou(given, boxes).numpy(force=True)  # (G, B)
    is_same = np.equal.outer(classes, labels) if classes and labels else np.zeros(overlap.shape, bool)
    value = overlap * np.array(scores) * np.where(is_same, 1, 0.5) * (overlap > LEAST_SIMILAR)
    matches = {g: b for g, b in zip(*linear_sum_assignment(-value), strict=True) if value[g, b] > 0}
    issues = []
    for g, box in enumerate(given.tolist()):
        b = matches.get(g)
        if b is None:
            best = float((overlap[g] * np.array(scores)).max(initial=0))
            issues.append(ObjectIssue("unconfirmed", 1 - best, box, classes[g], classes[g]))
        elif classes[g] != labels[b] and overlap[g, b] >= MATCH_IOU:
            issues.append(ObjectIssue("swapped", scores[b] * float(overlap[g, b]), box, classes[g], labels[b]))
        else:
            score = scores[b] * (1 - float(overlap[g, b]))
            issues.append(ObjectIssue("badly_located", score, box, classes[g], labels[b]))
    for b in {*range(len(labels))} - {*matches.values()}:
        score = scores[b] * (1 - float(overlap[:, b].max(initial=0)))
        issues.append(ObjectIssue("overlooked", score, boxes[b].tolist(), labels[b], labels[b]))
    is_crowd = target["is_crowd"].tolist()
    crowds = [box for box, crowd in zip(given.tolist(), is_crowd, strict=True) if crowd]
    return [issue for issue in issues if issue.box not in crowds]


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
