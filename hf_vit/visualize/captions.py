"""Captions beside images."""

import os
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .figures import MAX_ROWS, Picture, as_picture, picture_rows, save, show


if TYPE_CHECKING:
    from matplotlib.axes import Axes


NUM_CAPTIONS = 3  # more have no room beside a wide image
TEXT_WIDTH = 1.5  # of a column, to that of an image
LETTERS = 70  # in a line
RIGHT, WRONG = "forestgreen", "firebrick"


def draw_captions(
    images: Sequence[Picture],
    captions: Sequence[Sequence[str]],
    found: Sequence[Sequence[str]],
    file: str | os.PathLike[str],
) -> None:
    """Draws a row for each of the first `MAX_ROWS` images: the image, its captions, and those that were found for it.

    Of both, the first `NUM_CAPTIONS` are shown. What was found is green where it is one of the image's own, else red.

    Args:
        images: N images of any sizes.
        captions: Those of each image.
        found: What a model finds for each image, the best first.
        file: Where to save the picture; the suffix is the format.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if there is no image.
    """
    pictures = [as_picture(image) for image in images[:MAX_ROWS]]
    titles = ["image", "its captions", "captions that are found for it"]
    figure, panels = picture_rows(pictures, titles, [1.0, TEXT_WIDTH, TEXT_WIDTH])
    for row, picture, own, other in zip(panels, pictures, captions[:MAX_ROWS], found[:MAX_ROWS], strict=True):
        show(row[0], picture)
        _write(row[1], own, ["black"] * len(own))
        _write(row[2], other, [RIGHT if caption in own else WRONG for caption in other])
    save(figure, file)


def _write(panel: "Axes", texts: Sequence[str], colors: Sequence[str]) -> None:
    """Writes texts of two lines at most below each other."""
    panel.set_axis_off()
    for place, (text, color) in enumerate(zip(texts[:NUM_CAPTIONS], colors, strict=False)):
        lines = textwrap.fill(textwrap.shorten(text, 2 * LETTERS - 10, placeholder=" ..."), LETTERS)
        drawn = panel.text(0, 1 - place / NUM_CAPTIONS, lines, transform=panel.transAxes, va="top", color=color)
        drawn.set_fontsize(8)
        drawn.set_parse_math(False)  # a caption may hold "$5_$", which is no formula
        drawn.set_in_layout(False)  # a long one would make its panel narrow
