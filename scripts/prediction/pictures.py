"""Pictures beside and below each other, with captions, legends and scales."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps


MARGIN, PANEL_SIZE, LINE, FONT_SIZE = 8, 400, 20, 13  # pixels
BAR_WIDTH = 18
MIN_LABELED = 0.01  # share of a picture that is large enough to bear a label


def font(size: int = FONT_SIZE) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Returns PIL's own font."""
    return ImageFont.load_default(size)


def width_of(line: str) -> int:
    """Returns the width of a line in pixels."""
    return math.ceil(font().getlength(line))


def fit(image: Image.Image) -> Image.Image:
    """Returns an image with its longer side as long as that of all panels; small ones keep their pixels."""
    method = Image.Resampling.NEAREST if max(image.size) < PANEL_SIZE else Image.Resampling.LANCZOS
    return ImageOps.contain(image, (PANEL_SIZE, PANEL_SIZE), method)


def arrange(pictures: Sequence[Image.Image], columns: int) -> Image.Image:
    """Returns pictures of any sizes in rows, on white, with a margin between them."""
    rows = [pictures[start : start + columns] for start in range(0, len(pictures), columns)]
    widths = [max(picture.width for picture in pictures[column::columns]) for column in range(columns)]
    heights = [max(picture.height for picture in row) for row in rows]
    size = (sum(widths) + MARGIN * (columns - 1), sum(heights) + MARGIN * (len(rows) - 1))
    canvas = Image.new("RGB", size, "white")
    top = 0
    for row, height in zip(rows, heights, strict=True):
        left = 0
        for picture, width in zip(row, widths, strict=False):
            canvas.paste(picture, (left, top))
            left += width + MARGIN
        top += height + MARGIN
    return canvas


def text(line: str, color: str = "black") -> Image.Image:
    """Returns a line of text."""
    picture = Image.new("RGB", (max(1, width_of(line)), LINE), "white")
    ImageDraw.Draw(picture).text((0, 2), line, color, font())
    return picture


def legend(colors: Mapping[str, tuple[int, int, int]], width: int) -> Image.Image:
    """Returns names beside their colors, in lines no wider than `width` pixels where that is possible."""
    step = LINE + max((width_of(name) for name in colors), default=0) + 2 * MARGIN
    columns = max(1, min(width // step, len(colors)))
    entries = []
    for name, color in colors.items():
        entry = Image.new("RGB", (step, LINE), "white")
        entry.paste(color, (0, 3, LINE - 6, LINE - 3))
        entry.paste(text(name), (LINE, 0))
        entries.append(entry)
    return arrange(entries, columns) if entries else text("nothing found")


def bar(colors: Image.Image, ticks: Sequence[str]) -> Image.Image:
    """Returns a strip of colors beside what they stand for, evenly spread from its top to its bottom."""
    picture = Image.new("RGB", (BAR_WIDTH + 6 + max(map(width_of, ticks)), colors.height), "white")
    picture.paste(colors.resize((BAR_WIDTH, colors.height)))
    for number, tick in enumerate(ticks):
        top = number * (colors.height - LINE) // (len(ticks) - 1)
        picture.paste(text(tick), (BAR_WIDTH + 6, top))
    return picture


def label(picture: Image.Image, mask: Image.Image, line: str) -> None:
    """Writes into a picture, at the pixel of a mask that is nearest to its middle, if there is room."""
    rows, columns = np.nonzero(np.asarray(mask))
    if len(rows) < MIN_LABELED * picture.width * picture.height:
        return
    nearest = np.argmin((rows - rows.mean()) ** 2 + (columns - columns.mean()) ** 2)
    width, height = width_of(line) + 6, LINE - 2
    left = min(max(0, int(columns[nearest]) - width // 2), max(0, picture.width - width))
    top = min(max(0, int(rows[nearest]) - height // 2), picture.height - height)
    background = picture.crop((left, top, left + width, top + height)).point(lambda level: level // 3)
    picture.paste(background, (left, top))
    ImageDraw.Draw(picture).text((left + 3, top + 1), line, "white", font())
