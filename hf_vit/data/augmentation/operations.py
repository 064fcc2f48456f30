"""The operations that augmentations are made of: reading, drawing, colors, crops, and crops by any affine map.

Shapes: C channels, H W pixels of an image, h w pixels of the result, K keypoints.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...model.image_geometry import crop_regions, keep_inside, sample_pixels
from ...model.image_inputs import read_image


GRAY = 128  # about zero after normalization


def read_uint8(image: Any, num_channels: int) -> Tensor:
    """Read an image of any mode; of floats in 0..255, torchvision would take all above 1 for white."""
    pixels = read_image(image, num_channels=num_channels)
    return pixels if pixels.dtype == torch.uint8 else pixels.round().clamp(0, 255).to(torch.uint8)


def check_probabilities(**probabilities: float) -> None:
    """Raise `ValueError` for the first value outside of [0, 1]."""
    for name, value in probabilities.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name}={value} is a probability and must lie in [0, 1]; 0 switches it off.")


def check_rotation(max_rotation: float) -> None:
    """Raise `ValueError` if a largest angle in degrees is out of range."""
    if not 0 <= max_rotation <= 180:
        raise ValueError(f"max_rotation={max_rotation} must lie between 0 and 180 degrees.")


def check_colors(num_channels: int, **changes: float) -> None:
    """Raise `ValueError` for the first change of colors of images that have none."""
    for name, value in changes.items():
        if value and num_channels not in (1, 3):
            raise ValueError(f"{name}={value} changes 1 or 3 channels, not num_channels={num_channels}. Set 0.")


def uniform(low: float, high: float) -> float:
    """Draw a number from torch's default generator."""
    return low + (high - low) * float(torch.rand(()))


def draw_scale(scale_range: tuple[float, float]) -> float:
    """Draw a scale, as often half as large as twice."""
    return exp(uniform(*map(log, scale_range)))


@dataclass(frozen=True)
class Span:
    """Along one side: which part of the old one is taken, and where it lies in the new one. In pixels."""

    start: int
    length: int
    new_start: int
    new_length: int

    @property
    def new_stop(self) -> int:
        """Where it ends in the new one."""
        return self.new_start + self.new_length

    def move(self, places: Tensor) -> Tensor:
        """Return where places of the old one are in the new one, in pixels from the edge."""
        return (places - self.start) * (self.new_length / self.length) + self.new_start


@dataclass(frozen=True)
class Crop:
    """Which part of an image is taken, and where it lies in a result of `size`, height and width in pixels."""

    rows: Span
    columns: Span
    size: tuple[int, int]

    @property
    def inner(self) -> tuple[int, int]:
        """Height and width of what is cut out once it is resized."""
        return self.rows.new_length, self.columns.new_length

    def cut(self, image: Tensor) -> Tensor:
        """Return the part of (..., H, W) that is taken."""
        rows, columns = (slice(span.start, span.start + span.length) for span in (self.rows, self.columns))
        return image[..., rows, columns]

    def place(self, inner: Tensor, outside: float) -> Tensor:
        """Return (..., h, w) with the resized part at its place, and `outside` elsewhere."""
        left, right = self.columns.new_start, self.size[1] - self.columns.new_stop
        top, bottom = self.rows.new_start, self.size[0] - self.rows.new_stop
        return F.pad(inner, (left, right, top, bottom), value=outside)

    def take_image(self, image: Tensor, outside: float) -> Tensor:
        """Return (C, h, w) of an image (C, H, W), resized smoothly."""
        from torchvision.transforms.v2 import functional  # here, as all else in the package does without torchvision

        return self.place(functional.resize(self.cut(image), list(self.inner), antialias=True), outside)


def draw_crop(shape: Sequence[int], size: tuple[int, int], scale: float, keep_aspect_ratio: bool) -> Crop:
    """Draw where a crop of an image of a shape (H, W) lies in a result of `size` (h, w) pixels."""
    # At scale 1 the image is as large as an image processor makes it: with `keep_aspect_ratio` its shorter side is
    # that of the result, else both sides are.
    zooms = [length / old for length, old in zip(size, shape, strict=True)]
    if keep_aspect_ratio:  # upright and lying images alike, as by an image processor of `shortest_edge`
        zooms = [min(size) / min(shape)] * 2
    rows, columns = (_draw_span(*lengths) for lengths in zip(shape, size, zooms, [scale] * 2, strict=True))
    return Crop(rows, columns, size)


def _draw_span(old: int, new: int, zoom: float, scale: float) -> Span:
    new_length = min(new, max(1, round(old * zoom * scale)))
    length = min(old, max(1, round(new_length / (zoom * scale))))
    start, new_start = (int(torch.randint(spare + 1, ())) for spare in (old - length, new - new_length))
    return Span(start, length, new_start, new_length)


def crop_matrix(box: Tensor, size: tuple[int, int], padding: float) -> Tensor:
    """Return the affine map (2, 3) float64 from an image to the crop that the image processor makes of a box (4,)."""
    # What is cut out is `padding` times wider and higher than the box: x1, y1, x2, y2 in pixels.
    [region] = crop_regions(box[None], size, padding)  # (4,)
    span = region[2:] - region[:2]
    if not (torch.isfinite(span) & (span > 0)).all():
        raise ValueError(f"The box {box.tolist()} has no size. Boxes are x1, y1, x2, y2 with x1 < x2 and y1 < y2.")
    scale = torch.tensor((size[1] - 1, size[0] - 1), dtype=torch.float64) / span
    return torch.cat((scale.diag(), (-scale * region[:2])[:, None]), dim=1)


def invert_matrix(matrix: Tensor) -> Tensor:
    """Return the map back (2, 3) of an affine map (2, 3)."""
    linear = torch.linalg.inv(matrix[:, :2])
    return torch.cat((linear, -linear @ matrix[:, 2:]), dim=1)


def apply_matrix(points: Tensor, matrix: Tensor) -> Tensor:
    """Return where an affine map (2, 3) takes points (..., 2), x and y in pixels, in their own dtype."""
    return (points.to(matrix.dtype) @ matrix[:, :2].T + matrix[:, 2]).to(points.dtype)


def crop_keypoints(keypoints: Tensor, matrix: Tensor, size: tuple[int, int]) -> Tensor:
    """Return where keypoints (K, 3) of an image lie in the crop of `size` that an affine map (2, 3) leads to."""
    # Those without label and those on no pixel of the crop are all zeros.
    return keep_inside(torch.cat((apply_matrix(keypoints[:, :2], matrix), keypoints[:, 2:]), dim=1), size)


def warp(image: Tensor, matrix: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the crop (C, h, w) of an image (C, H, W), uint8 or float32, that an affine map (2, 3) leads to."""
    # Bilinear, black outside the image; pixels are not averaged where it shrinks, as in the crops of the image
    # processor.
    inverse = invert_matrix(matrix)
    rows, columns = (torch.arange(length, dtype=torch.float64) for length in size)
    # (h, w), where the pixels of the crop lie in the image
    x, y = (a * columns + (b * rows + c)[:, None] for a, b, c in inverse.tolist())
    return sample_pixels(image, x, y)
