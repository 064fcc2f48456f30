"""Base classes of metrics and evaluators. They score each image separately and support several processes."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, DTypeLike
from PIL.Image import Image
from transformers import BaseImageProcessor, PreTrainedModel

from ..data.datasets import TargetDataset
from ..data.reading.files import joined
from ..model.calibration import HfViTCalibrationConfig


CHOOSING = "choosing"  # prefix of the names of scores that are only used to choose a setting of a trained model
# Thresholds are considered equally good if their F1 is within a relative tolerance of the best F1. The tolerance is
# 0.5 / number of objects, limited to the range from TOLERANCE to MAX_TOLERANCE.
TOLERANCE, MAX_TOLERANCE = 0.01, 0.1
# An evaluation names classes with a score below `ZERO`, and objects if a smaller share than `LEAST_FOUND` is found.
# `USUAL_THRESHOLD` is the score threshold of objects if none has been chosen.
ZERO, LEAST_FOUND, USUAL_THRESHOLD = 0.0005, 0.5, 0.5


class Threshold(NamedTuple):
    """Score threshold for predictions, and its quality on the images that were used to select it."""

    value: float  # predictions with a higher score are returned
    quality: float  # F1 of the returned predictions, or another quality measure named by `measure`
    nms: float | None = None  # IoU threshold of non-maximum suppression (NMS) of boxes; None disables NMS
    measure: str = "F1"
    is_class_agnostic: bool = False  # whether NMS also compares boxes of different classes


def best_threshold(scores: ArrayLike, is_correct: ArrayLike, num_truths: int) -> Threshold | None:
    """Return the threshold with the best F1, the harmonic mean of precision and recall.

    With few images, small changes of the threshold can change F1 abruptly. The function therefore collects all
    thresholds whose F1 is close to the best, and returns the middle one.

    Args:
        scores: (N,) scores of all predictions.
        is_correct: (N,) bool, whether a prediction matches an annotated object. Each object has at most one match.
        num_truths: Number of annotated objects.

    Returns:
        The threshold, or None if no prediction is correct.
    """
    values, hits = np.asarray(scores, dtype=np.float64), np.asarray(is_correct, dtype=bool)
    if not hits.any():
        return None
    order = np.argsort(-values, kind="stable")
    values, hits = values[order], hits[order].cumsum()
    last = np.flatnonzero(np.diff(values, append=-np.inf))  # equal scores are accepted together
    f1 = 2 * hits[last] / (last + 1 + num_truths)
    # Each threshold is chosen between the lowest accepted and the highest rejected score, clipped to [0, 1].
    ends = np.append(values[last[1:]], 0.0)
    is_possible = (values[last] > 0) & (ends <= 1)
    highs, lows, f1 = values[last][is_possible].clip(max=1), ends[is_possible].clip(min=0), f1[is_possible]
    if not f1.any():
        return None
    good = np.flatnonzero(f1 >= f1.max() * (1 - min(max(TOLERANCE, 0.5 / num_truths), MAX_TOLERANCE)))
    middle = good[len(good) // 2]
    value = number_between(lows[middle], highs[middle])
    num_accepted = int((values > value).sum())
    return Threshold(value, float(2 * hits[num_accepted - 1] / (num_accepted + num_truths)))


def number_between(low: float, high: float) -> float:
    """Return the midpoint of two scores, rounded to the fewest digits (at least 3) that separate the scores.

    The rounded value lies strictly between the two scores, even after conversion to float32.
    """
    for digits in range(3, 18):
        value = float(f"{(low + high) / 2:.{digits}g}")
        if low < np.float32(value) < high and low < value < high:
            return value
    return float(low)  # There is no float32 number between the scores.


# Names of all scores for which lower values are better. Used to select the best checkpoint of a training run.
LOWER_IS_BETTER = {"loss", "mae", "abs_rel", "rmse", "log10", "rmse_log", "silog", "nme"}


class StreamedMetric(ABC):
    """Base class of metrics that store a small record per image.

    Each process calls `record` for the images that it predicts. The records of all processes are gathered with
    `accelerator.gather_for_metrics(records, use_gather_object=True)`, `update` adds them, and `compute` returns the
    scores of all images. Sums are exact, so scores do not depend on the order of images, the batch size or the number
    of processes. A score is NaN if there is no data for it.
    """

    score_names: tuple[str, ...]  # Names of the scores of `compute`; the first is the main score.
    units: ClassVar[dict[str, str]] = {}  # Maps the name of a score to its unit.

    def __init__(self) -> None:
        self.records: list[Any] = []

    @abstractmethod
    def record(self, prediction: Any, target: Any) -> Any:
        """Return a small picklable object with all data of one image that the metric needs."""

    def update(self, records: Iterable[Any]) -> None:
        """Add the records of images."""
        self.records += records

    @abstractmethod
    def compute(self) -> dict[str, float]:
        """Return the scores of all images added so far."""

    def reset(self) -> None:
        """Remove the records of all images."""
        self.records = []

    def per_class(self) -> dict[str, dict[str, float]]:
        """Return a dict of scores for each class or keypoint; empty for metrics without classes."""
        return {}

    def score_classes(self, name: str) -> dict[str, float]:
        """Return the score `name` of each class or keypoint, NaN without data; empty for metrics without classes."""
        return {part: scores[name] for part, scores in self.per_class().items() if name in scores}

    def count_objects(self, threshold: float) -> tuple[int, int, int]:
        """Return the numbers of objects, of predictions with a score above the threshold, and of matches.

        They are 0 for metrics that do not match predictions with objects.
        """
        return 0, 0, 0

    def best_threshold(self) -> Threshold | None:
        """Return the score threshold with the best quality on all images added so far.

        Returns None if predictions of this task have no scores, or if no prediction is correct.
        """
        return None


def as_array(values: Any, dtype: DTypeLike) -> np.ndarray:
    """Convert a tensor of any device and dtype, or an array-like, to a numpy array."""
    if isinstance(values, torch.Tensor):
        # Conversion to float64 is required because numpy does not support bfloat16.
        values = (values.double() if values.is_floating_point() else values).numpy(force=True)
    return np.asarray(values, dtype=dtype)


def check_same_size(prediction: np.ndarray, target: np.ndarray) -> None:
    """Raise `ValueError` unless two maps or stacks of masks have the same height and width."""
    if prediction.shape[-2:] != target.shape[-2:]:
        sizes = " and ".join("x".join(map(str, array.shape[-2:])) for array in (prediction, target))
        raise ValueError(
            f"Prediction and target differ in size (height x width): {sizes}. Resize the prediction to the target "
            "size, for example with target_sizes in post-processing."
        )


def check_labels(labels: np.ndarray, names: Sequence[str], what: str) -> None:
    """Raise `ValueError` if a class number is out of range. `what` names the checked labels in the error message."""
    strange = np.unique(labels[(labels < 0) | (labels >= len(names))])
    if len(strange):
        raise ValueError(
            f"The {what} has class numbers outside of the {len(names)} classes (0 to {len(names) - 1}): "
            f"{', '.join(map(str, strange[:10]))}."
        )


def mean_without_nan(values: Iterable[float]) -> float:
    """Return the mean of the values that are not NaN, or NaN if there are none."""
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan


Batch = dict[str, Any]
Images = list[Image]
File = str | PathLike[str]


class ImageResult(NamedTuple):
    """Prediction and loss of one image.

    The mean loss is the sum of `loss` divided by the sum of `weight`, such as 1 or the number of objects, over all
    images. Both can be tuples with a value for each loss term.
    """

    prediction: Any  # in the format that the metric expects
    loss: float | tuple[float, ...] = 0.0  # 0 if the task has no loss per image
    weight: float | tuple[float, ...] = 1.0


@dataclass(eq=False)
class BaseEvaluator(ABC):
    """Base class that predicts, scores and draws the images of one task.

    Args:
        processor: Image processor. Its `post_process_*` method converts model outputs to predictions for the original
            image size.
        metric: Metric that compares predictions with targets.
    """

    parts = "classes"  # Plural noun for the entries of `per_class`.
    class_score = ""  # Name of the score per class that is drawn as a bar chart.
    tries = False  # Whether a separate evaluation chooses the score threshold.
    can_split_batch = False  # Whether a batch can be split between several GPUs of one process.
    has_offset = False  # Whether calibration fits an offset in addition to the temperature.
    predicts_errors = False  # Whether calibration fits the scale of expected errors instead of logits.
    has_sets = False  # Whether calibration fits sets of classes, and the error rate of answered images is drawn.
    caption = "Image, truth and prediction"  # Caption of the figure that `draw` creates; empty if it draws nothing.

    processor: BaseImageProcessor
    metric: StreamedMetric
    is_choosing: bool = field(init=False, default=False)  # Whether the current evaluation chooses the score threshold.
    threshold: float | None = field(init=False, default=None)  # Score threshold for drawing; None until it is chosen.
    calibration: HfViTCalibrationConfig = field(init=False, default_factory=HfViTCalibrationConfig)  # of the model
    calibration_scores: dict[str, tuple[float, float]] = field(init=False, default_factory=dict)  # before and after
    calibration_note: str = field(init=False, default="")  # text of the model card about the fit, or why there is none

    def prepare(self, trainer: Any) -> None:  # noqa: B027  # Optional hook
        """Compute reference data, such as features of training images, before `trainer` starts an evaluation."""

    def adapt_collator(self, collator: Any) -> Any:
        """Return a copy of the evaluation collator (a dataclass) with the options that `predict` requires."""
        return collator

    @abstractmethod
    def predict(self, model: PreTrainedModel, batch: Batch) -> list[ImageResult]:
        """Predict the images of a batch.

        Args:
            model: Model in evaluation mode.
            batch: Output of the collator, including targets, on the device of the model.

        Returns:
            The prediction and the loss of each image.
        """

    def compute(self, model: PreTrainedModel) -> dict[str, float]:
        """Return the scores of all images. Include `loss` only if it differs from the mean loss per image."""
        return self.metric.compute()

    completes_calibration: ClassVar[bool] = False  # whether `complete_calibration` needs predictions

    def complete_calibration(self, calibration: HfViTCalibrationConfig) -> HfViTCalibrationConfig:
        """Return a fitted calibration with values that depend on calibrated scores and on the chosen threshold."""
        return calibration

    def calibration_data(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return logits and labels of the last evaluation for `fit_scaling`, or None if the task is not calibrated.

        With `predicts_errors`, return expected and true errors. If the model is calibrated, so are logits and errors.
        """
        return None

    def find_failures(self) -> list[str]:
        """Return sentences about classes whose score is 0 in the last evaluation, and about objects not found."""
        scores = self.metric.score_classes(self.class_score.lower())
        failed = [name for name, score in scores.items() if abs(score) < ZERO]
        classes = f"{self.class_score} is 0 for {len(failed)} of {len(scores)} {self.parts}: {joined(failed)}."
        threshold = USUAL_THRESHOLD if self.threshold is None else self.threshold
        objects, given, matches = self.metric.count_objects(threshold)
        missed = f"Only {matches:,} of {objects:,} objects are found"
        missed += f" (score threshold {threshold:g}, predictions above it: {given:,})."
        return [classes] * bool(failed) + [missed] * (matches < LEAST_FOUND * objects)

    def describe(self, prediction: Any, target: Any) -> dict[str, Any]:
        """Return a prediction in the output format of `hf-vit predict`; empty if the task has no such format."""
        return {}

    def draw(self, images: Images, predictions: list[Any], targets: list[Any], file: File) -> None:  # noqa: B027
        """Draw images next to their targets and predictions. Draws nothing if `caption` is empty."""

    def draw_scores(self, folder: Path, split: str) -> dict[str, str]:
        """Write figures of the scores to a folder. The file names start with the name of the split.

        Returns:
            A dict from caption to file name.
        """
        return {}

    @abstractmethod
    def describe_evaluation(self) -> str:
        """Return a phrase for the model card that describes the evaluated region, such as "the whole image"."""


class Evaluator(BaseEvaluator):
    """Evaluator of a task with annotated targets."""

    @abstractmethod
    def has_annotations(self, target: Any) -> bool:
        """Return whether a target contains annotations for training and evaluation."""

    lack: ClassVar[str]  # Error message if no target has annotations.

    def missing_annotations_message(self, targets: Iterable[Any]) -> str:
        """Return the error message for a split without annotations. It suggests how to solve the problem."""
        return self.lack

    @abstractmethod
    def naive_baseline(self, targets: Iterable[Any]) -> tuple[str, Callable[[Any], Any]]:
        """Return a baseline: the best constant prediction, which ignores the image.

        Args:
            targets: Targets of all training images.

        Returns:
            The name of the baseline, and a function that returns its prediction for a target. The function uses only
            the image size or the box of the target, which a user also provides for prediction.
        """


def check_has_annotations(evaluator: Evaluator, split: str, examples: TargetDataset) -> None:
    """Raise `ValueError` if no image of a split has annotations."""
    if not any(evaluator.has_annotations(target) for target in examples.read_targets()):
        raise ValueError(
            f"No {split} image has annotations: {evaluator.missing_annotations_message(examples.read_targets())}"
        )
