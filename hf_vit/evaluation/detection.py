"""Average precision of boxes and of instance masks, by the COCO evaluator of faster-coco-eval."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from .base import as_array, check_labels, check_same_size, mean_of_known
from .coco import CocoMetric, Record, corner_and_size, finite_array, ranked
from .thresholds import Threshold


NMS_THRESHOLDS = (0.7, 0.5)  # which are tried
NMS_GAIN = 0.02  # of the F1, that leaving out repeated boxes must bring at least


class ClassMetric(CocoMetric):
    """Base class of the metrics whose categories are classes, those of numbers `thing_ids` among `names`."""

    places_name: ClassVar[str]  # of what lies where an object is, in errors

    def __init__(self, names: Sequence[str], thing_ids: Iterable[int]) -> None:
        self.names = list(names)
        numbers = sorted(set(thing_ids))
        check_labels(as_array(numbers, np.int64), self.names, "set of thing_ids")
        super().__init__({number: self.names[number] for number in numbers})

    def _entries(self, what: str, class_labels: Any, **values: Any) -> list[dict[str, Any]]:
        """Returns the objects of classes that are evaluated as entries of the COCO format, with values for each."""
        labels = as_array(class_labels, np.int64)
        check_labels(labels, self.names, what)
        count = len(values[self.shape])
        columns = {"class_labels": labels, **values}
        if wrong := {name: len(column) for name, column in columns.items() if len(column) != count}:
            raise ValueError(
                f"The {what} has {count} {self.places_name}, but another number of other values: {wrong}."
            )
        rows = zip(*values.values(), strict=True)
        return [
            {"category_id": label, **dict(zip(values, row, strict=True))}
            for label, row in zip(labels.tolist(), rows, strict=True)
            if label in self.categories
        ]


class DetectionMetric(ClassMetric):
    """Box AP and AR as COCO defines them, with at most 100 detections of a class per image.

    Objects are small up to an area of 32² pixels and large from 96² on. Detections inside a crowd of their class do
    not count.

    Args:
        names: The K class names.

    Raises:
        ImportError: if faster-coco-eval is not installed.
    """

    iou_type, places_name = "bbox", "boxes"
    places: ClassVar[dict[str, int]] = {
        "map": 0,
        "map_50": 1,
        "map_75": 2,
        "map_small": 3,
        "map_medium": 4,
        "map_large": 5,
        "mar_1": 6,
        "mar_10": 7,
        "mar_100": 8,
    }
    score_names = tuple(places)

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names, range(len(names)))

    def record(self, prediction: Mapping[str, Any], target: Mapping[str, Any]) -> Record:
        """Returns the objects and detections of one image, and what images are ordered by.

        Args:
            prediction: `boxes` (M, 4) of left, top, right and bottom in pixels, `class_labels` (M,) and `scores` (M,).
            target: `boxes` (N, 4) and `class_labels` (N,), and, optionally, `is_crowd` (N,) and `areas` (N,) in square
                pixels, by default those of the boxes.

        Raises:
            ValueError: if numbers of boxes, class numbers and scores differ, class numbers are too large or negative,
                or a prediction is not finite.
        """
        boxes = corner_and_size(as_array(target["boxes"], np.float64).reshape(-1, 4))
        areas = as_array(target.get("areas", boxes[:, 2] * boxes[:, 3]), np.float64)
        crowd = as_array(target.get("is_crowd", np.zeros(len(boxes))), np.int64)
        found = corner_and_size(finite_array(prediction["boxes"], "boxes").reshape(-1, 4))
        scores = finite_array(prediction["scores"], "scores")
        sizes = found[:, 2] * found[:, 3]
        objects = self._entries(
            "target", target["class_labels"], bbox=boxes.tolist(), area=areas.tolist(), iscrowd=crowd.tolist()
        )
        detections = self._entries(
            "prediction", prediction["class_labels"], bbox=found.tolist(), area=sizes.tolist(), score=scores.tolist()
        )
        return ranked({"objects": objects, "detections": detections})

    def best_threshold(self) -> Threshold | None:
        """Returns the same, and, where it finds clearly more, from which overlap on to leave out repeated boxes."""
        best = super().best_threshold()
        for overlap in NMS_THRESHOLDS:
            found = self._threshold_after(nms=overlap)
            if best is not None and found is not None and found.quality > best.quality * (1 + NMS_GAIN):
                best = found._replace(nms=overlap)
        return best

    def per_class(self) -> dict[str, dict[str, float]]:
        """Returns `ap`, `ap_50` and `ar_100` of each class, NaN where there is no object of it."""
        scores, recall = super().per_class(), self._of_classes("recall")
        return {
            name: {**scores[name], "ar_100": mean_of_known(recall[:, label])} for label, name in enumerate(self.names)
        }

    def precision_recall(self) -> dict[str, np.ndarray]:
        """Returns the precision (101,) of each class at IoU 0.5 and a recall of 0, 0.01, ... 1.

        It is NaN where there is no object of the class; else its mean is the class's `ap_50`.
        """
        curves = self._of_classes("precision")[0]  # (recall, class)
        return {name: curves[:, label] for label, name in enumerate(self.names)}


class InstanceMetric(ClassMetric):
    """Mask AP and AR as COCO defines them, with at most 100 detections of a class per image.

    An object's area, which makes it small (below 32² pixels), medium or large (above 96²), is that of its mask.
    Records hold run-length encoded masks.

    Args:
        names: The K class names.
        thing_ids: Numbers of the classes that are evaluated. Objects and detections of others do not count.

    Raises:
        ImportError: if faster-coco-eval is not installed.
        ValueError: if a number is none of the classes.
    """

    iou_type, shape, places_name = "segm", "segmentation", "masks"
    places: ClassVar[dict[str, int]] = {
        "mask_ap": 0,
        "mask_ap_50": 1,
        "mask_ap_75": 2,
        "mask_ap_small": 3,
        "mask_ap_medium": 4,
        "mask_ap_large": 5,
        "mask_ar_100": 8,
    }
    score_names = tuple(places)

    def record(self, prediction: Mapping[str, Any], target: Mapping[str, Any]) -> Record:
        """Returns the objects and detections of one image, with encoded masks, and what images are ordered by.

        Args:
            prediction: `masks` (M, H, W), `class_labels` (M,) and `scores` (M,). Masks may overlap.
            target: `masks` (N, H, W), `class_labels` (N,) and, optionally, `is_crowd` (N,).

        Raises:
            ValueError: if sizes differ or class numbers are too large or negative.
        """
        masks, target_masks = as_array(prediction["masks"], np.bool_), as_array(target["masks"], np.bool_)
        check_same_size(masks, target_masks)
        crowd = as_array(target.get("is_crowd", np.zeros(len(target_masks))), np.int64)
        scores = as_array(prediction["scores"], np.float64)
        objects = self._entries("target", target["class_labels"], **_encode(target_masks), iscrowd=crowd.tolist())
        detections = self._entries("prediction", prediction["class_labels"], **_encode(masks), score=scores.tolist())
        return ranked({"objects": objects, "detections": detections})


def _encode(masks: np.ndarray) -> dict[str, Any]:
    """Returns masks (M, H, W) as run lengths, and their areas."""
    from faster_coco_eval import mask as run_lengths  # here, as only this score needs it

    codes = run_lengths.encode(np.asfortranarray(masks.transpose(1, 2, 0)).view(np.uint8))
    return {"segmentation": codes, "area": [int(run_lengths.area(code)) for code in codes]}
