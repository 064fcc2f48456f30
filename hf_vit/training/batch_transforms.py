"""Transforms of whole batches on the device: mixtures of images, other sizes.

Shapes: B batch, C channels, H W pixels, K labels, h w patch grid.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from ..data.augmentation.datasets import seeded
from ..data.collators import size_of_height
from ..model.configuration_hf_vit import HfViTConfig, to_pair
from ..model.pretrained import HfViTPreTrainedModel
from ..model.task_image_classification import soften_labels
from ..model.task_joint_embedding import HfViTForJointEmbedding
from ..model.task_keypoint_detection import HfViTForKeypointDetection
from ..model.task_masked_image_modeling import HfViTForMaskedImageModeling
from ..model.task_object_detection import HfViTForObjectDetection
from .training_options import TrainingOptions


class BatchTransform(Protocol):
    """Changes a batch of a training."""

    def __call__(self, batch: dict[str, Any], progress: float) -> dict[str, Any]:
        """Returns the changed batch; `progress` is the share of the training's steps that are done, in [0, 1).

        Randomness is drawn from torch's default generator.
        """


class BatchTransforms:
    """Applies batch transforms one after the other, the same ones in a training that resumes.

    What is drawn depends on the seed, the step and the place of the batch in the step alone. So all processes draw the
    same for their batches of one step, which keeps these at one size.
    """

    def __init__(self, transforms: Sequence[BatchTransform], seed: int) -> None:
        self.transforms = transforms
        self.seed = seed
        self._last = (-1, 0)

    def __call__(self, batch: dict[str, Any], step: int, num_steps: int) -> dict[str, Any]:
        """Returns the changed batch of a step out of `num_steps`; those of one step come in their order."""
        last_step, place = self._last
        place = place + 1 if step == last_step else 0
        self._last = step, place
        with seeded(self.seed, step, place):
            for transform in self.transforms:
                batch = transform(batch, step / num_steps)
        return batch


class Mixing:
    """A `BatchTransform` that mixes images of a batch, and makes its class numbers probabilities of all classes.

    MixUp (https://arxiv.org/abs/1710.09412) blends each image with its neighbor in the batch, CutMix
    (https://arxiv.org/abs/1905.04899) puts a rectangle of the neighbor into it; one share is drawn for a whole batch.
    Where both are on, either is drawn equally often, as in DeiT. Neighbors are images of one process.

    Args:
        num_labels: Number K of classes.
        mixup_alpha: Both parameters of the beta distribution that MixUp draws the share from; 0 for no MixUp.
        cutmix_alpha: Those of CutMix; 0 for no CutMix.
        probability: Share of the batches that are mixed, in [0, 1].
        off_share: Share of the training at its end in which none is, in [0, 1].
        label_smoothing: Probability mass spread evenly over all classes, in [0, 1); always.
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
        from torchvision.transforms import v2  # here, as all else in the package does without torchvision

        kinds = ((v2.MixUp, mixup_alpha), (v2.CutMix, cutmix_alpha))
        mixers = [kind(alpha=alpha, num_classes=num_labels) for kind, alpha in kinds if alpha]
        self.mix = v2.RandomChoice(mixers) if mixers else None
        self.num_labels = num_labels
        self.probability = probability
        self.off_share = off_share
        self.label_smoothing = label_smoothing

    def __call__(self, batch: dict[str, Any], progress: float) -> dict[str, Any]:
        """Returns the batch with `pixel_values` (B, C, H, W) mixed and `labels` (B,) int64 as (B, K) float32.

        Raises:
            ValueError: if a class number is out of range.
        """
        images = batch["pixel_values"]
        labels = soften_labels(batch["labels"], self.num_labels, self.label_smoothing)  # (B, K)
        if self.mix is not None and progress < 1 - self.off_share and float(torch.rand(())) < self.probability:
            images, labels = self.mix(images, labels)
        return {**batch, "pixel_values": images, "labels": labels}


Size = tuple[int, int]
# Models whose batches cannot be resized in this way -> why, and what to do
REFUSED = {
    HfViTForObjectDetection: "whose batches have sizes of their own: --multi_scale true",
    HfViTForKeypointDetection: "whose targets are in pixels of the images: choose another --image_size",
    HfViTForJointEmbedding: "whose views have sizes of their own: --global_size",
    HfViTForMaskedImageModeling: "whose masks are drawn for the patches of the images: choose another --image_size",
}


@dataclass(frozen=True)
class ImageSizes:
    """A `BatchTransform` to several sizes of images.

    Args:
        sizes: Heights and widths in pixels.
        is_drawn: Whether the size of every batch is drawn among them, all as likely, so that a model works at all of
            them. Else each is that of an equal share of the steps, in their order: images grow while a model trains,
            as in EfficientNetV2 (https://arxiv.org/abs/2104.00298).
    """

    sizes: tuple[Size, ...]
    is_drawn: bool = False

    def __call__(self, batch: dict[str, Any], progress: float) -> dict[str, Any]:
        """Returns the batch at the size that is drawn, or whose turn it is."""
        count = len(self.sizes)
        return resize_batch(batch, self.sizes[int(torch.randint(count, ()) if self.is_drawn else progress * count)])


def resize_batch(batch: dict[str, Any], size: Size) -> dict[str, Any]:
    """Resizes the images (B, C, H, W) of a batch, bilinear and antialiased, and its `patch_attention_mask` (B, h, w).

    A patch is padding if all of it is.
    """
    images, mask = batch["pixel_values"], batch.get("patch_attention_mask")
    if images.shape[-2:] == size:
        return batch
    resized = F.interpolate(images, size, mode="bilinear", align_corners=False, antialias=True)
    if mask is None:
        return {**batch, "pixel_values": resized}
    grid = [new * count // old for new, count, old in zip(size, mask.shape[-2:], images.shape[-2:], strict=True)]
    return {
        **batch,
        "pixel_values": resized,
        "patch_attention_mask": F.adaptive_max_pool2d(mask.float(), grid).bool(),
    }


def size_transforms(args: TrainingOptions, model: nn.Module) -> list[BatchTransform]:
    """Returns transforms to the sizes that are asked for, if any; `ValueError` if the model cannot train on them."""
    heights = args.progressive_sizes or args.multi_scale_sizes
    if not heights:
        return []
    name = "progressive_sizes" if args.progressive_sizes else "multi_scale_sizes"
    vit = next((part for part in model.modules() if isinstance(part, HfViTPreTrainedModel)), None)
    if vit is None:
        raise ValueError(f"{name} needs a model of hf_vit, whose positions follow the images: leave it out.")
    for refused, reason in REFUSED.items():
        if isinstance(vit, refused):
            raise ValueError(f"{name} does not go with {refused.__name__}, {reason}.")
    sizes = tuple(size_of(name, height, vit.config) for height in heights)
    last = to_pair(vit.config.image_size)
    if args.progressive_sizes and sizes[-1] != last:
        raise ValueError(
            f"progressive_sizes={heights} must end at {last[0]}, the height of the images that the "
            f"model is for (image_size={vit.config.image_size}). Add it, or set --image_size {heights[-1]}."
        )
    return [ImageSizes(sizes, is_drawn=not args.progressive_sizes)]


def size_of(name: str, height: int, config: HfViTConfig) -> Size:
    """Returns the size of images of a height, in the proportions of `config.image_size`; errors quote `name`."""
    patch = to_pair(config.patch_size)
    if height % patch[0]:
        below = height // patch[0] * patch[0]
        fitting = " or ".join(str(near) for near in (below, below + patch[0]) if near)
        raise ValueError(
            f"{name}={height} is not a multiple of the patch height {patch[0]} (patch_size={config.patch_size}). The "
            f"nearest that fit: {fitting}."
        )
    return size_of_height(height, to_pair(config.image_size), patch)
