"""Base class and checks of streamed metrics: images come one by one, on any number of processes."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import DTypeLike

from .thresholds import Threshold


# Scores of which less is better, of all metrics: a training that keeps its best step goes by this.
LOWER_IS_BETTER = {"loss", "abs_rel", "rmse", "log10", "rmse_log", "silog", "nme"}


class StreamedMetric(ABC):
    """A metric that keeps a small record of each image.

    `record` compares one image where it was predicted. The records of all processes are brought together by
    `accelerator.gather_for_metrics(records, use_gather_object=True)`, `update` adds them and `compute` scores all
    images. Sums are exact: neither the order of images nor batches nor processes change a score. Where there is
    nothing to score, a score is NaN.
    """

    score_names: tuple[str, ...]  # of what `compute` returns; the first one stands for all
    units: ClassVar[dict[str, str]] = {}  # of the scores that have one

    def __init__(self) -> None:
        self.records: list[Any] = []

    @abstractmethod
    def record(self, prediction: Any, target: Any) -> Any:
        """Returns what the metric needs of one image, as a small object that can be pickled."""

    def update(self, records: Iterable[Any]) -> None:
        """Adds the records of images."""
        self.records += records

    @abstractmethod
    def compute(self) -> dict[str, float]:
        """Returns the scores of all images so far."""

    def reset(self) -> None:
        """Removes all images."""
        self.records = []

    def per_class(self) -> dict[str, dict[str, float]]:
        """Returns the scores of each class or keypoint, by its name; none where there are no classes."""
        return {}

    def best_threshold(self) -> Threshold | None:
        """Returns the score above which predictions are given as answers, as all images so far choose it.

        None where scores decide nothing, or no prediction is right.
        """
        return None


def as_array(values: Any, dtype: DTypeLike) -> np.ndarray:
    """Returns a tensor of any device and precision, or what numpy takes for an array, as an array."""
    if isinstance(values, torch.Tensor):
        # numpy knows no bfloat16.
        values = (values.double() if values.is_floating_point() else values).numpy(force=True)
    return np.asarray(values, dtype=dtype)


def check_same_size(prediction: np.ndarray, target: np.ndarray) -> None:
    """Raises `ValueError` unless two maps or stacks of masks have one height and width."""
    if prediction.shape[-2:] != target.shape[-2:]:
        sizes = " and ".join("x".join(map(str, array.shape[-2:])) for array in (prediction, target))
        raise ValueError(
            f"Prediction and target differ in size (height x width): {sizes}. Bring the prediction to the target's "
            "size, with target_sizes in post-processing."
        )


def check_labels(labels: np.ndarray, names: Sequence[str], what: str) -> None:
    """Raises `ValueError` where class numbers are not those of classes; `what` holds them."""
    strange = np.unique(labels[(labels < 0) | (labels >= len(names))])
    if len(strange):
        raise ValueError(
            f"The {what} holds class numbers that are none of the {len(names)} classes (0 to {len(names) - 1}): "
            f"{', '.join(map(str, strange[:10]))}."
        )


def mean_of_known(values: Iterable[float]) -> float:
    """Returns the mean of the values that are not NaN, NaN where there are none."""
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan
