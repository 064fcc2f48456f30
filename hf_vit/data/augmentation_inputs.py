"""What the augmentations of all tasks share."""

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
