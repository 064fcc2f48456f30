"""Canvases, empty figures, and rows of pictures with titles."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image, ImageFont


MIN_SIDE = 480  # pixels: the longer side of a smaller image has no room for letters
LETTER_SHARE, LINE_SHARE = 1 / 30, 1 / 220  # of the longer side, so that they can be read however it is shown
BRIGHT = 140  # level of gray from which black can be read better than white
GRAY = np.array([0.299, 0.587, 0.114])  # how bright red, green and blue are
Picture = Image.Image | np.ndarray | torch.Tensor


def large_enough(image: Picture) -> tuple[Image.Image, float]:
    """Returns an image as an RGB image of at least `MIN_SIDE` pixels, and how much larger it has become."""
    picture = Image.fromarray(as_picture(image))
    scale = max(1.0, MIN_SIDE / max(picture.size))
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    return picture.resize(size, Image.Resampling.BICUBIC), scale


def line_width(picture: Image.Image) -> int:
    """Returns the width of lines in pixels."""
    return round(LINE_SHARE * max(picture.size))


def font_for(picture: Image.Image) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Returns PIL's own font, as large as the picture needs it."""
    return ImageFont.load_default(LETTER_SHARE * max(picture.size))


def readable_on(color: np.ndarray) -> str:
    """Returns black or white, for letters on a color (3,)."""
    return "black" if color @ GRAY > BRIGHT else "white"


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MAX_ROWS = 8  # images in one picture; more would be too small or too long
COLUMN_WIDTH = 3.0  # inches
MAX_ASPECT = 1.4  # height of a row to its width, for portraits
LEGEND_LINE = 0.22  # inches
RESOLUTION = 150  # pixels per inch


def new_figure(width: float, height: float) -> "Figure":
    """Returns an empty figure of a size in inches.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # here, as training needs this package but not always a picture
    except ImportError as error:
        raise ImportError('Diagrams need matplotlib. Install it: pip install "hf-vit[train]".') from error
    return Figure(figsize=(width, height), layout="constrained")


def as_picture(image: Picture) -> np.ndarray:
    """Returns a PIL image, an array (H, W, 3) or a tensor (C, H, W), with C = 1 or 3, as (H, W, 3) uint8.

    Raises:
        ValueError: if the image has another shape, or an array or tensor is not uint8.
    """
    if isinstance(image, Image.Image):
        return np.asarray(image.convert("RGB"))
    array = image.movedim(0, -1).numpy(force=True) if isinstance(image, torch.Tensor) else image
    if array.ndim != 3 or array.shape[-1] not in (1, 3) or array.dtype != np.uint8:
        raise ValueError(
            f"An image to draw on is a PIL image, an array (H, W, 3) or a tensor (C, H, W) of uint8, not "
            f"{type(image).__name__} {tuple(image.shape)} of {image.dtype}."
        )
    return np.broadcast_to(array, (*array.shape[:2], 3))


def check_size(picture: np.ndarray, values: np.ndarray, what: str) -> None:
    """Compares the size of a picture (H, W, 3) with that of what is drawn over or beside it, (..., H, W).

    Raises:
        ValueError: if they differ.
    """
    if picture.shape[:2] != values.shape[-2:]:
        sizes = ["x".join(map(str, size)) for size in (picture.shape[:2], values.shape[-2:])]
        raise ValueError(
            f"The image is of size {sizes[0]} (height x width), its {what} of {sizes[1]}. Bring it to the image's "
            "size, with target_sizes in post-processing."
        )


def picture_rows(
    pictures: Sequence[np.ndarray], titles: Sequence[str], widths: Sequence[float], legend_lines: int = 0
) -> tuple["Figure", np.ndarray]:
    """Returns a figure with a row of empty panels for each picture.

    Args:
        pictures: The first picture (H, W, 3) of each row, which says how high the row is.
        titles: Of each column.
        widths: Of each column, 1 for a picture.
        legend_lines: How many lines of text to leave room for at the bottom.

    Returns:
        The figure and its panels, (rows, columns).

    Raises:
        ValueError: if there is no picture.
    """
    if not pictures:
        raise ValueError("There is no image to draw.")
    aspects = [min(picture.shape[0] / picture.shape[1], MAX_ASPECT) for picture in pictures]
    width, height = COLUMN_WIDTH * sum(widths), COLUMN_WIDTH * sum(aspects) + 0.3 + LEGEND_LINE * legend_lines
    figure = new_figure(width, height)
    figure.set_layout_engine("constrained", w_pad=0.02, h_pad=0.02, wspace=0.01, hspace=0.01)
    panels = figure.subplots(len(pictures), len(titles), squeeze=False, width_ratios=widths, height_ratios=aspects)
    for panel, title in zip(panels[0], titles, strict=True):
        panel.set_title(title, fontsize=10, parse_math=False)  # a class may be called "$5_$", which is no formula
    return figure, panels


def show(panel: "Axes", picture: np.ndarray) -> None:
    """Draws a picture (H, W, 3) without a frame."""
    panel.imshow(picture)
    panel.set_anchor("S")  # room that is left over is the title's, which is cut off otherwise
    panel.set_axis_off()


def save(figure: "Figure", file: str | os.PathLike[str]) -> None:
    """Writes a figure; the suffix of the file is the format."""
    figure.savefig(file, dpi=RESOLUTION)
