"""Building blocks of augmentations: argument checks, random numbers, image reading, crops, and affine warps.

Shapes: C channels, H and W size of an image in pixels, h and w size of the output in pixels, K keypoints.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...model.image_geometry import crop_regions, sample_pixels, zero_keypoints_outside
from ...model.image_inputs import read_image


GRAY = 128  # pixel value of padded or erased regions, near zero after normalization


def read_uint8(image: Any, num_channels: int) -> Tensor:
    """Read an image of any mode as (C, H, W) uint8. Unlike in torchvision, floats above 1 do not become white."""
    pixels = read_image(image, num_channels=num_channels)
    return pixels if pixels.dtype == torch.uint8 else pixels.round().clamp(0, 255).to(torch.uint8)


def check_probabilities(**probabilities: float) -> None:
    """Raise `ValueError` for the first value outside [0, 1]."""
    for name, value in probabilities.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name}={value} is a probability and must lie in [0, 1]; 0 disables it.")


def check_rotation(max_rotation: float) -> None:
    """Raise `ValueError` if the maximum rotation angle in degrees is out of range."""
    if not 0 <= max_rotation <= 180:
        raise ValueError(f"max_rotation={max_rotation} must lie between 0 and 180 degrees.")


def check_colors(num_channels: int, **changes: float) -> None:
    """Raise `ValueError` for the first nonzero color augmentation if images do not have 1 or 3 channels."""
    for name, value in changes.items():
        if value and num_channels not in (1, 3):
            raise ValueError(f"{name}={value} requires 1 or 3 channels, not num_channels={num_channels}. Set it to 0.")


def uniform(low: float, high: float) -> float:
    """Draw a uniform random number in [low, high) from torch's default generator."""
    return low + (high - low) * float(torch.rand(()))


def draw_scale(scale_range: tuple[float, float]) -> float:
    """Draw a scale from a log-uniform distribution."""
    return exp(uniform(*map(log, scale_range)))


@dataclass(frozen=True)
class Span:
    """One axis of a crop: an interval of the image and the output interval that it is resized to, both in pixels."""

    start: int
    length: int
    new_start: int
    new_length: int

    @property
    def new_stop(self) -> int:
        """End of the output interval of a crop in pixels."""
        return self.new_start + self.new_length

    def move(self, places: Tensor) -> Tensor:
        """Convert coordinates in the image to coordinates in the output, both in pixels from the top or left edge."""
        return (places - self.start) * (self.new_length / self.length) + self.new_start


@dataclass(frozen=True)
class Crop:
    """A region of an image and the region of the output that it is resized to.

    Args:
        rows: Vertical intervals of the image and of the output.
        columns: Horizontal intervals of the image and of the output.
        size: Height h and width w of the output in pixels.
    """

    rows: Span
    columns: Span
    size: tuple[int, int]

    @property
    def inner(self) -> tuple[int, int]:
        """Height and width of the resized region in pixels."""
        return self.rows.new_length, self.columns.new_length

    def cut(self, image: Tensor) -> Tensor:
        """Return the region of an image or map (..., H, W), without resizing."""
        rows, columns = (slice(span.start, span.start + span.length) for span in (self.rows, self.columns))
        return image[..., rows, columns]

    def place(self, inner: Tensor, outside: float) -> Tensor:
        """Pad the resized region to (..., h, w) with the value `outside`."""
        left, right = self.columns.new_start, self.size[1] - self.columns.new_stop
        top, bottom = self.rows.new_start, self.size[0] - self.rows.new_stop
        return F.pad(inner, (left, right, top, bottom), value=outside)

    def take_image(self, image: Tensor, outside: float) -> Tensor:
        """Crop an image (C, H, W) to (C, h, w), with antialiased resizing."""
        from torchvision.transforms.v2 import functional  # imported here because torchvision is optional

        return self.place(functional.resize(self.cut(image), list(self.inner), antialias=True), outside)


def draw_crop(shape: Sequence[int], size: tuple[int, int], scale: float, keep_aspect_ratio: bool) -> Crop:
    """Draw a random crop of an image of shape (H, W) for an output of `size` (h, w).

    At `scale` 1, the image is resized as in the image processor: with `keep_aspect_ratio`, the shorter side of the
    image gets the length of the shorter side of `size`; otherwise, the image gets the height and width of `size`.
    """
    zooms = [length / old for length, old in zip(size, shape, strict=True)]
    if keep_aspect_ratio:  # scale by the shorter side, as an image processor with `shortest_edge` does
        zooms = [min(size) / min(shape)] * 2
    rows, columns = (_draw_span(*lengths) for lengths in zip(shape, size, zooms, [scale] * 2, strict=True))
    return Crop(rows, columns, size)


def _draw_span(old: int, new: int, zoom: float, scale: float) -> Span:
    new_length = min(new, max(1, round(old * zoom * scale)))
    length = min(old, max(1, round(new_length / (zoom * scale))))
    start, new_start = (int(torch.randint(spare + 1, ())) for spare in (old - length, new - new_length))
    return Span(start, length, new_start, new_length)


def crop_matrix(box: Tensor, size: tuple[int, int], padding: float) -> Tensor:
    """Return the affine matrix (2, 3) float64 that maps an image to the crop of a box (4,), as in the image processor.

    The crop is `padding` times as wide and as high as the box, which is x1, y1, x2, y2 in pixels.
    """
    [region] = crop_regions(box[None], size, padding)  # (4,)
    span = region[2:] - region[:2]
    if not (torch.isfinite(span) & (span > 0)).all():
        raise ValueError(f"The box {box.tolist()} has no area. Boxes must be x1, y1, x2, y2 with x1 < x2 and y1 < y2.")
    scale = torch.tensor((size[1] - 1, size[0] - 1), dtype=torch.float64) / span
    return torch.cat((scale.diag(), (-scale * region[:2])[:, None]), dim=1)


def invert_matrix(matrix: Tensor) -> Tensor:
    """Return the inverse (2, 3) of an affine matrix (2, 3)."""
    linear = torch.linalg.inv(matrix[:, :2])
    return torch.cat((linear, -linear @ matrix[:, 2:]), dim=1)


def apply_matrix(points: Tensor, matrix: Tensor) -> Tensor:
    """Apply an affine matrix (2, 3) to points (..., 2), given as x and y in pixels, and keep their dtype."""
    return (points.to(matrix.dtype) @ matrix[:, :2].T + matrix[:, 2]).to(points.dtype)


def crop_keypoints(keypoints: Tensor, matrix: Tensor, size: tuple[int, int]) -> Tensor:
    """Map keypoints (K, 3) to a crop by an affine matrix (2, 3). Unlabeled keypoints and those outside become 0."""
    return zero_keypoints_outside(torch.cat((apply_matrix(keypoints[:, :2], matrix), keypoints[:, 2:]), dim=1), size)


def warp(image: Tensor, matrix: Tensor, size: tuple[int, int]) -> Tensor:
    """Apply an affine matrix (2, 3) to an image (C, H, W), uint8 or float32; return the crop (C, h, w).

    Interpolation is bilinear without antialiasing, with black outside the image, as in the image processor.
    """
    inverse = invert_matrix(matrix)
    rows, columns = (torch.arange(length, dtype=torch.float64) for length in size)
    # Image coordinates x and y of each pixel of the crop, both (h, w).
    x, y = (a * columns + (b * rows + c)[:, None] for a, b, c in inverse.tolist())
    return sample_pixels(image, x, y)
