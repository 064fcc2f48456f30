"""Base class of the metrics that the COCO evaluator of faster-coco-eval computes."""

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from operator import itemgetter
from typing import Any, ClassVar, Literal

import numpy as np

from ..extras import check_packages
from .base import StreamedMetric, as_array, mean_of_known
from .thresholds import Threshold, best_threshold


Record = dict[str, Any]
MATCH_IOU = 0.5  # from which on a detection is that of an object, for the threshold of scores


class CocoMetric(StreamedMetric):
    """Average precision and recall as COCO defines them.

    Records hold objects and detections as entries of the COCO format; they are kept, as average precision has no sums.
    `categories` are the numbers and names of the classes that are evaluated, `options` those of the evaluator, without
    which there is an `ImportError`.
    """

    iou_type: ClassVar[str]
    shape: ClassVar[str] = "bbox"  # of the entries of a record: where an object is
    places: ClassVar[dict[str, int]]  # where the evaluator keeps each score

    def __init__(self, categories: Mapping[int, str], **options: Any) -> None:
        super().__init__()
        check_packages("Average precision", "faster_coco_eval")
        self.categories = dict(sorted(categories.items()))
        self.options = options
        self._evaluated: Any = None  # the evaluator of the records, once it was needed

    def reset(self) -> None:
        """Removes all images."""
        super().reset()
        self._evaluated = None

    @abstractmethod
    def record(self, prediction: Mapping[str, Any], target: Mapping[str, Any]) -> Record:
        """Returns `objects` and `detections`, and what images are ordered by: see `ranked`."""

    def update(self, records: Iterable[Record]) -> None:
        """Adds the records of images."""
        super().update(records)
        self._evaluated = None

    def compute(self) -> dict[str, float]:
        """Returns the scores of `places`, all in [0, 1]; NaN where there is no object, for example no large one."""
        stats = self._evaluate().stats
        return {name: float(stats[place]) if stats[place] >= 0 else math.nan for name, place in self.places.items()}

    def per_class(self) -> dict[str, dict[str, float]]:
        """Returns `ap` and `ap_50` of each class that is evaluated, NaN where there is no object of it."""
        precision = self._of_classes("precision")
        return {
            name: {
                "ap": mean_of_known(precision[:, :, place].reshape(-1)),
                "ap_50": mean_of_known(precision[0, :, place]),
            }
            for place, name in enumerate(self.categories.values())
        }

    def best_threshold(self) -> Threshold | None:
        """Returns the score above which detections are given as answers: that of the best F1 at IoU 0.5."""
        return self._threshold_after(nms=1.0)

    def _threshold_after(self, nms: float) -> Threshold | None:
        """Returns the same without detections that overlap a surer one of their class by an IoU above `nms`."""
        found = [pair for record in self.records for pair in self._matched(record, nms)]
        count = sum(not entry["iscrowd"] for record in self.records for entry in record["objects"])
        if not found or not count:
            return None
        scores, is_correct = zip(*found, strict=True)
        return best_threshold(scores, is_correct, count)

    def _matched(self, record: Record, nms: float) -> list[tuple[float, bool]]:
        """Returns the scores of the detections of an image, and which are of an object: the surest of a class first.

        Those of a crowd are left out.
        """
        from faster_coco_eval import mask as overlaps  # here, as only these scores need it

        results = []
        for label in {entry["category_id"] for entry in record["detections"]}:
            detections, objects = (
                [entry for entry in record[part] if entry["category_id"] == label]
                for part in ("detections", "objects")
            )
            crowd = np.array([entry["iscrowd"] for entry in objects], dtype=bool)
            detections.sort(key=lambda entry: -entry["score"])
            places, truths = ([entry[self.shape] for entry in entries] for entries in (detections, objects))
            iou = np.asarray(overlaps.iou(places, truths, crowd.tolist())).reshape(len(places), len(truths))
            kept = list(range(len(places)))
            if nms < 1:
                repeats = np.asarray(overlaps.iou(places, places, [False] * len(places))) > nms
                kept = []
                for number in range(len(places)):
                    if not repeats[number, kept].any():
                        kept.append(number)
            for number in kept:
                entry, own = detections[number], iou[number]
                free = np.where(crowd, 0, own)
                if is_correct := free.max(initial=0) >= MATCH_IOU:
                    iou[:, free.argmax()] = 0  # an object is found once
                if is_correct or not (own[crowd] >= MATCH_IOU).any():
                    results.append((entry["score"], bool(is_correct)))
        return results

    def _of_classes(self, what: Literal["precision", "recall"]) -> np.ndarray:
        """Returns the precision (IoU threshold, recall, class) or the highest recall (IoU threshold, class).

        It is NaN where there is no object of a class.
        """
        values = self._evaluate().eval[what][..., 0, -1]  # all areas, the most detections
        return np.where(values < 0, np.nan, values)

    def _images(self) -> list[list[Record]]:
        """Returns the records of each image, in an order that does not depend on who saw them first."""
        return [[record] for record in sorted(self.records, key=itemgetter("rank"))]

    def _evaluate(self) -> Any:
        from faster_coco_eval import COCO, COCOeval_faster  # here, as only these scores need it

        if self._evaluated is None:
            images = self._images()  # equal scores rank by their order
            objects, detections = (COCO(self._dataset(images, part)) for part in ("objects", "detections"))
            self._evaluated = COCOeval_faster(objects, detections, iouType=self.iou_type, **self.options)
            self._evaluated.run()
        return self._evaluated

    def _dataset(self, images: list[list[Record]], part: str) -> dict[str, list[dict[str, Any]]]:
        entries = [
            {"image_id": number, **entry}
            for number, records in enumerate(images, start=1)
            for record in records
            for entry in record[part]
        ]
        return {
            # The size is asked for, but only polygons need it.
            "images": [{"id": number, "height": 0, "width": 0} for number in range(1, len(images) + 1)],
            "categories": [{"id": label, "name": name} for label, name in self.categories.items()],
            "annotations": [{"id": number, **entry} for number, entry in enumerate(entries, start=1)],
        }


def ranked(record: Record) -> Record:
    """Returns a record of Python's own numbers with its `rank`, which depends on nothing but what it holds."""
    return {**record, "rank": blake2b(repr(record).encode(), digest_size=16).digest()}


def finite_array(values: Any, what: str) -> np.ndarray:
    """Returns predicted values as an array of float64; `ValueError` if they are not finite."""
    array = as_array(values, np.float64)
    if not np.isfinite(array).all():
        raise ValueError(f"The predicted {what} are not finite (NaN or infinite). Has the training diverged?")
    return array


def corner_and_size(boxes: np.ndarray) -> np.ndarray:
    """Returns boxes (..., 4) of left, top, right and bottom as left, top, width and height; turned ones are empty."""
    return np.concatenate([boxes[..., :2], np.maximum(boxes[..., 2:] - boxes[..., :2], 0)], axis=-1)
