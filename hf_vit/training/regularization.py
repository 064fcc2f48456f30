"""Regularization: mixing and resizing of images, patch dropout, soft labels and repeated augmentation.

In shapes, B is the batch size, C the number of channels, (H, W) the image size, (h, w) the patch grid, N = h·w the
number of patches, and K the number of classes or of kept patches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import nn
from transformers import TrainingArguments

from ..data.augmentation.datasets import AugmentedDataset, BalancedSampler, RepeatedAugmentationSampler, seeded
from ..data.augmentation.multi_task import MultiTaskDataset, TaskSampler
from ..model.configuration_hf_vit import to_pair
from ..model.pretrained import HfViTPreTrainedModel
from ..model.task_joint_embedding import HfViTForJointEmbedding
from ..model.task_keypoint_detection import HfViTForKeypointDetection
from ..model.task_masked_image_modeling import HfViTForMaskedImageModeling
from ..model.task_object_detection import HfViTForObjectDetection
from ..options.training_arguments import training_options_of
from ..tasks.common.regularization import BatchTransform, Size, size_of


# Models that do not support resized batches, with a reason and an alternative
REFUSED = {
    HfViTForObjectDetection: "which resizes batches with --multi_scale true",
    HfViTForKeypointDetection: "whose targets are in pixels of the images. Set another --image_size",
    HfViTForJointEmbedding: "whose views are resized with --global_size",
    HfViTForMaskedImageModeling: "whose masks are drawn for the patches of the images. Set another --image_size",
}


class BatchTransforms:
    """Apply batch transforms in sequence. A resumed run uses the same random numbers as an uninterrupted run.

    Random numbers only depend on the seed, the step and the position of the batch in the step. All processes draw
    identical numbers for a step, so that their batches have the same size.
    """

    def __init__(self, transforms: Sequence[BatchTransform], seed: int) -> None:
        self.transforms = list(transforms)
        self.seed = seed
        self._last = (-1, 0)

    def __call__(self, batch: dict[str, Any], step: int, progress: float) -> dict[str, Any]:
        """Return a transformed batch of a step. Pass the batches of a step in order."""
        last_step, place = self._last
        place = place + 1 if step == last_step else 0
        self._last = step, place
        with seeded(self.seed, step, place):
            for transform in self.transforms:
                batch = transform(batch, progress)
        return batch


@dataclass(frozen=True)
class ImageSizes:
    """A `BatchTransform` that resizes batches to image sizes that grow during training.

    Each size is used for an equal share of the training, in the given order, as in EfficientNetV2
    (https://arxiv.org/abs/2104.00298).

    Args:
        sizes: Heights and widths in pixels.
    """

    sizes: tuple[Size, ...]

    def __call__(self, batch: dict[str, Any], progress: float) -> dict[str, Any]:
        """Return the batch, resized to the scheduled image size."""
        return resize_batch(batch, self.sizes[int(progress * len(self.sizes))])


def resize_batch(batch: dict[str, Any], size: Size) -> dict[str, Any]:
    """Resize the images (B, C, H, W) of a batch, bilinearly and antialiased, and its `patch_attention_mask` (B, h, w).

    A patch of a resized image is padding if it only covers padding.
    """
    images, mask = batch["pixel_values"], batch.get("patch_attention_mask")
    if images.shape[-2:] == size:
        return batch
    resized = F.interpolate(images, size, mode="bilinear", align_corners=False, antialias=True)
    if mask is None:
        return {**batch, "pixel_values": resized}
    grid = [new * count // old for new, count, old in zip(size, mask.shape[-2:], images.shape[-2:], strict=True)]
    return {**batch, "pixel_values": resized, "patch_attention_mask": F.adaptive_max_pool2d(mask.float(), grid).bool()}


def size_transforms(args: Any, model: nn.Module) -> list[BatchTransform]:
    """Return the requested transforms of the image size; raise `ValueError` if the model does not support them."""
    heights = args.progressive_sizes
    if not heights:
        return []
    vit = next((part for part in model.modules() if isinstance(part, HfViTPreTrainedModel)), None)
    if vit is None:
        raise ValueError(
            "progressive_sizes requires a model of hf_vit, which supports several image sizes. Remove this option."
        )
    for refused, reason in REFUSED.items():
        if isinstance(vit, refused):
            raise ValueError(f"progressive_sizes does not support {refused.__name__}, {reason}. Remove this option.")
    sizes = tuple(size_of("progressive_sizes", height, vit.config) for height in heights)
    last = to_pair(vit.config.image_size)
    if sizes[-1] != last:
        raise ValueError(
            f"progressive_sizes={heights} must end at {last[0]}, the image height of the model "
            f"(image_size={vit.config.image_size}). Add it, or set --image_size {heights[-1]}."
        )
    return [ImageSizes(sizes)]


def training_sampler(
    args: TrainingArguments, dataset: Any
) -> RepeatedAugmentationSampler | BalancedSampler | TaskSampler | None:
    """Return the sampler for several tasks, repeated augmentation or balanced classes, or None for the default."""
    repeats = training_options_of(args).repeated_augmentations
    step_size = args.train_batch_size * args.world_size * args.gradient_accumulation_steps
    if isinstance(dataset, MultiTaskDataset):
        return TaskSampler(dataset, step_size)
    if isinstance(dataset, AugmentedDataset) and dataset.classes is not None:
        if repeats > 1:
            raise ValueError(
                f"repeated_augmentations={repeats} and balanced_sampling both change the sampling of images. Remove "
                "one of them."
            )
        return BalancedSampler(dataset)
    if repeats == 1:
        return None
    if not isinstance(dataset, AugmentedDataset):
        raise ValueError(
            f"repeated_augmentations={repeats} requires an AugmentedDataset as training data, not "
            f"{type(dataset).__name__}. Remove it."
        )
    return RepeatedAugmentationSampler(dataset, repeats, step_size)
