"""A random crop of an image at a random scale, or where it is smaller a frame around it.

Shapes: C channels, H W pixels, h w pixels of the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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
        """Returns where places of the old one are in the new one, in pixels from the edge."""
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
        """Returns the part of (..., H, W) that is taken."""
        rows, columns = (slice(span.start, span.start + span.length) for span in (self.rows, self.columns))
        return image[..., rows, columns]

    def place(self, inner: Tensor, outside: float) -> Tensor:
        """Returns (..., h, w) with the resized part at its place, and `outside` elsewhere."""
        if self.inner == self.size:
            return inner
        frame = inner.new_full((*inner.shape[:-2], *self.size), outside)
        rows, columns = (slice(span.new_start, span.new_stop) for span in (self.rows, self.columns))
        frame[..., rows, columns] = inner
        return frame

    def take_image(self, image: Tensor, outside: float) -> Tensor:
        """Returns (C, h, w) of an image (C, H, W), resized smoothly."""
        from torchvision.transforms.v2 import functional  # here, as all else in the package does without torchvision

        return self.place(functional.resize(self.cut(image), list(self.inner), antialias=True), outside)


def draw_crop(shape: Sequence[int], size: tuple[int, int], scale: float, keep_aspect_ratio: bool) -> Crop:
    """Draws where a crop lies from torch's default generator.

    Args:
        shape: Height H and width W of the image in pixels.
        size: Height h and width w of the result in pixels.
        scale: At 1 the image is as large as an image processor makes it.
        keep_aspect_ratio: Whether its shorter side is then that of the result, or else both sides are.
    """
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
