"""What an evaluation needs to know of a task whose images are scored one by one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from PIL.Image import Image
from transformers import BaseImageProcessor, PreTrainedModel

from ..data import TargetDataset
from .base import StreamedMetric


Batch = dict[str, Any]


class ImageResult(NamedTuple):
    """What came out for one image.

    Args:
        prediction: As the metric takes it.
        loss: Sum of the losses of what is in the image; 0 where images have none by themselves.
        weight: What the sums of all images are divided by, all together: number of images, of objects, ...
    """

    prediction: Any
    loss: float = 0.0
    weight: float = 1.0


class BaseEvaluator(ABC):
    """Predicts, scores and draws images of one task.

    Args:
        processor: Its `post_process_*` makes predictions in the pixels of the image, as a user gets them.
        metric: Scores a prediction beside its target.
    """

    parts = "classes"  # of which `per_class` gives scores
    class_score = ""  # which of these scores to draw
    caption = "Image, truth and prediction"  # of what `draw` draws

    def __init__(self, processor: BaseImageProcessor, metric: StreamedMetric) -> None:
        self.processor = processor
        self.metric = metric

    @abstractmethod
    def predict(self, model: PreTrainedModel, batch: Batch) -> list[ImageResult]:
        """Predicts the images of a batch.

        Args:
            model: In evaluation mode.
            batch: What the collator has made, with targets, on the device of the model.

        Returns:
            For each image the prediction and the loss of that image alone.
        """

    def per_class(self) -> dict[str, dict[str, float]]:
        """Returns the scores of each class; none where there are no classes."""
        return {}

    @abstractmethod
    def draw(self, images: list[Image], predictions: list[Any], targets: list[Any], file: str | PathLike[str]) -> None:
        """Draws images beside their targets and predictions."""

    def draw_scores(self, folder: Path, split: str) -> dict[str, str]:
        """Draws what else the scores tell into files of a folder that begin with the name of the split.

        Returns:
            The file names by their captions.
        """
        return {}

    @abstractmethod
    def describe_evaluation(self) -> str:
        """Says how images are scored."""

    @abstractmethod
    def describe_limits(self) -> str:
        """Says what a model with these scores is not good for."""


class Evaluator(BaseEvaluator):
    """The same, of a task whose truth somebody has written down."""

    @abstractmethod
    def has_truth(self, target: Any) -> bool:
        """Whether there is anything in a target to learn from and to be scored on."""

    @abstractmethod
    def describe_lack(self, targets: Iterable[Any]) -> str:
        """Says of targets without any truth what they lack, and what to do about it."""

    @abstractmethod
    def naive_baseline(self, targets: Iterable[Any]) -> tuple[str, Callable[[Any], Any]]:
        """Makes the best predictor that does not look at images.

        Args:
            targets: Those of all training images.

        Returns:
            What to call it, and a function to the prediction from the target, of which it takes no more than a user
            gives beside the image: its size or box.
        """


def check_truth(evaluator: Evaluator, split: str, examples: TargetDataset) -> None:
    """Raises `ValueError` if there is nothing to learn from or to be scored on in a whole split."""
    if not any(evaluator.has_truth(target) for target in examples.read_targets()):
        raise ValueError(f"No {split} image has any truth: {evaluator.describe_lack(examples.read_targets())}")
