"""What an evaluation of dense predictions needs to know of its task."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from typing import Any

from PIL.Image import Image
from torch import Tensor
from transformers import BaseImageProcessor, PreTrainedModel

from ..data import TargetDataset
from ..metrics import StreamedMetric


Batch = dict[str, Any]
Size = tuple[int, int]


class DenseScorer(ABC):
    """Predicts, scores and draws images of one task.

    Args:
        processor: Its `post_process_*` makes predictions of the size of the image, as a user gets them.
        metric: Scores a prediction beside its target.
    """

    class_score = ""  # which of `per_class` to draw

    def __init__(self, processor: BaseImageProcessor, metric: StreamedMetric) -> None:
        """Begins."""
        self.processor = processor
        self.metric = metric

    @abstractmethod
    def predict(self, model: PreTrainedModel, batch: Batch, sizes: Sequence[Size]) -> list[tuple[Any, float]]:
        """Predicts the images of a batch.

        Args:
            model: In evaluation mode.
            batch: What the collator has made, on the device of the model.
            sizes: Height and width in pixels of each prediction.

        Returns:
            For each image the prediction as `metric` takes it, and the loss of that image alone.
        """

    def per_class(self) -> dict[str, dict[str, float]]:
        """Returns the scores of each class; none where there are no classes."""
        return {}

    @abstractmethod
    def has_truth(self, target: Any) -> bool:
        """Whether there is anything in a target to learn from and to be scored on."""

    @abstractmethod
    def describe_lack(self, targets: Iterable[Any]) -> str:
        """Says of targets without any truth what they lack, and what to do about it."""

    @abstractmethod
    def trivial(self, targets: Iterable[Any]) -> tuple[str, Callable[[Size], Any]]:
        """Makes the best predictor that does not look at images.

        Args:
            targets: Those of all training images.

        Returns:
            What to call it, and a function from the size of an image to the prediction.
        """

    @abstractmethod
    def draw(self, images: list[Image], predictions: list[Any], targets: list[Any], file: str | PathLike[str]) -> None:
        """Draws images beside their targets and predictions."""

    @abstractmethod
    def describe_evaluation(self) -> str:
        """Says how images are scored."""

    @abstractmethod
    def describe_limits(self) -> str:
        """Says what a model with these scores is not good for."""


def check_truth(scorer: DenseScorer, split: str, examples: TargetDataset) -> None:
    """Raises `ValueError` if there is nothing to learn from or to be scored on in a whole split."""
    if not any(scorer.has_truth(target) for target in examples.read_targets()):
        raise ValueError(f"No {split} image has any truth: {scorer.describe_lack(examples.read_targets())}")


def own_part(batch: Batch, index: int) -> tuple[Tensor, Tensor]:
    """Returns the pixels (1, C, h, w) and labels (1, h, w) of an image in a batch, without padding."""
    pixels, labels = batch["pixel_values"][index : index + 1], batch["labels"][index : index + 1]
    if (mask := batch.get("patch_attention_mask")) is None:
        return pixels, labels
    height, width = (
        int(mask[index].any(dim=1 - side).sum()) * (pixels.shape[side - 2] // mask.shape[side - 2]) for side in (0, 1)
    )
    return pixels[..., :height, :width], labels[..., :height, :width]


def size_of(target: Any) -> Size:
    """Returns the height and width of a target: a map (H, W), or a dictionary with `masks` (M, H, W)."""
    height, width = (target["masks"] if isinstance(target, dict) else target).shape[-2:]
    return height, width
