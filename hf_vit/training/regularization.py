"""Regularization of a training: soft labels, binary cross-entropy, dropped patches, repeated augmentation.

Shapes: B batch, K labels, h w patch grid, N = h·w patches, K kept ones.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import TrainingArguments
from transformers.utils import ModelOutput

from ..data.augmentation.datasets import AugmentedDataset, RepeatedAugmentationSampler
from ..model.configuration_hf_vit import HfViTConfig, to_pair
from ..model.layers import at_least_float32
from ..model.task_image_classification import HfViTForImageClassification
from ..options.field import COUNT, NOT_NEGATIVE, PROBABILITY, SHARE, SHARE_LEFT_OUT, Range, augmentation_option, option
from ..options.resolve import Options, values_of
from .batch_transforms import BatchTransform, Mixing
from .distillation.base import Distillation
from .distillation.methods import FeatureDistillation
from .training_options import training_options_of


regularization_option = partial(option, group="Regularization")


@dataclass
class AugmentationArguments(Options):
    """How training images of a classifier are changed at random, in this order, then their batches, and the loss."""

    min_crop_scale: float = augmentation_option(
        0.35, "Least share of the area that a random resized crop keeps; 1 takes all of it.", SHARE
    )
    crop_padding: int = augmentation_option(
        0,
        "Pixels by which images are padded, mirrored at the border, to be cropped at random: 4 with "
        "--min_crop_scale 1 is the simple random crop of DeiT III and CIFAR.",
        NOT_NEGATIVE,
    )
    horizontal_flip: float = augmentation_option(0.5, "Probability of a mirror image.", PROBABILITY)
    auto_augment: Literal["none", "trivialaugment", "randaugment", "affine", "3augment"] = augmentation_option(
        "trivialaugment",
        "none, trivialaugment, randaugment, affine (slight, for digits), or 3augment (grayscale, solarize "
        "or blur; DeiT III).",
        synonyms="aa randaugment",
    )
    randaugment_num_ops: int = augmentation_option(2, "Operations that randaugment does to an image.", COUNT)
    randaugment_magnitude: int = augmentation_option(9, "How much each of them does, 0 to 30.", Range(0, 30))
    color_jitter: float = augmentation_option(
        0.0, "By how much brightness, contrast and saturation change at most (DeiT III: 0.3); 0 not.", PROBABILITY
    )
    random_erasing: float = augmentation_option(0.25, "Probability that a rectangle is blanked out.", PROBABILITY)

    mixup_alpha: float = regularization_option(
        0.0,
        "Blend images with one another, by shares from beta(alpha, alpha) (DeiT: 0.8); 0 does not.",
        NOT_NEGATIVE,
        synonyms="mixup",
    )
    cutmix_alpha: float = regularization_option(
        0.0,
        "Put rectangles of images into one another, by such shares (DeiT: 1); 0 does not.",
        NOT_NEGATIVE,
        synonyms="cutmix",
    )
    mixing_probability: float = regularization_option(1.0, "Share of the batches that are mixed.", PROBABILITY)
    mixing_off_share: float = regularization_option(
        0.0, "Share of the training at its end in which none is: 0.1 for the last tenth.", PROBABILITY
    )
    classification_loss: Literal["cross_entropy", "bce"] = regularization_option(
        "cross_entropy", "cross_entropy, or bce, which asks of each class by itself (DeiT III). Scores stay as is."
    )
    bce_target_threshold: float | None = regularization_option(
        None, "Labels above it count as 1 for bce, others as 0; 0 makes all classes of a mixture 1.", SHARE_LEFT_OUT
    )
    token_drop_rate: float = regularization_option(
        0.0, "Share of the patches of each training image that the blocks never see.", SHARE_LEFT_OUT
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bce_target_threshold is not None and self.classification_loss != "bce":
            raise ValueError(
                f"bce_target_threshold={self.bce_target_threshold} is of --classification_loss bce. Say that, or "
                "leave it out."
            )

    def describe(self) -> dict[str, str]:
        """Returns the rows of a card: what differs from the defaults."""
        defaults, values = vars(AugmentationArguments()), values_of(self, "Regularization")
        given = [f"{name} {value}" for name, value in values.items() if value != defaults[name]]
        return {"regularization": ", ".join(given)} if given else {}


class BinaryCrossEntropy:
    """A `compute_loss_func` of the Trainer: binary cross-entropy of soft labels, the mean over classes and images.

    DeiT III (https://arxiv.org/abs/2204.07118) trains on ImageNet with it; the same as timm's `BinaryCrossEntropy`.
    Class numbers, which evaluations have, get cross-entropy.

    Args:
        target_threshold: Labels above count as 1 and others as 0; with 0, both classes of a mixture are wholly there,
            as in DeiT III. None takes labels as they are.
    """

    def __init__(self, target_threshold: float | None = None) -> None:
        self.target_threshold = target_threshold

    def __call__(self, outputs: ModelOutput, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Returns the loss of a batch.

        Args:
            outputs: Has `logits` (B, K).
            labels: (B, K) probabilities, or (B,) int64 class numbers.
            num_items_in_batch: Number of images of all batches of a step on all processes; B if not given.
        """
        logits = at_least_float32(outputs.logits)
        if not labels.is_floating_point():
            losses = F.cross_entropy(logits, labels, reduction="none")  # (B,)
        else:
            if self.target_threshold is not None:
                labels = labels > self.target_threshold
            labels = labels.to(logits.dtype)
            losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(dim=1)  # (B,)
        if num_items_in_batch is None:
            return losses.mean()
        # Where one process has several GPUs, there is an entry for each.
        return losses.sum() / torch.as_tensor(num_items_in_batch).sum()


class PatchDropout:
    """A `BatchTransform` that drops patches at random, as many of each image, which the blocks then never process.

    What is kept keeps its place, and tokens that are no patches are always kept. A step takes less time and memory.

    Source: PatchDropout, https://arxiv.org/abs/2208.07220.

    Args:
        rate: Share of the patches that is dropped, in [0, 1). At least one is kept.
        config: That of the model.

    Raises:
        ValueError: if the model attends within windows.
    """

    def __init__(self, rate: float, config: HfViTConfig) -> None:
        if config.window_size is not None:
            raise ValueError(
                f"token_drop_rate={rate} leaves holes in the patch grid, where window_size={config.window_size} finds "
                "no windows. Set token_drop_rate 0, or window_size null."
            )
        self.rate = rate
        self.patch_size = to_pair(config.patch_size)

    def __call__(self, batch: dict[str, Any], progress: float) -> dict[str, Any]:
        """Returns the batch with `kept_patches` (B, K) int64, the numbers of the patches kept; padding goes first."""
        images, mask = batch["pixel_values"], batch.get("patch_attention_mask")
        (height, width), (rows, columns) = images.shape[-2:], self.patch_size
        num_patches = (height // rows) * (width // columns)
        num_kept = max(1, round((1 - self.rate) * num_patches))
        noise = torch.rand(len(images), num_patches).to(images.device)  # (B, N)
        if mask is not None:
            noise = noise.masked_fill(~mask.flatten(1).bool(), 1.0)
        kept = noise.argsort(dim=1)[:, :num_kept].sort(dim=1).values  # (B, K)
        return {**batch, "kept_patches": kept}


def repeated_augmentation_sampler(args: TrainingArguments, dataset: Any) -> RepeatedAugmentationSampler | None:
    """Returns what draws the images of a training that repeats augmentations; None for others."""
    repeats = training_options_of(args).repeated_augmentations
    step_size = args.train_batch_size * args.world_size * args.gradient_accumulation_steps
    if repeats == 1:
        return None
    if not isinstance(dataset, AugmentedDataset):
        raise ValueError(
            f"repeated_augmentations={repeats} needs images with numbers that are augmented by an "
            f"AugmentedDataset, not {type(dataset).__name__}. Leave it out."
        )
    return RepeatedAugmentationSampler(dataset, repeats, step_size)


def regularize(
    model: HfViTForImageClassification,
    args: AugmentationArguments,
    label_smoothing: float = 0.0,
    distillation: Distillation | None = None,
) -> dict[str, Any]:
    """Returns `batch_transforms` and `compute_loss_func` of an `HfViTTrainer`.

    A model that learns from soft labels is told that they are of one class per image, as it could not know.

    Args:
        model: The classifier.
        args: What to do.
        label_smoothing: Probability mass spread evenly over all classes, in [0, 1).
        distillation: What it learns from a teacher, if there is one. The teacher sees the mixed images, as in DeiT.

    Raises:
        ValueError: if something does not go with the model or the teacher.
    """
    transforms: list[BatchTransform] = []
    is_binary = args.classification_loss == "bce"
    if args.mixup_alpha or args.cutmix_alpha or is_binary:
        model.config.problem_type = "single_label_classification"
        mixing = (args.mixup_alpha, args.cutmix_alpha, args.mixing_probability, args.mixing_off_share)
        transforms.append(Mixing(model.config.num_labels, *mixing, label_smoothing))
    if args.token_drop_rate:
        if isinstance(distillation, FeatureDistillation):
            raise ValueError(
                f"token_drop_rate={args.token_drop_rate} drops patches whose features are to be learned. Set it to 0, "
                "or take --distillation_type hard or soft."
            )
        transforms.append(PatchDropout(args.token_drop_rate, model.config))
    return {
        "batch_transforms": transforms,
        "compute_loss_func": BinaryCrossEntropy(args.bce_target_threshold) if is_binary else None,
    }
