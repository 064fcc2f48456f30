"""Metrics of monocular depth estimation (Eigen et al., https://arxiv.org/abs/1406.2283), averaged over images."""

import math
from statistics import mean
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from .base import StreamedMetric, as_array, check_same_size


# Evaluated image regions: top, bottom, left and right relative to height and width, as in common evaluation code.
CROPS = {
    "eigen": (45 / 480, 471 / 480, 41 / 640, 601 / 640),  # for NYU Depth V2; the depth at the border is invalid
    "eigen_kitti": (0.3324324, 0.91351351, 0.0359477, 0.96405229),
    "garg": (0.40810811, 0.99189189, 0.03594771, 0.96405229),  # for the KITTI dataset
}
SCORES = ("abs_rel", "rmse", "log10", "rmse_log", "silog", "delta1", "delta2", "delta3")


class DepthMetric(StreamedMetric):
    """Depth scores, computed over the valid pixels of each image and averaged over images.

    This follows the evaluation code of BTS, AdaBins, DINOv2 and Depth Anything. A pixel is valid if it is inside the
    crop and its target is finite, above `min_depth` and below `max_depth`. Predictions are aligned with the target
    (see `alignment`) and then clipped to this range. Images without a valid pixel are ignored.

    Args:
        min_depth: Lower limit of valid depths, in meters.
        max_depth: Upper limit of valid depths, in meters: usually 10 for NYU, 80 for KITTI.
        crop: Region of the image that is evaluated, relative to the image size.
        alignment: Transformation of predictions, fitted to the target of each image before scoring. "median" is for
            depth of unknown scale: it multiplies the prediction so that its median equals that of the target.
            "scale_shift" is for relative inverse depth: it fits scale and shift to 1 / target by least squares, and
            inverts the result (as in MiDaS).

    Raises:
        ValueError: if an option is unknown, or the depth limits are inconsistent.
    """

    score_names = SCORES
    units: ClassVar[dict[str, str]] = {"rmse": "m", "silog": "x 100"}

    def __init__(
        self,
        min_depth: float = 1e-3,
        max_depth: float | None = None,
        crop: Literal["eigen", "eigen_kitti", "garg"] | None = None,
        alignment: Literal["median", "scale_shift"] | None = None,
    ) -> None:
        super().__init__()
        if crop not in (None, *CROPS):
            raise ValueError(f"crop={crop!r} is unknown. Choose None or one of {', '.join(CROPS)}.")
        if alignment not in (None, "median", "scale_shift"):
            raise ValueError(f"alignment={alignment!r} is unknown. Choose None, median or scale_shift.")
        if alignment == "scale_shift" and max_depth is None:
            raise ValueError(
                "alignment='scale_shift' needs max_depth, the depth for inverse depth 0: 10 m indoors, 80 m outdoors."
            )
        self.min_depth, self.max_depth = min_depth, math.inf if max_depth is None else max_depth
        if not 0 < self.min_depth < self.max_depth:
            raise ValueError(f"min_depth={min_depth} must be above 0 and below max_depth={max_depth} (in meters).")
        self.crop, self.alignment = crop, alignment

    def record(self, prediction: ArrayLike | Tensor, target: ArrayLike | Tensor) -> dict[str, float]:
        """Return the scores of one image; empty if no pixel is valid.

        Args:
            prediction: (H, W) depth in meters; with `alignment`, depth of unknown scale or relative inverse depth.
            target: (H, W) depth in meters; 0, NaN, negative and infinite values are invalid.

        Raises:
            ValueError: if prediction and target differ in size, or the prediction is not finite at a valid pixel.
        """
        predicted, depth = as_array(prediction, np.float64), as_array(target, np.float64)
        check_same_size(predicted, depth)
        if self.crop is not None:
            top, bottom, left, right = CROPS[self.crop]
            height, width = depth.shape
            inside = slice(int(top * height), int(bottom * height)), slice(int(left * width), int(right * width))
            predicted, depth = predicted[inside], depth[inside]
        valid = (depth > self.min_depth) & (depth < self.max_depth)  # NaN and infinity are invalid
        if not valid.any():
            return {}
        return _scores(self._to_meters(predicted[valid], depth[valid]), depth[valid])

    def compute(self) -> dict[str, float]:
        """Return the scores named in `SCORES`.

        `abs_rel`, `log10` and `rmse_log` have no unit. `delta1` to `delta3` are shares of pixels in [0, 1]. `rmse` is
        in meters. `silog` is 100 times the standard deviation of the logarithmic error, as in KITTI.
        """
        records = [record for record in self.records if record]
        if not records:
            return dict.fromkeys(SCORES, math.nan)
        # `statistics.mean` is exact: the result does not depend on the order of images
        return {name: mean(record[name] for record in records) for name in SCORES}

    def _to_meters(self, prediction: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Align the prediction (N,) at the valid pixels with the target, and clip it to the valid depths."""
        if not np.isfinite(prediction).all():
            raise ValueError("The predicted depth is not finite (NaN or infinite). Training may have diverged.")
        if self.alignment == "median":
            median = np.median(prediction)
            prediction = prediction * (np.median(target) / median if median > 0 else 1.0)
        elif self.alignment == "scale_shift":
            centered, inverse_target = prediction - prediction.mean(), 1 / target
            variance = centered @ centered
            scale = centered @ inverse_target / variance if variance else 0.0
            inverse = scale * centered + inverse_target.mean()  # least-squares fit to 1 / target
            prediction = 1 / np.maximum(inverse, 1 / self.max_depth)
        return np.clip(prediction, self.min_depth, self.max_depth)


def _scores(prediction: np.ndarray, target: np.ndarray) -> dict[str, float]:
    """Return the scores of predicted and true depths, both (N,) and positive."""
    error, log_error = prediction - target, np.log(prediction) - np.log(target)
    ratio = np.maximum(prediction / target, target / prediction)
    scores = {
        "abs_rel": np.mean(np.abs(error) / target),
        "rmse": np.sqrt(np.mean(error**2)),
        "log10": np.mean(np.abs(log_error)) / np.log(10),
        "rmse_log": np.sqrt(np.mean(log_error**2)),
        "silog": 100 * np.std(log_error),
        **{f"delta{power}": np.mean(ratio < 1.25**power) for power in (1, 2, 3)},
    }
    return {name: float(value) for name, value in scores.items()}


def describe_depth(depth: ArrayLike | Tensor, relative: bool) -> dict[str, Any]:
    """Return the minimum, median and maximum of a depth map, and the unit of these values."""
    values = as_array(depth, np.float64)
    found = {"min": values.min(), "median": np.median(values), "max": values.max()}
    unit = "relative inverse depth" if relative else "meters"
    return {"unit": unit, **{name: round(float(value), 4) for name, value in found.items()}}
