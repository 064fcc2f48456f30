"""Base classes of metrics and evaluators: images come one by one, on any number of processes."""

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


# Of the best F1, or half of what a single object makes of it, within limits: less makes no threshold the better one
TOLERANCE, MAX_TOLERANCE = 0.01, 0.1


class Threshold(NamedTuple):
    """A score above which predictions are given as answers, and what that is worth on images that have chosen it.

    Args:
        value: The score.
        quality: The F1 of the answers.
        nms: The overlap (IoU) with a surer one above which a box is left out before, if any.
        measure: What the quality is, if not the F1.
        is_class_agnostic: Whether that surer box may be of any class.
    """

    value: float
    quality: float
    nms: float | None = None
    measure: str = "F1"
    is_class_agnostic: bool = False


def best_threshold(scores: ArrayLike, is_correct: ArrayLike, num_truths: int) -> Threshold | None:
    """Returns the threshold of the best F1, the harmonic mean of precision and recall.

    The F1 of few images jumps from score to score. So of the thresholds that are about as good as the best one, the
    middle one is taken.

    Args:
        scores: (N,) of all predictions.
        is_correct: (N,) bool, whether a prediction is the right one of a truth. No truth has two of them.
        num_truths: Number of what there is to be found.

    Returns:
        The threshold; None where no prediction is correct.
    """
    values, hits = np.asarray(scores, dtype=np.float64), np.asarray(is_correct, dtype=bool)
    if not hits.any():
        return None
    order = np.argsort(-values, kind="stable")
    values, hits = values[order], hits[order].cumsum()
    last = np.flatnonzero(np.diff(values, append=-np.inf))  # of equal scores all are answers, or none
    f1 = 2 * hits[last] / (last + 1 + num_truths)
    # between the least score that is above and the largest that is not, as far as that is in [0, 1]
    ends = np.append(values[last[1:]], 0.0)
    is_possible = (values[last] > 0) & (ends <= 1)
    highs, lows, f1 = values[last][is_possible].clip(max=1), ends[is_possible].clip(min=0), f1[is_possible]
    if not f1.any():
        return None
    good = np.flatnonzero(f1 >= f1.max() * (1 - min(max(TOLERANCE, 0.5 / num_truths), MAX_TOLERANCE)))
    middle = good[len(good) // 2]
    value = number_between(lows[middle], highs[middle])
    return Threshold(value, f1_at(values, hits, num_truths, value))


def number_between(low: float, high: float) -> float:
    """Returns the middle of two scores in as few digits, three at least, as keep it there in single precision too."""
    for digits in range(3, 18):
        value = float(f"{(low + high) / 2:.{digits}g}")
        if low < np.float32(value) < high and low < value < high:
            return value
    return float(low)  # with which only the upper score passes


def f1_at(scores: np.ndarray, hits: np.ndarray, num_truths: int, threshold: float) -> float:
    """Returns the F1 of predictions above a threshold, given falling scores (N,) and how many are right so far."""
    count = int((scores > threshold).sum())
    return float(2 * hits[count - 1] / (count + num_truths)) if count else 0.0


# Scores of which less is better, of all metrics: a training that keeps its best step goes by this.
LOWER_IS_BETTER = {"loss", "mae", "abs_rel", "rmse", "log10", "rmse_log", "silog", "nme"}


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


Batch = dict[str, Any]
Images = list[Image]
File = str | PathLike[str]


class ImageResult(NamedTuple):
    """The prediction for one image.

    Args:
        prediction: As the metric takes it.
        loss: Sum of the losses of what is in the image, or several sums; 0 where images have none by themselves.
        weight: What the sums of all images are divided by, all together: number of images, of objects, ...; as many.
    """

    prediction: Any
    loss: float | tuple[float, ...] = 0.0
    weight: float | tuple[float, ...] = 1.0


@dataclass(eq=False)
class BaseEvaluator(ABC):
    """Predicts, scores and draws images of one task.

    Args:
        processor: Its `post_process_*` makes predictions in the pixels of the image, as a user gets them.
        metric: Scores a prediction beside its target.
    """

    parts = "classes"  # of which `per_class` gives scores
    class_score = ""  # which of these scores to draw
    tries = False  # whether it takes an evaluation of its own to choose the threshold
    is_divisible = False  # whether several GPUs of a process may share a batch
    caption = "Image, truth and prediction"  # of what `draw` draws; empty if it draws nothing

    processor: BaseImageProcessor
    metric: StreamedMetric
    is_choosing: bool = field(init=False, default=False)  # the threshold, in that evaluation
    threshold: float | None = field(init=False, default=None)  # score above which predictions are drawn, once chosen

    def prepare(self, trainer: Any) -> None:  # noqa: B027  # most evaluators need nothing
        """Reads what all images of an evaluation by the trainer are compared with."""

    def adapt_collator(self, collator: Any) -> Any:
        """Returns the collator of an evaluation, a dataclass, as `predict` needs it."""
        return collator

    @abstractmethod
    def predict(self, model: PreTrainedModel, batch: Batch) -> list[ImageResult]:
        """Predicts the images of a batch.

        Args:
            model: In evaluation mode.
            batch: What the collator has made, with targets, on the device of the model.

        Returns:
            For each image the prediction and the loss of that image alone.
        """

    def compute(self, model: PreTrainedModel) -> dict[str, float]:
        """Returns the scores of all images, with `loss` if it is not the mean of the losses of the images."""
        return self.metric.compute()

    def describe(self, prediction: Any, target: Any) -> dict[str, Any]:
        """Returns a prediction as `hf-vit predict` prints it; empty if the task has none for single images."""
        return {}

    def draw(self, images: Images, predictions: list[Any], targets: list[Any], file: File) -> None:  # noqa: B027
        """Draw images next to their targets and predictions; an evaluator without a caption draws nothing."""

    def draw_scores(self, folder: Path, split: str) -> dict[str, str]:
        """Draws further scores into files of a folder that start with the name of the split.

        Returns:
            The file names by their captions.
        """
        return {}

    @abstractmethod
    def describe_evaluation(self) -> str:
        """Returns how images are evaluated, as a sentence of the card."""


class Evaluator(BaseEvaluator):
    """Evaluator of a task with annotated truth."""

    @abstractmethod
    def has_truth(self, target: Any) -> bool:
        """Returns whether a target has any truth to train on and to be evaluated on."""

    lack: ClassVar[str]  # of targets without any truth, and what to do about it

    def describe_lack(self, targets: Iterable[Any]) -> str:
        """Returns what targets without any truth lack, and what to do about it."""
        return self.lack

    @abstractmethod
    def naive_baseline(self, targets: Iterable[Any]) -> tuple[str, Callable[[Any], Any]]:
        """Returns the best predictor that ignores images.

        Args:
            targets: Those of all training images.

        Returns:
            Its name, and a function from the target to the prediction, which reads no more of the target than a user
            gives beside the image: its size or box.
        """


def check_truth(evaluator: Evaluator, split: str, examples: TargetDataset) -> None:
    """Raises `ValueError` if a whole split has no truth."""
    if not any(evaluator.has_truth(target) for target in examples.read_targets()):
        raise ValueError(f"No {split} image has any truth: {evaluator.describe_lack(examples.read_targets())}")
