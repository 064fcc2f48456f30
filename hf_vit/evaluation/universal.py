"""Scores of universal segmentation: of segments, instances and classes of pixels."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..data.targets import without_crowds
from ..model.image_targets import IGNORED_LABEL
from . import InstanceMetric, PanopticMetric, SemanticSegmentationMetric, StreamedMetric


PANOPTIC, SEMANTIC, INSTANCE = "panoptic", "semantic", "instance"


class UniversalMetric(StreamedMetric):
    """All scores that the targets allow for: of instances where there are things, of maps where no masks overlap.

    Args:
        names: The K class names.
        thing_ids: Numbers of the countable classes.
        can_overlap: Whether masks of targets may overlap.
    """

    def __init__(self, names: Sequence[str], thing_ids: Sequence[int], can_overlap: bool) -> None:
        """Starts without images."""
        self.names = list(names)
        self.parts: dict[str, Any] = {}
        if not can_overlap:
            self.parts[PANOPTIC] = PanopticMetric(names, thing_ids)
            self.parts[SEMANTIC] = SemanticSegmentationMetric(names, IGNORED_LABEL)
        if thing_ids:
            self.parts[INSTANCE] = InstanceMetric(names, thing_ids)
        self.score_names = tuple(name for part in self.parts for name in self._names_of(part))

    def record(self, prediction: Mapping[str, Any], target: Mapping[str, Any]) -> dict[str, Any]:
        """Scores one image.

        Args:
            prediction: What each of `parts` takes, by name.
            target: `masks` (M, H, W), `class_labels` (M,) and maybe `is_crowd` (M,).

        Returns:
            The record of each part.
        """
        return {
            name: part.record(prediction[name], class_map(target) if name == SEMANTIC else target)
            for name, part in self.parts.items()
        }

    def update(self, records: Iterable[dict[str, Any]]) -> None:
        """Takes in the records of images."""
        records = list(records)
        for name, part in self.parts.items():
            part.update([record[name] for record in records])

    def compute(self) -> dict[str, float]:
        """Returns the scores of segments and instances, and `mean_iou` of the classes of pixels."""
        scores = {name: part.compute() for name, part in self.parts.items()}
        return {name: scores[part][name] for part in self.parts for name in self._names_of(part)}

    def _names_of(self, part: str) -> tuple[str, ...]:
        """Returns which scores of a part are given: of the classes of pixels only the first."""
        names: tuple[str, ...] = self.parts[part].score_names
        return names[:1] if part == SEMANTIC else names

    def per_class(self) -> dict[str, dict[str, float]]:
        """Returns the scores of each class by all parts that know it."""
        classes: dict[str, dict[str, float]] = {name: {} for name in self.names}
        for part in self.parts.values():
            for name, scores in part.per_class().items():
                classes[name] |= scores
        return {name: scores for name, scores in classes.items() if scores}

    def reset(self) -> None:
        """Forgets all images."""
        for part in self.parts.values():
            part.reset()


def class_map(target: Mapping[str, Any]) -> np.ndarray:
    """Returns masks (M, H, W) that do not overlap as a map (H, W) of their classes, 255 for none and for crowds."""
    target = without_crowds(dict(target))
    masks = target["masks"].numpy(force=True)
    labels = np.full(masks.shape[1:], IGNORED_LABEL)
    for mask, label in zip(masks, target["class_labels"].tolist(), strict=True):
        labels[mask] = label
    return labels
