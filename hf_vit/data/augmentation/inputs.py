"""What the augmentations of all tasks share."""

from importlib.util import find_spec
from math import ceil, exp, log
from typing import Any

import torch
from torch import Tensor

from ...model.image_inputs import read_image


GRAY = 128  # about zero after normalization


def read_uint8(image: Any, num_channels: int) -> Tensor:
    """Reads an image of any mode; of floats in 0..255, torchvision would take all above 1 for white."""
    pixels = read_image(image, num_channels=num_channels)
    return pixels if pixels.dtype == torch.uint8 else pixels.round().clamp(0, 255).to(torch.uint8)


def check_probabilities(**probabilities: float) -> None:
    """Raises `ValueError` for the first that is none."""
    for name, value in probabilities.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name}={value} is a probability and must lie in [0, 1]; 0 switches it off.")


def check_scale_range(scale_range: tuple[float, float]) -> None:
    """Raises `ValueError` if it is no range of scales."""
    if not 0 < scale_range[0] <= scale_range[1]:
        raise ValueError(f"scale_range={scale_range} must be two positive numbers, the smaller one first.")


def check_rotation(max_rotation: float) -> None:
    """Raises `ValueError` if it is no largest angle."""
    if not 0 <= max_rotation <= 180:
        raise ValueError(f"max_rotation={max_rotation} must lie between 0 and 180 degrees.")


def check_photometric(photometric: float, num_channels: int) -> None:
    """Raises `ValueError` if it is no probability, or there are no colors that could change."""
    check_probabilities(photometric=photometric)
    if photometric and num_channels not in (1, 3):
        raise ValueError(f"photometric={photometric} changes 1 or 3 channels, not num_channels={num_channels}. Set 0.")


def check_torchvision() -> None:
    """Raises `ImportError` if torchvision is not installed."""
    if find_spec("torchvision") is None:
        raise ImportError('Augmentation needs torchvision. Install it: pip install "hf-vit[train]".')


def distort(image: Tensor) -> Tensor:
    """Returns an image (C, H, W) uint8 of another brightness, contrast and, of colors, saturation and hue."""
    from torchvision.transforms import v2  # here, as all else in the package does without torchvision

    return v2.ColorJitter(brightness=0.125, contrast=0.5, saturation=0.5, hue=0.05)(image)


def uniform(low: float, high: float) -> float:
    """Draws a number from torch's default generator."""
    return low + (high - low) * float(torch.rand(()))


def draw_scale(scale_range: tuple[float, float]) -> float:
    """Draws a scale, as often half as large as twice."""
    return exp(uniform(*map(log, scale_range)))


def size_of_height(height: int, size: tuple[int, int], multiple: tuple[int, int]) -> tuple[int, int]:
    """Returns a height, and the width that comes closest to the proportions of a size, all in pixels.

    Args:
        height: The height.
        size: Height and width.
        multiple: What height and width must be multiples of. The width is rounded to it.
    """
    return height, max(1, round(height * size[1] / size[0] / multiple[1])) * multiple[1]


def multi_scale_sizes(
    size: tuple[int, int], multiple: tuple[int, int], smallest: float = 0.75, largest: float = 1.25
) -> list[tuple[int, int]]:
    """Returns the sizes around one that a model takes, for training on batches of several sizes.

    Args:
        size: Height and width in pixels.
        multiple: What height and width must be multiples of, in pixels: the patch size, times the rows and columns of
            a window if the model has windows.
        smallest: Smallest height as a share of that in `size`.
        largest: Largest height as a share of that in `size`.

    Raises:
        ValueError: if there is none.
    """
    rows = range(max(1, ceil(smallest * size[0] / multiple[0])), int(largest * size[0] / multiple[0]) + 1)
    heights = [row * multiple[0] for row in rows]
    sizes = [size_of_height(height, size, multiple) for height in heights]
    if not sizes:
        raise ValueError(
            f"No multiple of {multiple[0]} lies between {smallest} and {largest} times the height {size[0]}. Take a "
            "larger size, or widen the range."
        )
    return sizes
