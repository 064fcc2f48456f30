"""Regularization of classifiers: mixed images, soft labels, losses and patch dropout.

In shapes, B is the batch size, C the number of channels, (H, W) the image size, N the number of patches, and K the
number of classes or of kept patches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.utils import ModelOutput

from ...data.collators import size_for_height
from ...data.reading.label_values import MULTI, REGRESSION, SINGLE
from ...model.configuration_hf_vit import HfViTConfig, to_pair
from ...model.shared import to_float32_or_higher
from ...model.task_image_classification import HfViTForImageClassification, soften_labels
from .arguments import ClassificationArguments


Size = tuple[int, int]


class BatchTransform(Protocol):
    """Transform of a training batch.

    Stored features of frozen blocks require transforms whose attribute `supports_stored_features` is true, which means
    that they do not change the images.
    """

    def __call__(self, batch: dict[str, Any], progress: float) -> dict[str, Any]:
        """Return the transformed batch. `progress` is the share of finished training steps, in [0, 1).

        Random numbers are drawn from torch's default generator.
        """


@runtime_checkable
class Attached(Protocol):
    """`BatchTransform` or callback that uses the trainer, such as its averaged weights."""

    def attach(self, trainer: Any) -> None:
        """Store the trainer, which calls this method at the end of its constructor."""


class Mixing:
    """A `BatchTransform` that mixes images of a batch and converts class indices to class probabilities.

    MixUp (https://arxiv.org/abs/1710.09412) blends each image with its neighbor in the batch, CutMix
    (https://arxiv.org/abs/1905.04899) replaces a rectangle by the same rectangle of the neighbor. The neighbor's share
    of the mixed image is drawn once per batch. If both are enabled, each is used with equal probability, as in DeiT.
    An image and its neighbor are always in the same process.

    Args:
        num_labels: Number of classes K.
        mixup_alpha: Both parameters of the beta distribution of the share in MixUp; 0 disables MixUp.
        cutmix_alpha: Both parameters of the beta distribution of the share in CutMix; 0 disables CutMix.
        probability: Probability that a batch is mixed, in [0, 1].
        off_share: Share of the training steps, at the end of training, that do not mix images, in [0, 1].
        label_smoothing: Probability mass that is spread evenly over all classes, in [0, 1). It applies to every batch.
    """

    def __init__(
        self,
        num_labels: int,
        mixup_alpha: float = 0.0,
        cutmix_alpha: float = 0.0,
        probability: float = 1.0,
        off_share: float = 0.0,
        label_smoothing: float = 0.0,
    ) -> None:
        from torchvision.transforms import v2  # imported here, because the package also works without torchvision

        kinds = ((v2.MixUp, mixup_alpha), (v2.CutMix, cutmix_alpha))
        mixers = [kind(alpha=alpha, num_classes=num_labels) for kind, alpha in kinds if alpha]
        self.mix = v2.RandomChoice(mixers) if mixers else None
        self.num_labels = num_labels
        self.probability = probability
        self.off_share = off_share
        self.label_smoothing = label_smoothing

    @property
    def supports_stored_features(self) -> bool:
        """Whether only labels change, so that features of the images can be stored."""
        return self.mix is None

    def __call__(self, batch: dict[str, Any], progress: float) -> dict[str, Any]:
        """Return the batch with mixed `pixel_values` (B, C, H, W) and class probabilities as `labels`.

        `labels` are converted from class indices (B,) int64 to probabilities (B, K) float32. Multi-label targets (B,
        K) float32 are smoothed for each label separately.

        Raises:
            ValueError: If a class index is out of range.
        """
        images, labels = batch["pixel_values"], batch["labels"]
        if labels.is_floating_point():
            labels = labels * (1 - self.label_smoothing) + self.label_smoothing / 2
        else:
            labels = soften_labels(labels, self.num_labels, self.label_smoothing)  # (B, K)
        if self.mix is not None and progress < 1 - self.off_share and float(torch.rand(())) < self.probability:
            images, labels = self.mix(images, labels)
        return {**batch, "pixel_values": images, "labels": labels}


class BinaryCrossEntropy:
    """Binary cross-entropy of soft labels, averaged over classes and images, for the Trainer's `compute_loss_func`.

    DeiT III (https://arxiv.org/abs/2204.07118) uses this loss on ImageNet. It equals timm's `BinaryCrossEntropy`. For
    labels that are class indices, as in evaluations, the loss is the cross-entropy.

    Args:
        target_threshold: Labels above this threshold become 1, all others 0. With 0, both classes of a mixed image
            become 1, as in DeiT III. None keeps soft labels unchanged.
    """

    def __init__(self, target_threshold: float | None = None) -> None:
        self.target_threshold = target_threshold

    def __call__(self, outputs: ModelOutput, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Return the loss of a batch.

        Args:
            outputs: Model outputs with `logits` (B, K).
            labels: Probabilities (B, K), or class indices (B,) int64.
            num_items_in_batch: Number of images in all batches of a step on all processes; B by default.
        """
        logits = to_float32_or_higher(outputs.logits)
        if not labels.is_floating_point():
            losses = F.cross_entropy(logits, labels, reduction="none")  # (B,)
        else:
            if self.target_threshold is not None:
                labels = labels > self.target_threshold
            labels = labels.to(logits.dtype)
            losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(dim=1)  # (B,)
        return mean_of(losses, num_items_in_batch)


def mean_of(losses: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
    """Return the sum of losses divided by the number of items in a step, or their mean if this number is None."""
    return losses.mean() if num_items_in_batch is None else losses.sum() / torch.as_tensor(num_items_in_batch).sum()


@dataclass(frozen=True)
class WeightedLoss:
    """Class-weighted loss of a classifier, for the Trainer's argument `compute_loss_func`.

    Args:
        weights: Weight of each of the K classes.
        is_multi: Whether labels are multi-label (B, K), with a separate loss per class. NaN labels are ignored.
    """

    weights: Sequence[float]
    is_multi: bool = False

    def __call__(self, outputs: ModelOutput, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Return the loss of a batch. The arguments are those of `BinaryCrossEntropy.__call__`."""
        logits = to_float32_or_higher(outputs.logits)
        weights = logits.new_tensor(self.weights)
        if not self.is_multi:
            labels = labels.to(logits.dtype) if labels.is_floating_point() else labels
            return mean_of(F.cross_entropy(logits, labels, weights, reduction="none"), num_items_in_batch)
        weights, targets = weights * ~labels.isnan(), labels.nan_to_num().to(logits.dtype)  # (B, K)
        losses = F.binary_cross_entropy_with_logits(logits, targets, weights, reduction="none")  # (B, K)
        return mean_of(losses, num_items_in_batch)  # `num_items_in_batch` counts all B·K labels


class PatchDropout:
    """A `BatchTransform` that drops random patches, the same number in each image, before the blocks.

    The remaining patches keep their position embeddings, and non-patch tokens are always kept. Patch dropout reduces
    the time and memory of a training step.

    Source: PatchDropout, https://arxiv.org/abs/2208.07220.

    Args:
        rate: Share of dropped patches, in [0, 1). At least one patch is kept.
        config: Configuration of the model.

    Raises:
        ValueError: If the model uses window attention.
    """

    def __init__(self, rate: float, config: HfViTConfig) -> None:
        if config.window_size is not None:
            raise ValueError(
                f"token_drop_rate={rate} removes patches, which window_size={config.window_size} does not support. "
                "Set token_drop_rate to 0, or window_size to null."
            )
        self.rate = rate
        self.patch_size = to_pair(config.patch_size)

    def __call__(self, batch: dict[str, Any], progress: float) -> dict[str, Any]:
        """Return the batch with `kept_patches` (B, K) int64, the indices of kept patches; padding is dropped first."""
        images, mask = batch["pixel_values"], batch.get("patch_attention_mask")
        (height, width), (rows, columns) = images.shape[-2:], self.patch_size
        num_patches = (height // rows) * (width // columns)
        num_kept = max(1, round((1 - self.rate) * num_patches))
        noise = torch.rand(len(images), num_patches).to(images.device)  # (B, N)
        if mask is not None:
            noise = noise.masked_fill(~mask.flatten(1).bool(), 1.0)
        kept = noise.argsort(dim=1)[:, :num_kept].sort(dim=1).values  # (B, K)
        return {**batch, "kept_patches": kept}


def regularize(
    model: HfViTForImageClassification,
    args: ClassificationArguments,
    label_smoothing: float = 0.0,
    learns_features: bool = False,
    class_weights: Sequence[float] | None = None,
) -> dict[str, Any]:
    """Return `batch_transforms` and `compute_loss_func` of an `HfViTTrainer`.

    For soft labels, the problem type is set to one class per image, because the model cannot infer it from the labels.

    Args:
        model: The classifier.
        args: Options of image classification.
        label_smoothing: Probability mass spread evenly over all classes, in [0, 1).
        learns_features: Whether a teacher provides features. A teacher receives the mixed images, as in DeiT.
        class_weights: Class weights of the loss, None for equal weights.

    Raises:
        ValueError: If an option is incompatible with the model or the teacher.
    """
    transforms: list[BatchTransform] = []
    is_binary, is_multi = args.classification_loss == "bce", model.config.problem_type == MULTI
    given = {"label_smoothing_factor": label_smoothing, **args.given_values("Regularization"), "token_drop_rate": 0.0}
    if model.config.problem_type == REGRESSION and (wrong := {name: value for name, value in given.items() if value}):
        raise ValueError(f"Regression does not support options for classes: {wrong}. Remove them.")
    if is_binary and (is_multi or class_weights):
        raise ValueError(
            "classification_loss=bce supports neither class weights nor several labels per image. Remove this option."
        )
    if args.mixup_alpha or args.cutmix_alpha or is_binary or class_weights or (is_multi and label_smoothing):
        if not is_multi:
            model.config.problem_type = SINGLE
        mixing = (args.mixup_alpha, args.cutmix_alpha, args.mixing_probability, args.mixing_off_share)
        transforms.append(Mixing(model.config.num_labels, *mixing, label_smoothing))
    if args.token_drop_rate:
        if learns_features:
            raise ValueError(
                f"token_drop_rate={args.token_drop_rate} removes patches, but feature distillation needs all patches. "
                "Set token_drop_rate to 0, or use --distillation_type hard or soft."
            )
        transforms.append(PatchDropout(args.token_drop_rate, model.config))
    loss = WeightedLoss(class_weights, is_multi) if class_weights else None
    return {
        "batch_transforms": transforms,
        "compute_loss_func": BinaryCrossEntropy(args.bce_target_threshold) if is_binary else loss,
    }


def size_of(name: str, height: int, config: HfViTConfig) -> Size:
    """Return the image size with a given height and the aspect ratio of `config`. `name` is the option in errors."""
    patch = to_pair(config.patch_size)
    if height % patch[0]:
        below = height // patch[0] * patch[0]
        fitting = " or ".join(str(near) for near in (below, below + patch[0]) if near)
        raise ValueError(
            f"{name}={height} is not a multiple of the patch height {patch[0]} (patch_size={config.patch_size}). "
            f"Nearest valid values: {fitting}."
        )
    return size_for_height(height, to_pair(config.image_size), patch)
