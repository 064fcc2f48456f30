"""Metrics of keypoint detection: AP by object keypoint similarity (OKS), PCK and normalized mean error (NME).

Shape: K keypoints.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, ClassVar

import numpy as np

from ..data.reading.keypoints import oks_sigmas_of
from .base import TOLERANCE, Threshold, as_array, best_threshold, mean_without_nan
from .detection import CocoMetric, Record, corner_and_size, finite_array, ranked


OTHER_SIGMA = 0.05  # OKS sigma of keypoints that are not in COCO.
CATEGORY = 0  # COCO category number of all objects: keypoint detection has a single class.
ERRORS = ("pck", "nme")
# Maximum error of a correct keypoint, relative to the reference length of PCK. Used for choosing the score threshold.
CLOSE = 0.1


class KeypointMetric(CocoMetric):
    """Metrics of poses: COCO average precision with at most 20 poses per image, PCK and NME.

    Average precision matches poses with objects by their object keypoint similarity (OKS). The score of a pose is the
    mean of its keypoint scores. PCK is the share of labeled keypoints that are predicted within `pck_threshold` times
    a reference length of the object. NME is the mean distance divided by a reference length. PCK and NME ignore
    objects with an unknown or zero reference length, such as objects with a single labeled keypoint.

    Args:
        names: The K keypoint names.
        oks_sigmas: Localization tolerance of each keypoint, relative to the square root of the object area. The
            default is the values of COCO if `names` are the 17 keypoints of COCO, else 0.05 for every keypoint.
        pck_threshold: Maximum error of a correct keypoint, relative to the reference length.
        normalize: Names of two keypoints. Their distance is the reference length of PCK and NME. Examples: the outer
            corners of the eyes, or a shoulder and the opposite hip. By default, the reference length of PCK is the
            longer side of the box around the labeled keypoints, and the reference length of NME is the square root of
            the area of the object box.

    Raises:
        ImportError: if faster-coco-eval is not installed.
        ValueError: if the options do not match the names.
    """

    iou_type = "keypoints"
    places: ClassVar[dict[str, int]] = {"oks_ap": 0, "oks_ap_50": 1, "oks_ap_75": 2}
    score_names = (*places, *ERRORS)

    def __init__(
        self,
        names: Sequence[str],
        oks_sigmas: Sequence[float] | None = None,
        pck_threshold: float = 0.2,
        normalize: tuple[str, str] | None = None,
    ) -> None:
        if oks_sigmas is None:
            oks_sigmas = default_oks_sigmas(names)
        if len(oks_sigmas) != len(names) or min(oks_sigmas, default=0) <= 0:
            raise ValueError(f"oks_sigmas={list(oks_sigmas)} must be {len(names)} positive numbers, one per keypoint.")
        if pck_threshold <= 0:
            raise ValueError(f"pck_threshold={pck_threshold} must be positive. A usual value is 0.2.")
        if normalize is not None and (unknown := [name for name in normalize if name not in names]):
            raise ValueError(f"normalize has the unknown keypoint {unknown[0]!r}. Choose two of {', '.join(names)}.")
        super().__init__({CATEGORY: "object"}, kpt_oks_sigmas=list(oks_sigmas))
        self.names = list(names)
        self.pck_threshold = pck_threshold
        # Indices of the two keypoints that define the reference length
        self.ends = None if normalize is None else [self.names.index(name) for name in normalize]

    def record(self, prediction: Mapping[str, Any], target: Mapping[str, Any]) -> Record:
        """Return the record of one object: target and predicted pose in COCO format, keypoint errors, and a sort key.

        Args:
            prediction: `keypoints` (K, 2) in pixels, their `scores` (K,) and, optionally, `expected_errors` (K,).
            target: `keypoints` (K, 3) as x and y in pixels and visibility (0 if not labeled), `box` (4,) as left, top,
                right, bottom, `area` () in square pixels, and `image_id`, the number of the image.

        Raises:
            ValueError: if shapes do not match the names, or a prediction is not finite.
        """
        points = finite_array(prediction["keypoints"], "keypoints")
        scores = finite_array(prediction["scores"], "scores")
        truth = as_array(target["keypoints"], np.float64)
        box = corner_and_size(as_array(target["box"], np.float64))
        num = len(self.names)
        for name, array, expected in (
            ("predicted keypoints", points, (num, 2)),
            ("scores", scores, (num,)),
            ("true keypoints", truth, (num, 3)),
        ):
            if array.shape != expected:
                raise ValueError(
                    f"The {name} have the shape {array.shape}. For {num} keypoint names, the shape must be {expected}."
                )
        true_object = {
            "category_id": CATEGORY,
            "keypoints": truth.reshape(-1).tolist(),
            "num_keypoints": int((truth[:, 2] > 0).sum()),
            "bbox": box.tolist(),
            "area": as_array(target["area"], np.float64).item(),
            "iscrowd": 0,
        }
        pose = {
            "category_id": CATEGORY,
            "keypoints": np.insert(points, 2, 1, axis=1).reshape(-1).tolist(),
            "score": scores.mean().item(),
        }
        distances, length = self._distances(points, truth)
        foreseen = as_array(prediction.get("expected_errors", np.full(num, np.nan)), np.float64)
        record = ranked(
            {
                "image_id": as_array(target["image_id"], np.int64).item(),
                "objects": [true_object],
                "detections": [pose],
                **self._errors(distances, length, box),
                "expected_nme": self._errors(foreseen, length, box)["nme"],
            }
        )
        # Predictions of unlabeled keypoints count as errors. Labeled ones without a reference length are excluded.
        answers = [
            (score, bool(distance <= CLOSE * length))
            for score, distance in zip(scores.tolist(), distances, strict=True)
            if length > 0 or math.isnan(distance)
        ]
        return {**record, "answers": answers, "num_truths": true_object["num_keypoints"] if length > 0 else 0}

    def compute(self) -> dict[str, float]:
        """Return `oks_ap`, `oks_ap_50`, `oks_ap_75` and `pck` in [0, 1], and `nme`. Scores without data are NaN."""
        means = {name: mean_without_nan(value for record in self.records for value in record[name]) for name in ERRORS}
        return {**super().compute(), **means}

    def best_threshold(self) -> Threshold | None:
        """Return the score threshold of keypoints with the best F1.

        A keypoint is correct if its error is at most `CLOSE` times the reference length. Returns None if the F1 of
        accepting all keypoints is nearly as good.
        """
        answers = [answer for record in self.records for answer in record["answers"]]
        count = sum(record["num_truths"] for record in self.records)
        scores, is_right = zip(*answers, strict=True) if answers else ((), ())
        best = best_threshold(scores, is_right, count)
        if best is None or 2 * sum(is_right) / (len(answers) + count) >= best.quality * (1 - TOLERANCE):
            return None
        return best

    def per_class(self) -> dict[str, dict[str, float]]:
        """Return `pck` and `nme` of each keypoint; NaN for a keypoint that is ignored in all objects."""
        return {
            keypoint: {name: mean_without_nan(record[name][number] for record in self.records) for name in ERRORS}
            for number, keypoint in enumerate(self.names)
        }

    def _images(self) -> list[list[Record]]:
        """Return the records of each image, in an order that does not depend on the number of processes."""
        records = sorted(self.records, key=itemgetter("image_id", "rank"))
        return [list(group) for _, group in groupby(records, key=itemgetter("image_id"))]

    def _errors(self, distances: np.ndarray, length: float, box: np.ndarray) -> dict[str, list[float]]:
        """Return the contribution of each keypoint to PCK and NME; NaN for ignored keypoints.

        `distances` (K,) and `length` are returned by `_distances`. `box` (4,) is left, top, width, height.
        """
        nme_length = np.sqrt(box[2] * box[3]) if self.ends is None else length
        correct = np.where(np.isnan(distances), np.nan, distances <= self.pck_threshold * length)
        unknown = [math.nan] * len(distances)
        return {
            "pck": correct.tolist() if length > 0 else unknown,
            "nme": (distances / nme_length).tolist() if nme_length > 0 else unknown,
        }

    def _distances(self, points: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, float]:
        """Return the distances (K,) of predicted points from the target keypoints, and the reference length of PCK.

        `truth` (K, 3) are x, y and visibility of the target keypoints. Distances of unlabeled keypoints are NaN.
        """
        places, labeled = truth[:, :2], truth[:, 2] > 0
        distances = np.where(labeled, np.linalg.norm(points - places, axis=-1), np.nan)
        if self.ends is not None:
            is_known = labeled[self.ends].all()
            return distances, np.linalg.norm(np.subtract(*places[self.ends])).item() if is_known else 0.0
        return distances, np.ptp(places[labeled], axis=0).max().item() if labeled.any() else 0.0


def default_oks_sigmas(names: Sequence[str]) -> list[float]:
    """Return the OKS sigma of each keypoint.

    If the names are the 17 keypoints of COCO, in any order, these are the values of COCO. Otherwise, each is 0.05.
    """
    return list(oks_sigmas_of(names) or [OTHER_SIGMA] * len(names))
