"""What the augmentations of all tasks share."""

from importlib.util import find_spec
from math import exp, log
from typing import Any

import torch
from torch import Tensor

from ..image_inputs_hf_vit import read_image


GREY = 128  # about zero after normalisation


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
    """Raises `ValueError` if it is no probability, or there are no colours that could change."""
    check_probabilities(photometric=photometric)
    if photometric and num_channels not in (1, 3):
        raise ValueError(f"photometric={photometric} changes 1 or 3 channels, not num_channels={num_channels}. Set 0.")


def check_torchvision() -> None:
    """Raises `ImportError` if torchvision is not installed."""
    if find_spec("torchvision") is None:
        raise ImportError('Augmentation needs torchvision. Install it: pip install "hf-vit[train]".')


def distort(image: Tensor) -> Tensor:
    """Returns an image (C, H, W) uint8 of another brightness, contrast and, of colours, saturation and hue."""
    from torchvision.transforms import v2  # here, as all else in the package does without torchvision

    return v2.ColorJitter(brightness=0.125, contrast=0.5, saturation=0.5, hue=0.05)(image)


def uniform(low: float, high: float) -> float:
    """Draws a number from torch's default generator."""
    return low + (high - low) * float(torch.rand(()))


def draw_scale(scale_range: tuple[float, float]) -> float:
    """Draws a scale, as often half as large as twice."""
    return exp(uniform(*map(log, scale_range)))
