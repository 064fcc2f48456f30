"""PIL's resampling: by PIL itself, and in torch, pixel for pixel, where the image is on a GPU.

torchvision's kernels are faster, but they weigh 8-bit pixels more coarsely than PIL, treat what bicubic overshoots
differently between the two passes, and lack some filters.
Shapes: B batch, C channels, H W pixels, K taps of the filter.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from transformers.image_utils import PILImageResampling
from transformers.utils.import_utils import is_vision_available


if is_vision_available():
    import PIL.Image

# PIL's weights of 8-bit pixels are whole numbers of 2 ** -22.
PRECISION_BITS = 22


def _triangle(x: Tensor) -> Tensor:
    return (1 - x.abs()).clamp_min(0)


def _cubic(x: Tensor) -> Tensor:
    """Catmull-Rom spline: Keys' cubic convolution with a = -1/2."""
    x = x.abs()
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((x - 5) * x + 8) * x * -0.5 + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


def _lanczos(x: Tensor) -> Tensor:
    return torch.where((x >= -3) & (x < 3), torch.sinc(x) * torch.sinc(x / 3), 0.0)


def _box(x: Tensor) -> Tensor:
    return ((x > -0.5) & (x <= 0.5)).to(x.dtype)


def _hamming(x: Tensor) -> Tensor:
    return torch.where(x.abs() < 1, torch.sinc(x) * (0.54 + 0.46 * torch.cos(math.pi * x)), 0.0)


# How far a filter reaches, in pixels of the coarser image, and its weights.
FILTERS: dict[PILImageResampling, tuple[float, Callable[[Tensor], Tensor]]] = {
    PILImageResampling.BILINEAR: (1.0, _triangle),
    PILImageResampling.BICUBIC: (2.0, _cubic),
    PILImageResampling.LANCZOS: (3.0, _lanczos),
    PILImageResampling.BOX: (0.5, _box),
    PILImageResampling.HAMMING: (1.0, _hamming),
}


def resize_with_pil(image: Tensor, height: int, width: int, resample: PILImageResampling) -> Tensor:
    """Resizes an image (C, H, W), uint8 or float32, any number of channels, to (C, height, width).

    First along the rows, then along the columns: left to itself, PIL chooses the order by release and size, and with
    it what bicubic's overshoot becomes.
    """
    if image.shape[0] == 3 and image.dtype == torch.uint8:
        return torch.from_numpy(_resize_array(image.movedim(0, -1).numpy(), height, width, resample)).movedim(-1, 0)
    # channel by channel: PIL has no mode for most numbers of channels or for floats, and weighs colours by alpha
    channels = [_resize_array(channel.numpy(), height, width, resample) for channel in image]
    return torch.from_numpy(np.stack(channels))


def _resize_array(array: np.ndarray, height: int, width: int, resample: PILImageResampling) -> np.ndarray:
    widened = PIL.Image.fromarray(array).resize((width, array.shape[0]), resample)
    return np.array(widened.resize((width, height), resample))


def resize_as_pil(images: Tensor, height: int, width: int, resample: PILImageResampling) -> Tensor:
    """Resizes images on any device as `resize_with_pil` does.

    Args:
        images: (B, C, H, W), uint8, or floats, which PIL's mode "F" holds.
        height: New height in pixels.
        width: New width in pixels.
        resample: A filter of `FILTERS`.

    Returns:
        (B, C, height, width) in the dtype of `images`; uint8 to the bit as with PIL.

    Source: the algorithm of Pillow, https://github.com/python-pillow/Pillow (src/libImaging/Resample.c).
    """
    images = _resize_last_axis(images, width, resample)  # (B, C, H, width)
    return _resize_last_axis(images.mT, height, resample).mT  # (B, C, height, width)


def _resize_last_axis(images: Tensor, size: int, resample: PILImageResampling) -> Tensor:
    if images.shape[-1] == size:
        return images
    taps, weights = _filter(images.shape[-1], size, resample)
    if images.is_floating_point():
        pixels, weights, total = images.float(), weights.float(), torch.zeros((), device=images.device)
    else:
        weights = (weights * 2**PRECISION_BITS).round().to(torch.int32)
        pixels, total = images, torch.full((), 1 << (PRECISION_BITS - 1), dtype=torch.int32, device=images.device)
    for tap, weight in zip(taps.to(images.device), weights.to(images.device), strict=True):
        total = total + pixels.index_select(-1, tap) * weight
    return total.to(images.dtype) if images.is_floating_point() else (total >> PRECISION_BITS).clamp_(0, 255).byte()


def _filter(old_size: int, size: int, resample: PILImageResampling) -> tuple[Tensor, Tensor]:
    """Which pixels make a new one and with what weight, summing to 1: (K, size) int64 and (K, size) float64."""
    support, weigh = FILTERS[resample]
    scale = old_size / size
    stretch = max(scale, 1.0)  # a shrinking image is averaged over a wider reach
    centres = (torch.arange(size, dtype=torch.float64) + 0.5) * scale  # (size,)
    first = (centres - support * stretch + 0.5).long().clamp_min(0)
    stop = (centres + support * stretch + 0.5).long().clamp_max(old_size)
    taps = first + torch.arange(math.ceil(support * stretch) * 2 + 1)[:, None]  # (K, size)
    weights = weigh((taps - centres + 0.5) / stretch) * (taps < stop)
    return taps.clamp_max(old_size - 1), weights / weights.sum(dim=0)
