"""The random changes that images and their targets go through together, by `torchvision.transforms.v2`.

Shapes: C channels, H W pixels, M masks, h w pixels of the result.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...model.image_geometry import resize_nearest
from ...model.image_targets import IGNORED_LABEL
from ..targets import without_crowds
from .crops import draw_crop
from .inputs import (
    GRAY,
    check_photometric,
    check_probabilities,
    check_rotation,
    check_scale_range,
    check_torchvision,
    distort,
    draw_scale,
    read_uint8,
    uniform,
)


# What a target has where the image does not reach.
OUTSIDE = {"segmentation_map": IGNORED_LABEL, "masks": 0, "depth_map": 0}
MAX_TRIES = 10


def dense_augmentation(
    size: tuple[int, int],
    *,
    num_channels: int = 3,
    scale_range: tuple[float, float] = (0.5, 2.0),
    keep_aspect_ratio: bool = True,
    max_class_share: float = 0.75,
    horizontal_flip: float = 0.5,
    max_rotation: float = 0.0,
    photometric: float = 0.5,
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Returns the augmentation of training examples for segmentation and depth, which also brings them to one size.

    An image is scaled at random, and a crop of it, or where it is smaller a frame around it, is taken. Where the image
    does not reach, it is gray, and its target is 255 (classes), empty (masks) or 0 (depth). Masks without a pixel left
    are dropped, and those of crowds. A depth map is divided by the scale: what is twice as large is half as far
    (https://arxiv.org/abs/1406.2283, section 3.4).

    Args:
        size: Height h and width w of the result in pixels.
        num_channels: Number of channels C of the result; colors are converted as the image processor does.
        scale_range: Smallest and largest scale, drawn evenly on a logarithmic axis. At scale 1 the image is as large
            as an image processor makes it.
        keep_aspect_ratio: Whether the image keeps its proportions, and at scale 1 its shorter side is that of the
            result (`{"shortest_edge"}`), or else it is squeezed into the result (`{"height", "width"}`).
        max_class_share: Largest share of a crop's labeled pixels that one class may have, in (0, 1]; crops are drawn
            anew up to ten times (as in mmsegmentation). For class maps only; 1 takes any crop.
        horizontal_flip: Probability of a mirror image, in [0, 1].
        max_rotation: Largest angle of a random rotation in degrees, either way.
        photometric: Probability that brightness, contrast and, of colors, saturation and hue change, in [0, 1]. The
            target stays as it is.

    Returns:
        A function from an example (an image of any kind and size in `image`, a target of its size in
        `segmentation_map`, `masks` and `class_labels`, or `depth_map`, and whatever else) to one with `image`
        (C, h, w) uint8 and its target (h, w) or (M, h, w).

    Raises:
        ImportError: if torchvision is not installed.
        ValueError: if a value is out of range, or colors shall change and C is neither 1 nor 3.
    """
    check_probabilities(horizontal_flip=horizontal_flip)
    check_scale_range(scale_range)
    if not 0 < max_class_share <= 1:
        raise ValueError(f"max_class_share={max_class_share} must lie in (0, 1]; 1 takes any crop.")
    check_rotation(max_rotation)
    check_photometric(photometric, num_channels)
    check_torchvision()
    return _DenseAugmentation(
        size, num_channels, scale_range, keep_aspect_ratio, max_class_share, horizontal_flip, max_rotation, photometric
    )


@dataclass(frozen=True)
class _DenseAugmentation:
    """The function that `dense_augmentation` returns; a class, so that it passes to worker processes."""

    size: tuple[int, int]
    num_channels: int
    scale_range: tuple[float, float]
    keep_aspect_ratio: bool
    max_class_share: float
    horizontal_flip: float
    max_rotation: float
    photometric: float

    def __call__(self, example: dict[str, Any]) -> dict[str, Any]:
        example = without_crowds(example)
        name = next(name for name in OUTSIDE if name in example)
        image, target = read_uint8(example["image"], self.num_channels), example[name]
        scale = draw_scale(self.scale_range)
        crop = draw_crop(image.shape[-2:], self.size, scale, self.keep_aspect_ratio)
        for _ in range(MAX_TRIES if name == "segmentation_map" and self.max_class_share < 1 else 0):
            if _largest_share(crop.cut(target)) <= self.max_class_share:
                break
            crop = draw_crop(image.shape[-2:], self.size, scale, self.keep_aspect_ratio)
        image = crop.take_image(image, GRAY)  # (C, h, w)
        target = crop.place(resize_nearest(crop.cut(target), *crop.inner), OUTSIDE[name])  # (h, w) or (M, h, w)
        if torch.rand(()) < self.horizontal_flip:
            image, target = image.flip(-1), target.flip(-1)
        if self.max_rotation:
            image, target = _rotate(image, target, uniform(-self.max_rotation, self.max_rotation), OUTSIDE[name])
        if torch.rand(()) < self.photometric:
            image = distort(image)
        changed = {"image": image, name: target / scale if name == "depth_map" else target}
        if name == "masks":
            is_left = target.flatten(1).any(dim=1)  # (M,)
            changed |= {"masks": target[is_left], "class_labels": example["class_labels"][is_left]}
        return {**example, **changed}


def _largest_share(labels: Tensor) -> float:
    """Returns the share of the most frequent class, seen on every fourth pixel each way; 1 if there is none."""
    counts = labels[::4, ::4].flatten().bincount(minlength=IGNORED_LABEL)[:IGNORED_LABEL]
    return float(counts.max() / counts.sum()) if counts.any() else 1.0


def _rotate(image: Tensor, target: Tensor, angle: float, outside: float) -> tuple[Tensor, Tensor]:
    from torchvision import tv_tensors  # here, as all else in the package does without torchvision
    from torchvision.transforms.v2 import InterpolationMode, functional

    # The type of a tensor says how it turns: masks are never interpolated.
    turned = functional.rotate(tv_tensors.Mask(target), angle, fill=outside).as_subclass(Tensor)
    return functional.rotate(image, angle, InterpolationMode.BILINEAR, fill=GRAY), turned
