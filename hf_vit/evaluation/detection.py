"""COCO average precision of boxes and instance masks, computed with faster-coco-eval."""

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from operator import itemgetter
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..extras import check_packages
from ..model.task_object_detection import non_maximum_suppression
from .base import StreamedMetric, Threshold, as_array, best_threshold, check_labels, check_same_size, mean_without_nan


Record = dict[str, Any]
# Thresholds are chosen by cross-validation (FOLDS folds) if there are fewer images or objects than these limits.
FEW_IMAGES, FEW_OBJECTS, FOLDS = 30, 100, 5
MATCH_IOU = 0.5  # Minimum IoU of a correct detection, used for choosing the score threshold.


class Matches(NamedTuple):
    """Detections of one image, each with its score and whether it is correct, and the number of annotated objects."""

    found: list[tuple[float, bool]]
    num_objects: int


def find_best_threshold(images: Sequence[Matches]) -> Threshold | None:
    """Return the threshold with the best F1 on the images, or None if no detection is correct."""
    found, count = [pair for image in images for pair in image.found], sum(image.num_objects for image in images)
    if not found or not count:
        return None
    scores, is_correct = zip(*found, strict=True)
    return best_threshold(scores, is_correct, count)


def cross_fitted_threshold(images: Sequence[Matches]) -> Threshold | None:
    """Choose a score threshold by cross-validation.

    Returns the mean of the thresholds of all folds, and the F1 on the held-out images. With few images, this F1 is
    less optimistic than the best F1 on all images.
    """
    values, num_right, num_given = [], 0, 0
    for fold in range(FOLDS):
        if (
            chosen := find_best_threshold([image for number, image in enumerate(images) if number % FOLDS != fold])
        ) is None:
            return find_best_threshold(images)
        given = [right for image in images[fold::FOLDS] for score, right in image.found if score > chosen.value]
        values.append(chosen.value)
        num_right, num_given = num_right + sum(given), num_given + len(given)
    quality = 2 * num_right / (num_given + sum(image.num_objects for image in images))
    return Threshold(float(f"{mean_without_nan(values):.3g}"), quality, measure="cross-fitted F1")


class CocoMetric(StreamedMetric):
    """Base class of metrics that compute average precision and recall as defined by COCO.

    Records contain the objects and detections of an image in COCO format. All records are kept, because average
    precision cannot be computed from sums over images. `categories` maps the numbers of the evaluated classes to
    their names. `options` are passed to the COCO evaluator. Raises `ImportError` if faster-coco-eval is not installed.
    """

    iou_type: ClassVar[str]
    shape: ClassVar[str] = "bbox"  # Key of the box or mask in the COCO dict of an object or detection.
    places: ClassVar[dict[str, int]]  # Maps the name of a score to its index in the `stats` of the COCO evaluator.

    def __init__(self, categories: Mapping[int, str], **options: Any) -> None:
        super().__init__()
        check_packages("Average precision", "faster_coco_eval")
        self.categories = dict(sorted(categories.items()))
        self.options = options
        self._evaluated: Any = None  # COCO evaluator with the results for all records, created on first use

    def reset(self) -> None:
        """Remove the records of all images."""
        super().reset()
        self._evaluated = None

    @abstractmethod
    def record(self, prediction: Mapping[str, Any], target: Mapping[str, Any]) -> Record:
        """Return the `objects` and `detections` of one image in COCO format, and its sort key `rank`, see `ranked`."""

    def update(self, records: Iterable[Record]) -> None:
        """Add the records of images."""
        super().update(records)
        self._evaluated = None

    def compute(self) -> dict[str, float]:
        """Return the scores named in `places`, all in [0, 1].

        A score is NaN if there are no objects for it. For example, `map_large` is NaN if no object is large.
        """
        stats = self._evaluate().stats
        return {name: float(stats[place]) if stats[place] >= 0 else math.nan for name, place in self.places.items()}

    def per_class(self) -> dict[str, dict[str, float]]:
        """Return `ap` and `ap_50` of each evaluated class; NaN for a class without objects."""
        precision = self._class_values("precision")
        return {
            name: {
                "ap": mean_without_nan(precision[:, :, place].reshape(-1)),
                "ap_50": mean_without_nan(precision[0, :, place]),
            }
            for place, name in enumerate(self.categories.values())
        }

    def best_threshold(self) -> Threshold | None:
        """Return the score threshold with the best F1 at an IoU of 0.5."""
        return find_best_threshold(self.all_matched())

    def all_matched(self, nms: float = 1.0, is_class_agnostic: bool = False) -> list[Matches]:
        """Return the matches of each image, in an order that does not depend on the number of processes."""
        return [
            Matches(
                self._matched(record, nms, is_class_agnostic), sum(not entry["iscrowd"] for entry in record["objects"])
            )
            for record in sorted(self.records, key=itemgetter("rank"))
        ]

    def score_logits(self) -> tuple[Tensor, Tensor]:
        """Return the logit (N,) of the score of each detection, and whether it is correct at an IoU of 0.5, (N,)."""
        found = torch.tensor([pair for image in self.all_matched() for pair in image.found], dtype=torch.float64)
        scores, hits = found.view(-1, 2).T
        return scores.logit(eps=1e-9), hits

    def _matched(self, record: Record, nms: float, is_class_agnostic: bool) -> list[tuple[float, bool]]:
        """Return the score of each detection of an image, and whether it matches an object of the same class.

        Detections are matched in descending order of score. Detections inside a crowd are excluded. A detection is
        also excluded if its IoU with a detection of higher score exceeds `nms`. Only detections of the same class are
        compared, unless `is_class_agnostic` is set.
        """
        from faster_coco_eval import mask as overlaps  # Imported here because faster-coco-eval is optional

        answers = sorted(record["detections"], key=lambda entry: -entry["score"])
        if nms < 1:
            boxes = torch.tensor([entry["bbox"] for entry in answers], dtype=torch.float64).reshape(-1, 4)
            boxes[:, 2:] += boxes[:, :2]  # from sizes to corners
            labels = None if is_class_agnostic else torch.tensor([entry["category_id"] for entry in answers])
            answers = [answers[number] for number in non_maximum_suppression(boxes, labels, nms)]
        results = []
        for label in {entry["category_id"] for entry in answers}:
            detections, objects = (
                [entry for entry in entries if entry["category_id"] == label]
                for entries in (answers, record["objects"])
            )
            crowd = np.array([entry["iscrowd"] for entry in objects], dtype=bool)
            own_places, truths = ([entry[self.shape] for entry in entries] for entries in (detections, objects))
            iou = np.asarray(overlaps.iou(own_places, truths, crowd.tolist())).reshape(len(detections), len(truths))
            for entry, own in zip(detections, iou, strict=True):
                free = np.where(crowd, 0, own)
                if is_correct := free.max(initial=0) >= MATCH_IOU:
                    iou[:, free.argmax()] = 0  # An object matches at most one detection
                if is_correct or not (own[crowd] >= MATCH_IOU).any():
                    results.append((entry["score"], bool(is_correct)))
        return results

    def _class_values(self, what: Literal["precision", "recall"]) -> np.ndarray:
        """Return the precision or the highest recall of each class, as defined by COCO.

        Precisions have the axes (IoU threshold, recall, class), recalls (IoU threshold, class). Values are NaN for
        classes without objects.
        """
        # Index 0 selects objects of all areas, and index -1 the highest limit of detections per image.
        values = self._evaluate().eval[what][..., 0, -1]
        return np.where(values < 0, np.nan, values)

    def _images(self) -> list[list[Record]]:
        """Return the records of each image, in an order that does not depend on the number of processes."""
        return [[record] for record in sorted(self.records, key=itemgetter("rank"))]

    def _evaluate(self) -> Any:
        from faster_coco_eval import COCO, COCOeval_faster  # Imported here because faster-coco-eval is optional

        if self._evaluated is None:
            images = self._images()  # in fixed order, because COCO ranks equal scores by position
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
            # The COCO format requires the image size, but the evaluator uses it only for polygons
            "images": [{"id": number, "height": 0, "width": 0} for number in range(1, len(images) + 1)],
            "categories": [{"id": label, "name": name} for label, name in self.categories.items()],
            "annotations": [{"id": number, **entry} for number, entry in enumerate(entries, start=1)],
        }


def ranked(record: Record) -> Record:
    """Add `rank` to a record of plain Python numbers: a hash of the record, used as a sort key of images."""
    return {**record, "rank": blake2b(repr(record).encode(), digest_size=16).digest()}


def finite_array(values: Any, what: str) -> np.ndarray:
    """Return predicted values as a float64 array; raise `ValueError` if they are not finite."""
    array = as_array(values, np.float64)
    if not np.isfinite(array).all():
        raise ValueError(f"The predicted {what} are not finite (NaN or infinite). Training may have diverged.")
    return array


def corner_and_size(boxes: np.ndarray) -> np.ndarray:
    """Convert boxes (..., 4) from left, top, right, bottom to left, top, width, height.

    Negative widths and heights become 0.
    """
    return np.concatenate([boxes[..., :2], np.maximum(boxes[..., 2:] - boxes[..., :2], 0)], axis=-1)


# Candidate settings of non-maximum suppression (NMS): pairs of IoU threshold and whether NMS is class-agnostic
NMS_TRIED = ((0.7, False), (0.5, False), (0.7, True), (0.5, True))
NMS_GAIN = 0.02  # NMS is used only if it improves F1 by at least this relative amount.


class ClassMetric(CocoMetric):
    """Base class of COCO metrics that evaluate each class separately.

    `names` are the names of all classes, `thing_ids` the numbers of the evaluated classes.
    """

    shape_noun: ClassVar[str]  # Noun for boxes or masks in error messages

    def __init__(self, names: Sequence[str], thing_ids: Iterable[int]) -> None:
        self.names = list(names)
        numbers = sorted(set(thing_ids))
        check_labels(as_array(numbers, np.int64), self.names, "set of thing_ids")
        super().__init__({number: self.names[number] for number in numbers})

    def count_objects(self, threshold: float) -> tuple[int, int, int]:
        """Return the numbers of objects, of predictions and of matches at an IoU of 0.5, not counting crowds."""
        images = self.all_matched()
        matches = [is_match for image in images for score, is_match in image.found if score > threshold]
        return sum(image.num_objects for image in images), len(matches), sum(matches)

    def _entries(self, what: str, class_labels: Any, **values: Any) -> list[dict[str, Any]]:
        """Return the objects or detections of the evaluated classes as COCO dicts. `values` are additional fields."""
        labels = as_array(class_labels, np.int64)
        check_labels(labels, self.names, what)
        count = len(values[self.shape])
        columns = {"class_labels": labels, **values}
        if wrong := {name: len(column) for name, column in columns.items() if len(column) != count}:
            raise ValueError(f"The {what} has {count} {self.shape_noun}, but these values differ in number: {wrong}.")
        rows = zip(*values.values(), strict=True)
        return [
            {"category_id": label, **dict(zip(values, row, strict=True))}
            for label, row in zip(labels.tolist(), rows, strict=True)
            if label in self.categories
        ]


class DetectionMetric(ClassMetric):
    """COCO average precision (AP) and average recall (AR) of boxes, with at most 100 detections per class and image.

    Objects with an area below 32² pixels are small, and objects with an area above 96² pixels are large. Detections
    inside a crowd of the same class are ignored.

    Args:
        names: The K class names.

    Raises:
        ImportError: if faster-coco-eval is not installed.
    """

    iou_type, shape_noun = "bbox", "boxes"
    score_names = ("map", "map_50", "map_75", "map_small", "map_medium", "map_large", "mar_1", "mar_10", "mar_100")
    places: ClassVar[dict[str, int]] = dict(zip(score_names, range(9), strict=True))

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names, range(len(names)))

    def record(self, prediction: Mapping[str, Any], target: Mapping[str, Any]) -> Record:
        """Return the objects and detections of one image in COCO format, and its sort key `rank`.

        Args:
            prediction: `boxes` (M, 4) as left, top, right, bottom in pixels, `class_labels` (M,) and `scores` (M,).
            target: `boxes` (N, 4) and `class_labels` (N,). Optional: `is_crowd` (N,) and `areas` (N,) in square
                pixels. By default, `areas` are the areas of the boxes.

        Raises:
            ValueError: if `boxes`, `class_labels` and `scores` have different lengths, a class number is out of range,
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
        """Return the score threshold with the best F1. It includes NMS if NMS improves F1 by at least 2%.

        With few images or objects, thresholds with and without NMS are compared by their F1 in cross-validation.
        """
        plain = self.all_matched()
        is_small = len(plain) < FEW_IMAGES or sum(image.num_objects for image in plain) < FEW_OBJECTS
        choose = cross_fitted_threshold if is_small and len(plain) >= FOLDS else find_best_threshold
        best = choose(plain)
        for overlap, is_class_agnostic in NMS_TRIED:
            found = choose(self.all_matched(overlap, is_class_agnostic))
            if best is not None and found is not None and found.quality > best.quality * (1 + NMS_GAIN):
                best = found._replace(nms=overlap, is_class_agnostic=is_class_agnostic)
        return best

    def per_class(self) -> dict[str, dict[str, float]]:
        """Return `ap`, `ap_50` and `ar_100` of each class; NaN for a class without objects."""
        scores, recall = super().per_class(), self._class_values("recall")
        return {
            name: {**scores[name], "ar_100": mean_without_nan(recall[:, label])}
            for label, name in enumerate(self.names)
        }

    def precision_recall(self) -> dict[str, np.ndarray]:
        """Return the precision-recall curve of each class at an IoU threshold of 0.5.

        A curve (101,) contains the precision at recalls of 0, 0.01, ..., 1. Its mean is `ap_50` of the class. It is
        NaN for a class without objects.
        """
        curves = self._class_values("precision")[0]  # (recall, class)
        return {name: curves[:, label] for label, name in enumerate(self.names)}


class InstanceMetric(ClassMetric):
    """COCO average precision (AP) and recall (AR) of instance masks, with at most 100 detections per class and image.

    Objects with a mask area below 32² pixels are small, and objects with an area above 96² pixels are large. Records
    store masks with run-length encoding.

    Args:
        names: The K class names.
        thing_ids: Numbers of the evaluated classes. Objects and detections of other classes are ignored.

    Raises:
        ImportError: if faster-coco-eval is not installed.
        ValueError: if `thing_ids` contains a number that is not a class number.
    """

    iou_type, shape, shape_noun = "segm", "segmentation", "masks"
    places: ClassVar[dict[str, int]] = {
        f"mask_{name.removeprefix('m')}": place
        for name, place in DetectionMetric.places.items()
        if name not in ("mar_1", "mar_10")
    }
    score_names = tuple(places)

    def record(self, prediction: Mapping[str, Any], target: Mapping[str, Any]) -> Record:
        """Return the objects and detections of one image with run-length encoded masks, and its sort key `rank`.

        Args:
            prediction: `masks` (M, H, W), `class_labels` (M,) and `scores` (M,). Masks may overlap.
            target: `masks` (N, H, W), `class_labels` (N,) and, optionally, `is_crowd` (N,).

        Raises:
            ValueError: if predicted and target masks differ in height or width, if `masks`, `class_labels` and
                `scores` differ in length, or if a class number is out of range.
        """
        masks, target_masks = as_array(prediction["masks"], np.bool_), as_array(target["masks"], np.bool_)
        check_same_size(masks, target_masks)
        crowd = as_array(target.get("is_crowd", np.zeros(len(target_masks))), np.int64)
        scores = as_array(prediction["scores"], np.float64)
        objects = self._entries("target", target["class_labels"], **_encode(target_masks), iscrowd=crowd.tolist())
        detections = self._entries("prediction", prediction["class_labels"], **_encode(masks), score=scores.tolist())
        return ranked({"objects": objects, "detections": detections})


def _encode(masks: np.ndarray) -> dict[str, Any]:
    """Return the run-length encodings and the areas of masks (M, H, W)."""
    from faster_coco_eval import mask as run_lengths  # Imported here because faster-coco-eval is optional

    codes = run_lengths.encode(np.asfortranarray(masks.transpose(1, 2, 0)).view(np.uint8))
    return {"segmentation": codes, "area": [int(run_lengths.area(code)) for code in codes]}
