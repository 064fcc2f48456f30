"""Metrics of semantic segmentation, panoptic segmentation and universal segmentation.

Panoptic quality (Kirillov et al., https://arxiv.org/abs/1801.00868) is computed as in the COCO panoptic API.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from ..data.targets import without_crowds
from ..model.image_targets import IGNORED_LABEL
from .base import TOLERANCE, StreamedMetric, Threshold, as_array, check_labels, check_same_size, mean_without_nan
from .detection import InstanceMetric


class SemanticSegmentationMetric(StreamedMetric):
    """Mean IoU, pixel accuracy, mean accuracy and mean Dice over the pixels of all images, as in mmsegmentation.

    The means of IoU and Dice include all classes that occur in targets or predictions (as in torchmetrics). The mean
    accuracy includes all classes that occur in targets. Scores of other classes are NaN.

    Args:
        names: The K class names.
        ignore_index: Target value of ignored pixels.
    """

    score_names = ("mean_iou", "pixel_accuracy", "mean_accuracy", "mean_dice")

    def __init__(self, names: Sequence[str], ignore_index: int = IGNORED_LABEL) -> None:
        super().__init__()
        self.names = list(names)
        self.ignore_index = ignore_index

    def record(self, prediction: ArrayLike | Tensor, target: ArrayLike | Tensor) -> dict[str, np.ndarray]:
        """Return the positions and pixel counts of the nonzero cells of the confusion matrix of one image.

        Args:
            prediction: (H, W) class numbers.
            target: (H, W) class numbers, with `ignore_index` at ignored pixels.

        Raises:
            ValueError: if prediction and target differ in size, or a class number is out of range.
        """
        answers, labels = as_array(prediction, np.int64), as_array(target, np.int64)
        check_same_size(answers, labels)
        counted = labels != self.ignore_index
        answers, labels = answers[counted], labels[counted]
        check_labels(answers, self.names, "prediction")
        check_labels(labels, self.names, "target")
        counts = np.bincount(labels * len(self.names) + answers)
        cells = np.flatnonzero(counts)
        return {"cells": cells, "counts": counts[cells]}

    @property
    def confusion_matrix(self) -> np.ndarray:
        """Pixel counts of all images, (K, K). Rows are true classes, columns are predicted classes."""
        counts = np.zeros(len(self.names) ** 2, dtype=np.int64)
        for record in self.records:
            counts[record["cells"]] += record["counts"]
        return counts.reshape(len(self.names), len(self.names))

    def per_class(self) -> dict[str, dict[str, float]]:
        """Return `iou`, `accuracy` (share of correctly predicted pixels) and `dice` of each class."""
        matrix = self.confusion_matrix
        right, labels, answers = matrix.diagonal(), matrix.sum(axis=1), matrix.sum(axis=0)
        with np.errstate(invalid="ignore"):  # Scores of absent classes are 0 / 0 = NaN
            scores = {
                "iou": right / (labels + answers - right),
                "accuracy": right / labels,
                "dice": 2 * right / (labels + answers),
            }
        return {
            name: {score: float(values[number]) for score, values in scores.items()}
            for number, name in enumerate(self.names)
        }

    def compute(self) -> dict[str, float]:
        """Return `mean_iou`, `pixel_accuracy`, `mean_accuracy` and `mean_dice`, all in [0, 1]."""
        classes = self.per_class().values()
        matrix = self.confusion_matrix
        pixels = matrix.sum()
        return {
            "mean_iou": mean_without_nan(scores["iou"] for scores in classes),
            "pixel_accuracy": float(matrix.trace() / pixels) if pixels else math.nan,
            "mean_accuracy": mean_without_nan(scores["accuracy"] for scores in classes),
            "mean_dice": mean_without_nan(scores["dice"] for scores in classes),
        }


PANOPTIC, SEMANTIC, INSTANCE, TRIED = "panoptic", "semantic", "instance", "tried"
DEFAULT_THRESHOLD = 0.5  # Minimum class probability of a segment.
TRIED_THRESHOLDS = (0.2, 0.35, DEFAULT_THRESHOLD, 0.65, 0.8)
MATCH_IOU = 0.5  # Segments match if their IoU is above this value. Each segment then has at most one match.


class MatchedSegments(NamedTuple):
    """Counts of one class in an image: IoU summed over matches, true positives, false positives, false negatives."""

    iou: float
    true_positives: int
    false_positives: int
    false_negatives: int


class PanopticMetric(StreamedMetric):
    """Panoptic, segmentation and recognition quality, averaged over the classes that occur.

    A predicted segment matches a target segment of the same class if their IoU is above 0.5. Pixels outside of all
    target masks are void. Void pixels are excluded from unions, and a predicted segment that consists mostly of void
    pixels is not a false positive.

    Args:
        names: The K class names.
        thing_ids: Numbers of the countable classes; all other classes are stuff. Used only to select the classes of
            `pq_things` and `pq_stuff`.

    Raises:
        ValueError: if `thing_ids` contains a number that is not a class number.
    """

    score_names = ("pq", "sq", "rq", "pq_things", "pq_stuff")

    def __init__(self, names: Sequence[str], thing_ids: Iterable[int]) -> None:
        super().__init__()
        self.names = list(names)
        self.thing_ids = frozenset(thing_ids)
        check_labels(as_array(sorted(self.thing_ids), np.int64), self.names, "set of thing_ids")

    def record(self, prediction: Mapping[str, Any], target: Mapping[str, Any]) -> dict[int, MatchedSegments]:
        """Return the counts of matched and unmatched segments for each class that occurs in one image.

        Args:
            prediction: Output of `post_process_panoptic_segmentation`: `segmentation` (H, W) with segment ids, and
                `segments_info`, a list of dicts with `id` and `label_id` of each segment. The ids -1 and 0 mean no
                segment unless `segments_info` contains them.
            target: `masks` (M, H, W) without overlaps, `class_labels` (M,) and, optionally, `is_crowd` (M,).

        Raises:
            ValueError: if prediction and target differ in size, target masks overlap, or class numbers or segment ids
                are unknown.
        """
        masks = as_array(target["masks"], np.bool_)
        target_labels = as_array(target["class_labels"], np.int64)
        crowd = as_array(target.get("is_crowd", np.zeros(len(masks))), np.bool_)
        segmentation = as_array(prediction["segmentation"], np.int64)
        labels = as_array([segment["label_id"] for segment in prediction["segments_info"]], np.int64)
        check_same_size(segmentation, masks)
        check_labels(labels, self.names, "prediction")
        check_labels(target_labels, self.names, "target")
        rows = _target_rows(masks)
        columns = _predicted_columns(segmentation, [segment["id"] for segment in prediction["segments_info"]])
        shape = (len(masks) + 1, len(labels) + 1)
        overlap = np.bincount((rows * shape[1] + columns).reshape(-1), minlength=math.prod(shape)).reshape(shape)
        return _match(overlap, target_labels, labels, crowd)

    def per_class(self) -> dict[str, dict[str, float]]:
        """Return `pq`, `sq` and `rq` of each class; NaN for a class that occurs in no target and no prediction."""
        return {name: self._class_scores(label) for label, name in enumerate(self.names)}

    def compute(self) -> dict[str, float]:
        """Return `pq`, `sq`, `rq`, `pq_things` and `pq_stuff`, all in [0, 1]."""
        classes = [self._class_scores(label) for label in range(len(self.names))]
        kinds = {"pq_things": self.thing_ids, "pq_stuff": {*range(len(classes))} - self.thing_ids}
        return {
            **{name: mean_without_nan(scores[name] for scores in classes) for name in ("pq", "sq", "rq")},
            **{name: mean_without_nan(classes[label]["pq"] for label in labels) for name, labels in kinds.items()},
        }

    def _class_scores(self, label: int) -> dict[str, float]:
        found = [record[label] for record in self.records if label in record]
        matches = sum(own.true_positives for own in found)
        segments = matches + sum(own.false_positives + own.false_negatives for own in found) / 2
        if not segments:
            return dict.fromkeys(("pq", "sq", "rq"), math.nan)
        iou = math.fsum(own.iou for own in found)
        return {"pq": iou / segments, "sq": iou / matches if matches else 0.0, "rq": matches / segments}


def _target_rows(masks: np.ndarray) -> np.ndarray:
    """Return the number of the target segment at each pixel (H, W), starting at 1; 0 for void pixels."""
    if doubtful := int((masks.sum(axis=0) > 1).sum()):
        raise ValueError(
            f"{doubtful} pixels are in several target masks. Panoptic targets must not overlap; for overlapping "
            "objects, use InstanceMetric."
        )
    return np.einsum("mhw,m->hw", masks, np.arange(1, len(masks) + 1))


def _predicted_columns(segmentation: np.ndarray, ids: list[int]) -> np.ndarray:
    """Return the number of the predicted segment at each pixel (H, W), starting at 1; 0 for no segment."""
    found, places = np.unique(segmentation, return_inverse=True)
    columns = {-1: 0, 0: 0} | {number: column for column, number in enumerate(ids, start=1)}
    if unlisted := [number for number in found.tolist() if number not in columns]:
        raise ValueError(f"The segmentation has ids that are missing from segments_info: {unlisted[:10]}.")
    return np.array([columns[number] for number in found.tolist()])[places].reshape(segmentation.shape)


def _match(
    overlap: np.ndarray, target_labels: np.ndarray, labels: np.ndarray, crowd: np.ndarray
) -> dict[int, MatchedSegments]:
    """Match target and predicted segments, and return the counts of each class.

    `overlap` (M + 1, P + 1) is the number of pixels shared by each target segment (row) and predicted segment
    (column). The first row is for void pixels, the first column for pixels without a predicted segment.
    `target_labels` (M,) and `labels` (P,) are the classes of the segments. `crowd` (M,) marks target segments that are
    crowds. Crowds cannot be matched, but predicted segments inside them are not false positives.
    """
    target_areas, areas = overlap[1:].sum(axis=1), overlap[:, 1:].sum(axis=0)  # (M,), (P,)
    void, overlap = overlap[0, 1:], overlap[1:, 1:]  # (P,), (M, P)
    iou = overlap / np.maximum(target_areas[:, None] + areas - overlap - void, 1)
    same_class = target_labels[:, None] == labels
    matched = (iou > MATCH_IOU) & same_class & ~crowd[:, None]
    excused = void + (overlap * (same_class & crowd[:, None])).sum(axis=0)
    # Segments without pixels are neither false negatives nor false positives.
    missed = ~matched.any(axis=1) & ~crowd & (target_areas > 0)
    invented = ~matched.any(axis=0) & (excused <= areas / 2) & (areas > 0)
    return {
        int(label): MatchedSegments(
            iou=math.fsum(iou[matched & (labels == label)]),
            true_positives=int(matched[:, labels == label].sum()),
            false_positives=int(invented[labels == label].sum()),
            false_negatives=int(missed[target_labels == label].sum()),
        )
        for label in np.union1d(target_labels, labels)
    }


class UniversalMetric(StreamedMetric):
    """Metrics of universal segmentation: panoptic, semantic and instance segmentation.

    Instance metrics are computed if there are countable classes. Panoptic and semantic metrics are computed if target
    masks do not overlap.

    Args:
        names: The K class names.
        thing_ids: Numbers of the countable classes.
        can_overlap: Whether target masks may overlap.
    """

    def __init__(self, names: Sequence[str], thing_ids: Sequence[int], can_overlap: bool) -> None:
        self.names = list(names)
        self.parts: dict[str, Any] = {}
        if not can_overlap:
            self.parts[PANOPTIC] = PanopticMetric(names, thing_ids)
            self.parts[SEMANTIC] = SemanticSegmentationMetric(names, IGNORED_LABEL)
        if thing_ids:
            self.parts[INSTANCE] = InstanceMetric(names, thing_ids)
        self.score_names = tuple(name for part in self.parts for name in self._names_of(part))
        # One metric of panoptic quality for each candidate score threshold.
        self.tried = {threshold: PanopticMetric(names, thing_ids) for threshold in TRIED_THRESHOLDS}

    def record(self, prediction: Mapping[str, Any], target: Mapping[str, Any]) -> dict[str, Any]:
        """Return the records of all metrics for one image.

        Args:
            prediction: Dict from each name in `parts` to the prediction for that metric. The optional entry "tried" is
                a dict from each of `TRIED_THRESHOLDS` to the segments predicted with that threshold.
            target: `masks` (M, H, W), `class_labels` (M,) and, optionally, `is_crowd` (M,).
        """
        record = {
            name: part.record(prediction[name], class_map(target) if name == SEMANTIC else target)
            for name, part in self.parts.items()
        }
        tried = prediction.get(TRIED, {})
        return record | {TRIED: {value: self.tried[value].record(found, target) for value, found in tried.items()}}

    def update(self, records: Iterable[dict[str, Any]]) -> None:
        """Add the records of images."""
        records = list(records)
        for name, part in self.parts.items():
            part.update([record[name] for record in records])
        for threshold, part in self.tried.items():
            part.update([record[TRIED][threshold] for record in records if record[TRIED]])

    def compute(self) -> dict[str, float]:
        """Return the panoptic and instance scores, and `mean_iou` of the semantic segmentation."""
        scores = {name: part.compute() for name, part in self.parts.items()}
        return {name: scores[part][name] for part in self.parts for name in self._names_of(part)}

    def _names_of(self, part: str) -> tuple[str, ...]:
        """Return the names of the scores to report for a metric: for semantic segmentation the first one, else all."""
        names: tuple[str, ...] = self.parts[part].score_names
        return names[:1] if part == SEMANTIC else names

    def per_class(self) -> dict[str, dict[str, float]]:
        """Return the scores of each class from all metrics that evaluate this class."""
        classes: dict[str, dict[str, float]] = {name: {} for name in self.names}
        for part in self.parts.values():
            for name, scores in part.per_class().items():
                classes[name] |= scores
        return {name: scores for name, scores in classes.items() if scores}

    def count_objects(self, threshold: float) -> tuple[int, int, int]:
        """Return the numbers of objects, predicted instances and matches; 0 without countable classes."""
        return self.parts[INSTANCE].count_objects(threshold) if INSTANCE in self.parts else (0, 0, 0)

    def best_threshold(self) -> Threshold | None:
        """Return the candidate score threshold of segments with the best panoptic quality (PQ).

        Returns the default threshold 0.5 if its PQ is nearly as good. If PQ is not computed, returns the threshold
        with the best F1 of instances.
        """
        if PANOPTIC not in self.parts:
            return self.parts[INSTANCE].best_threshold() if INSTANCE in self.parts else None
        qualities = {threshold: part.compute()["pq"] for threshold, part in self.tried.items()}
        best = max(qualities, key=lambda threshold: (qualities[threshold], threshold == DEFAULT_THRESHOLD))
        if not qualities[best] > 0:  # also true if the best quality is NaN
            return None
        best = best if qualities[DEFAULT_THRESHOLD] < qualities[best] * (1 - TOLERANCE) else DEFAULT_THRESHOLD
        return Threshold(best, qualities[best], measure="PQ")

    def reset(self) -> None:
        """Remove the records of all images."""
        for part in (*self.parts.values(), *self.tried.values()):
            part.reset()


def class_map(target: Mapping[str, Any]) -> np.ndarray:
    """Convert masks (M, H, W) without overlaps to a map (H, W) of class numbers.

    Pixels in a crowd or outside of all masks are 255.
    """
    target = without_crowds(dict(target))
    masks = target["masks"].numpy(force=True)
    labels = np.full(masks.shape[1:], IGNORED_LABEL)
    for mask, label in zip(masks, target["class_labels"].tolist(), strict=True):
        labels[mask] = label
    return labels
