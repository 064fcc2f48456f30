"""Figures of image-text retrieval, reconstructions of masked images, and augmented views."""

import textwrap
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .colors import IGNORED, Axes
from .figures import MAX_ROWS, Picture, PictureFile, as_picture, draw_rows, picture_rows, save, select_pictures, show


Levels = float | Sequence[float]  # One value for all channels, or one per channel

NUM_CAPTIONS = 3  # Maximum number of captions next to an image.
TEXT_WIDTH = 1.5  # Width of a text column relative to an image column.
LETTERS = 70  # Maximum number of letters per line of text.
RIGHT, WRONG = "forestgreen", "firebrick"


def draw_captions(
    images: Sequence[Picture],
    captions: Sequence[Sequence[str]],
    found: Sequence[Sequence[str]],
    file: PictureFile,
    are_retrieved: bool = True,
) -> None:
    """Draw each image next to its captions, and to the captions `found` by a model, best first.

    At most `NUM_CAPTIONS` captions are shown per column. If the captions in `found` are retrieved instead of
    generated, they are green if they belong to the image, else red. Raises `ValueError` if there is no image.
    """
    pictures = select_pictures(images)
    titles = ["image", "its captions", f"{'captions retrieved' if are_retrieved else 'caption generated'} for it"]
    figure, panels = picture_rows(pictures, titles, [1.0, TEXT_WIDTH, TEXT_WIDTH])
    for row, picture, own, other in zip(panels, pictures, captions, found, strict=False):
        show(row[0], picture)
        _write(row[1], own, ["black"] * len(own))
        colors = [RIGHT if caption in own else WRONG for caption in other] if are_retrieved else ["black"]
        _write(row[2], other, colors)
    save(figure, file)


def _write(panel: Axes, texts: Sequence[str], colors: Sequence[str]) -> None:
    """Write texts one below the other, each in at most two lines."""
    panel.set_axis_off()
    for place, (text, color) in enumerate(zip(texts[:NUM_CAPTIONS], colors, strict=False)):
        lines = textwrap.fill(textwrap.shorten(text, 2 * LETTERS - 10, placeholder=" ..."), LETTERS)
        drawn = panel.text(0, 1 - place / NUM_CAPTIONS, lines, transform=panel.transAxes, va="top", color=color)
        drawn.set_fontsize(8)
        drawn.set_parse_math(False)  # Captions may contain "$", which must not start a formula.
        drawn.set_in_layout(False)  # Long captions would make the panel narrow.


def draw_reconstructions(
    pixel_values: Sequence[Tensor],
    masks: Sequence[Tensor],
    reconstructions: Sequence[Tensor],
    mean: Levels,
    std: Levels,
    file: PictureFile,
) -> None:
    """Draw each image next to its visible patches, and to the image with its masked patches reconstructed.

    Args:
        pixel_values: Normalized images (C, H, W). If C is neither 1 nor 3, only the first channel is drawn.
        masks: Masks (h, w), True for masked patches.
        reconstructions: Images (C, H, W), normalized like `pixel_values`.
        mean: Mean that the image processor subtracts from values in [0, 1]; one number or one per channel.
        std: Standard deviation by which the image processor divides; one number or one per channel.
        file: Output file.

    Raises:
        ValueError: if there is no image.
    """
    rows = []
    for pixels, mask, reconstruction in list(zip(pixel_values, masks, reconstructions, strict=True))[:MAX_ROWS]:
        masked = F.interpolate(mask[None, None].float(), size=pixels.shape[-2:])[0, 0].bool().numpy(force=True)
        image, filled = to_picture(pixels, mean, std), to_picture(reconstruction, mean, std)
        hidden = np.where(masked[..., None], np.array(IGNORED, dtype=np.uint8), image)
        rows.append((image, hidden, np.where(masked[..., None], filled, image)))
    draw_rows(rows, ["image", "visible patches", "reconstruction"], file)


def draw_views(
    views: Sequence[Sequence[Tensor]],
    mean: Levels,
    std: Levels,
    file: PictureFile,
    titles: Sequence[str] | None = None,
) -> None:
    """Draw a row for each image: normalized pictures (C, H, W) of any sizes, the image before its views.

    The columns have the given `titles`, by default "image", "view 1", "view 2" and so on. For the other arguments and
    the errors, see `draw_reconstructions`.
    """
    rows = [[to_picture(view, mean, std) for view in row] for row in views[:MAX_ROWS]]
    numbered = ["image", *(f"view {number}" for number in range(1, len(views[0]) if views else 1))]
    draw_rows(rows, list(titles or numbered), file)


def to_picture(pixels: Tensor, mean: Levels, std: Levels) -> np.ndarray:
    """Convert a normalized image (C, H, W) to colors (H, W, 3) uint8."""
    shift, scale = (torch.as_tensor(values).to(pixels.device).reshape(-1, 1, 1) for values in (mean, std))
    colors = ((pixels.float() * scale + shift) * 255).round().clamp(0, 255).to(torch.uint8)
    return as_picture(colors if len(colors) in (1, 3) else colors[:1])
