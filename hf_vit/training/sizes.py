"""Training on images of several sizes: batches are resized on the device, and the positions of the model follow.

Targets stay as they are: classes, texts and masks know of no size, and dense predictions are resized to their targets.

Shapes: B batch, C channels, H W pixels, h w patch grid.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..configuration_hf_vit import HfViTConfig, to_pair
from ..data.batch_sizes import size_of_height
from ..modeling_detection_hf_vit import HfViTForObjectDetection
from ..modeling_keypoints_hf_vit import HfViTForKeypointDetection
from ..modeling_mim_hf_vit import HfViTForMaskedImageModeling
from ..pretrained_hf_vit import HfViTPreTrainedModel
from .batch_changes import BatchChange
from .size_arguments import SizeArguments


Size = tuple[int, int]

# Models whose batches cannot be resized in this way -> why, and what to do
REFUSED = {
    HfViTForObjectDetection: "whose batches have sizes of their own: --multi_scale true",
    HfViTForKeypointDetection: "whose targets are in pixels of the images: choose another --image_size",
    HfViTForMaskedImageModeling: "whose masks are drawn for the patches of the images: choose another --image_size",
}


@dataclass(frozen=True)
class ProgressiveSizes:
    """Images grow while a model trains, as in EfficientNetV2 (https://arxiv.org/abs/2104.00298).

    Args:
        sizes: Heights and widths in pixels, each for an equal share of the steps.
    """

    sizes: tuple[Size, ...]

    def __call__(self, batch: dict[str, Any], progress: float) -> dict[str, Any]:
        """Returns the batch at the size whose turn it is."""
        return resize_batch(batch, self.sizes[int(progress * len(self.sizes))])


@dataclass(frozen=True)
class MultiScaleSizes:
    """Every batch has a size that is drawn for it, so that a model learns to see at all of them.

    Args:
        sizes: Heights and widths in pixels, all as likely.
    """

    sizes: tuple[Size, ...]

    def __call__(self, batch: dict[str, Any], progress: float) -> dict[str, Any]:
        """Returns the batch at a size of chance."""
        return resize_batch(batch, self.sizes[int(torch.randint(len(self.sizes), ()))])


def resize_batch(batch: dict[str, Any], size: Size) -> dict[str, Any]:
    """Resizes the images of a batch, bilinear and antialiased.

    Args:
        batch: `pixel_values` (B, C, H, W), maybe `patch_attention_mask` (B, h, w) bool, and what stays as it is.
        size: Height and width wanted, in pixels.

    Returns:
        The batch with images of that size. A patch is padding if all of it is.
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


def size_changes(args: SizeArguments, model: nn.Module) -> list[BatchChange]:
    """Returns what gives training batches the sizes that are asked for, nothing where none are.

    Args:
        args: Which sizes.
        model: What trains on them, maybe with adapters around it.

    Raises:
        ValueError: if the model cannot train on them.
    """
    if not args.progressive_sizes and not args.multi_scale_sizes:
        return []
    name = "progressive_sizes" if args.progressive_sizes else "multi_scale_sizes"
    vit = next((part for part in model.modules() if isinstance(part, HfViTPreTrainedModel)), None)
    if vit is None:
        raise ValueError(f"{name} needs a model of hf_vit, whose positions follow the images: leave it out.")
    for refused, reason in REFUSED.items():
        if isinstance(vit, refused):
            raise ValueError(f"{name} does not go with {refused.__name__}, {reason}.")
    if args.multi_scale_sizes:
        return [MultiScaleSizes(sizes_of(name, args.multi_scale_sizes, vit.config))]
    assert args.progressive_sizes is not None
    sizes = sizes_of(name, args.progressive_sizes, vit.config)
    last = to_pair(vit.config.image_size)
    if sizes[-1] != last:
        raise ValueError(
            f"progressive_sizes={args.progressive_sizes} must end at {last[0]}, the height of the images that the "
            f"model is for (image_size={vit.config.image_size}). Add it, or set --image_size "
            f"{args.progressive_sizes[-1]}."
        )
    return [ProgressiveSizes(sizes)]


def sizes_of(name: str, heights: list[int], config: HfViTConfig) -> tuple[Size, ...]:
    """Returns the sizes of images of these heights, in the proportions of `config.image_size`.

    Raises:
        ValueError: if a height is no multiple of that of a patch; `name` is what it was given as.
    """
    patch = to_pair(config.patch_size)
    for height in heights:
        if height < 1 or height % patch[0]:
            below, above = height // patch[0] * patch[0], (height // patch[0] + 1) * patch[0]
            fitting = f"{below} or {above}" if below > 0 else f"{patch[0]}"
            raise ValueError(
                f"{name}={heights}: {height} is not a multiple of the patch height {patch[0]} (patch_size="
                f"{config.patch_size}). The nearest that fit: {fitting}."
            )
    return tuple(size_of_height(height, to_pair(config.image_size), patch) for height in heights)
