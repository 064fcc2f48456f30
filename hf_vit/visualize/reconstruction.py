"""What a model makes of masked images."""

import os
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .colors import IGNORED
from .figures import MAX_ROWS, as_picture, picture_rows, save, show


def draw_reconstructions(
    pixel_values: Sequence[Tensor],
    masks: Sequence[Tensor],
    reconstructions: Sequence[Tensor],
    mean: float | Sequence[float],
    std: float | Sequence[float],
    file: str | os.PathLike[str],
) -> None:
    """Draws a row for each of the first `MAX_ROWS` images: the image, what is left of it, and the reconstruction.

    Masked patches are gray in the second picture; in the third, the others are as they are in the image.

    Args:
        pixel_values: N normalized images (C, H, W); those of neither 1 nor 3 channels show their first one.
        masks: N masks (h, w), True where a patch is masked.
        reconstructions: N images (C, H, W) in the units of `pixel_values`.
        mean: What the image processor has subtracted from values in 0..1, one number or one for each channel.
        std: What it has divided by, in the same way.
        file: Where to save the picture; the suffix is the format.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if there is no image.
    """
    rows = []
    for pixels, mask, reconstruction in zip(
        pixel_values[:MAX_ROWS], masks[:MAX_ROWS], reconstructions[:MAX_ROWS], strict=True
    ):
        masked = F.interpolate(mask[None, None].float(), size=pixels.shape[-2:])[0, 0].bool().numpy(force=True)
        image, filled = to_picture(pixels, mean, std), to_picture(reconstruction, mean, std)
        hidden = np.where(masked[..., None], np.array(IGNORED, dtype=np.uint8), image)
        rows.append((image, hidden, np.where(masked[..., None], filled, image)))
    titles = ["image", "what the model sees", "reconstruction"]
    figure, panels = picture_rows([row[0] for row in rows], titles, [1.0] * len(titles))
    for panel_row, pictures in zip(panels, rows, strict=True):
        for panel, picture in zip(panel_row, pictures, strict=True):
            show(panel, picture)
    save(figure, file)


def to_picture(pixels: Tensor, mean: float | Sequence[float], std: float | Sequence[float]) -> np.ndarray:
    """Returns a normalized image (C, H, W) as colors (H, W, 3) uint8."""
    shift, scale = (torch.as_tensor(values).to(pixels.device).reshape(-1, 1, 1) for values in (mean, std))
    colors = ((pixels.float() * scale + shift) * 255).round().clamp(0, 255).to(torch.uint8)
    return as_picture(colors if len(colors) in (1, 3) else colors[:1])
