"""Image classification: head, targets and loss.

Shapes: B batch, K labels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .initialization_hf_vit import HfViTOwnStart


class HfViTClassifier(HfViTOwnStart, nn.Linear):
    """A linear layer that starts at zero, as in the code of the ViT paper: at first all classes are equally likely."""

    def initialize(self, std: float) -> None:
        """Starts at zero."""
        init.zeros_(self.weight)
        init.zeros_(self.bias)


def soften_labels(labels: Tensor, num_labels: int, label_smoothing: float = 0.0) -> Tensor:
    """Class numbers as the soft labels that mixup mixes and `problem_type="single_label_classification"` takes.

    Args:
        labels: (B,) int64, in [0, num_labels).
        num_labels: Number K of labels.
        label_smoothing: Probability mass spread evenly over all labels, in [0, 1)
            (https://arxiv.org/abs/1512.00567).

    Returns:
        (B, K) float32, each row summing to 1.

    Raises:
        ValueError: if a class number or `label_smoothing` is out of range.
    """
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing={label_smoothing} must lie in [0, 1); 0 switches it off.")
    check_class_numbers(labels, num_labels)
    return F.one_hot(labels.long(), num_labels).float() * (1 - label_smoothing) + label_smoothing / num_labels


def classification_loss(logits: Tensor, labels: Tensor, problem_type: str | None) -> Tensor:
    """Mean loss over a batch.

    Args:
        logits: (B, K).
        labels: (B,) int64 class numbers, -100 being ignored; or (B, K) floats: probabilities for
            "single_label_classification" (soft labels), 0 to 1 for "multi_label_classification", any values for
            "regression"; a regression of one value also takes (B,).
        problem_type: The three names above, as in `transformers`. None stands for regression where K is 1, else for
            single-label classification.

    Returns:
        Scalar: cross-entropy, binary cross-entropy or mean squared error.

    Raises:
        ValueError: if the labels do not fit the problem.
    """
    # A loss in half precision loses the digits that matter, and targets beyond its range become infinite.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    num_labels = logits.shape[1]
    if problem_type not in (None, "regression", "single_label_classification", "multi_label_classification"):
        raise ValueError(
            f"problem_type={problem_type!r} is unknown. Choose 'single_label_classification', "
            "'multi_label_classification' or 'regression'."
        )
    if problem_type is None and num_labels > 1 and labels.is_floating_point():
        raise ValueError(
            f"Labels of dtype {labels.dtype} can be several labels per image, soft labels or values. Set "
            "config.problem_type to 'multi_label_classification', 'single_label_classification' or 'regression'."
        )
    if problem_type == "regression" or (problem_type is None and num_labels == 1):
        labels = labels.reshape(-1, 1) if num_labels == 1 and labels.ndim == 1 else labels
        check_label_shape(labels, logits, "regression")
        return F.mse_loss(logits, labels.to(logits.dtype))
    if problem_type == "multi_label_classification":
        check_label_shape(labels, logits, problem_type)
        check_probabilities(labels)
        return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
    if labels.is_floating_point():
        check_label_shape(labels, logits, "single_label_classification with soft labels")
        check_probabilities(labels)
        return F.cross_entropy(logits, labels.to(logits.dtype))
    if labels.shape != logits.shape[:1]:
        raise ValueError(
            f"Class numbers must be (batch,) = ({len(logits)},), not {tuple(labels.shape)}. Labels per image and "
            "class are floats, with config.problem_type saying what they mean."
        )
    if labels.dtype == torch.bool:
        raise ValueError("Class numbers must be integers, not bool. Convert them with labels.long().")
    check_class_numbers(labels, num_labels)
    return F.cross_entropy(logits, labels.long())


def check_label_shape(labels: Tensor, logits: Tensor, problem: str) -> None:
    """Raises `ValueError` unless `labels` has the shape (B, K) of `logits`."""
    if labels.shape != logits.shape:
        raise ValueError(
            f"Labels for {problem} must be (batch, num_labels) = {tuple(logits.shape)}, not {tuple(labels.shape)}."
        )


def check_probabilities(labels: Tensor) -> None:
    """Raises `ValueError` where a label lies outside [0, 1]; on the CPU only, as reading one would stall a GPU."""
    if labels.device.type != "cpu" or torch.compiler.is_compiling():
        return
    wrong = labels[~((labels >= 0) & (labels <= 1))]  # also true of NaN
    if len(wrong):
        raise ValueError(f"Label {float(wrong[0])} is no probability: soft and multi-label targets lie in [0, 1].")


def check_class_numbers(labels: Tensor, num_labels: int) -> None:
    """Raises `ValueError` where a class number is out of range; on the CPU only, as reading one would stall a GPU."""
    if labels.device.type != "cpu" or torch.compiler.is_compiling():
        return
    wrong = labels[(labels != -100) & ((labels < 0) | (labels >= num_labels))]
    if len(wrong):
        raise ValueError(
            f"Label {int(wrong[0])} is out of range: the model has {num_labels} labels, 0 to {num_labels - 1}. "
            "Load it with num_labels= or id2label= of your data."
        )
