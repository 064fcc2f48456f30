"""The random changes that the crop of an object and its keypoints go through together.

All of them are one affine map from the image, which is resampled once. Shapes: C channels, K keypoints, h w pixels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import cos, radians, sin
from typing import Any

import torch
from torch import Tensor

from ...model.task_keypoints import mirrored_order
from .crops import crop_keypoints, crop_matrix, warp
from .inputs import (
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


def keypoint_augmentation(
    size: tuple[int, int],
    *,
    num_channels: int = 3,
    box_padding: float = 1.25,
    scale_range: tuple[float, float] = (0.65, 1.35),
    max_rotation: float = 40.0,
    max_shift: float = 0.1,
    horizontal_flip: float = 0.5,
    flip_pairs: Sequence[Sequence[int]] = (),
    photometric: float = 0.5,
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Returns the augmentation of training examples for keypoints, which cuts each object out of its image.

    With nothing left to chance, the crop is the one that the image processor makes: bilinear, black outside the image.
    Keypoints that leave it count as not labeled.

    Args:
        size: Height h and width w of the crop in pixels.
        num_channels: Number of channels C of the result; colors are converted as the image processor does.
        box_padding: How many times wider and higher than the box a crop is at scale 1.
        scale_range: Smallest and largest scale of the object, drawn evenly on a logarithmic axis.
        max_rotation: Largest angle of a random rotation in degrees, either way.
        max_shift: How far the object is moved at most, either way, as a share of the width and height of the crop.
        horizontal_flip: Probability of a mirror image, in [0, 1].
        flip_pairs: Pairs of keypoints (numbers from 0) that a mirror image swaps, as the left and the right eye.
        photometric: Probability that brightness, contrast and, of colors, saturation and hue change, in [0, 1].

    Returns:
        A function from an example (an image of any kind and size in `image`, `keypoints` (K, 3), x and y in its pixels
        and visibility, `box` (4,), x1, y1, x2, y2, and whatever else) to one with `image` (C, h, w) uint8 and
        `keypoints` (K, 3) in pixels of the crop.

    Raises:
        ImportError: if torchvision is not installed.
        ValueError: if a value is out of range, or colors shall change and C is neither 1 nor 3.
    """
    check_probabilities(horizontal_flip=horizontal_flip)
    check_scale_range(scale_range)
    check_rotation(max_rotation)
    check_photometric(photometric, num_channels)
    if not box_padding > 0:
        raise ValueError(f"box_padding={box_padding} must be positive; 1 cuts at the box.")
    if not 0 <= max_shift < 1:
        raise ValueError(f"max_shift={max_shift} is a share of the crop and must lie in [0, 1).")
    check_torchvision()
    pairs = tuple((first, second) for first, second in flip_pairs)
    return _KeypointAugmentation(
        size,
        num_channels,
        box_padding,
        scale_range,
        max_rotation,
        max_shift,
        horizontal_flip,
        pairs,
        photometric,
    )


@dataclass(frozen=True)
class _KeypointAugmentation:
    """The function that `keypoint_augmentation` returns; a class, so that it passes to worker processes."""

    size: tuple[int, int]
    num_channels: int
    box_padding: float
    scale_range: tuple[float, float]
    max_rotation: float
    max_shift: float
    horizontal_flip: float
    flip_pairs: tuple[tuple[int, int], ...]
    photometric: float

    def __call__(self, example: dict[str, Any]) -> dict[str, Any]:
        image, keypoints = read_uint8(example["image"], self.num_channels), example["keypoints"]
        matrix = self._draw_change() @ _square(crop_matrix(example["box"], self.size, self.box_padding))
        if torch.rand(()) < self.horizontal_flip:
            matrix = torch.tensor([[-1.0, 0, self.size[1] - 1], [0, 1, 0], [0, 0, 1]], dtype=matrix.dtype) @ matrix
            keypoints = keypoints[mirrored_order(len(keypoints), self.flip_pairs)]
        image = warp(image, matrix[:2], self.size)  # (C, h, w)
        keypoints = crop_keypoints(keypoints, matrix[:2], self.size)
        if torch.rand(()) < self.photometric:
            image = distort(image)
        # where the object was in the image, it is no more
        rest = {name: value for name, value in example.items() if name not in ("box", "area")}
        return {**rest, "image": image, "keypoints": keypoints}

    def _draw_change(self) -> Tensor:
        """Returns a turn, scale and shift (3, 3) around the center of the crop, in its pixels."""
        scale, angle = draw_scale(self.scale_range), radians(uniform(-self.max_rotation, self.max_rotation))
        height, width = self.size
        shift = [uniform(-self.max_shift, self.max_shift) * length for length in (width, height)]
        linear = scale * torch.tensor([[cos(angle), -sin(angle)], [sin(angle), cos(angle)]], dtype=torch.float64)
        center = torch.tensor([(width - 1) / 2, (height - 1) / 2], dtype=torch.float64)
        offset = center + torch.tensor(shift, dtype=torch.float64) - linear @ center
        return _square(torch.cat((linear, offset[:, None]), dim=1))


def _square(matrix: Tensor) -> Tensor:
    """Completes an affine map (2, 3) to one that can be multiplied."""
    return torch.cat((matrix, matrix.new_tensor([[0, 0, 1]])))
