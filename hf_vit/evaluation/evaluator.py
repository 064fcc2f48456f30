"""Evaluators: what predicts, scores and draws the images of one task."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from PIL.Image import Image
from transformers import BaseImageProcessor, PreTrainedModel

from ..data.datasets import TargetDataset
from .base import StreamedMetric


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
