"""Figures, pictures beside and below each other, and pictures of images with truth and prediction."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, DTypeLike
from PIL import Image, ImageDraw, ImageFont, ImageOps

from ..evaluation.base import as_array
from ..extras import check_packages
from .colors import IGNORED, segmentation_palette


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = ArrayLike | torch.Tensor
Picture = Image.Image | np.ndarray | torch.Tensor
PictureFile = str | os.PathLike[str] | IO[bytes]
T = TypeVar("T")
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

MAX_SIDE = 1600  # pixels: larger pictures fit no screen
MAX_ROWS = 8  # images in one figure, fewer of high ones; more would be too small or too long
COLUMN_WIDTH = 3.0  # inches
MAX_ASPECT = 1.4  # height of a row to its width, for portraits
LEGEND_LINE, LEGEND_PATCH, LEGEND_LETTER = 0.22, 0.5, 0.075  # inches
RESOLUTION = 120  # pixels per inch
MAX_HEIGHT = 12.5  # inches of all rows of a figure, beside a title and a legend
MIN_SIDE = 480  # pixels: the longer side of a smaller image has no room for letters
LINE_SHARE = 1 / 220  # of the longer side, so that lines can be seen at any size
TILE_SIZE, TILE_TEXT_HEIGHT = 128, 40  # pixels
TEXT_HEIGHT, TEXT_SIZE = 20, 13  # pixels
LEAST_SIZE = 7  # pixels of letters that can be read


def new_figure(width: float, height: float) -> "Figure":
    """Returns an empty figure of a size in inches; raises `ImportError` if matplotlib is not installed."""
    check_packages("A diagram", "matplotlib")
    from matplotlib.figure import Figure  # here, as training needs this package but not always a picture

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: "Figure", file: PictureFile) -> None:
    """Writes a figure, no larger than a screen; the suffix of the file is the format, in memory PNG."""
    figure.set_dpi(min(RESOLUTION, MAX_SIDE / max(figure.get_size_inches())))
    if isinstance(file, str | os.PathLike):
        figure.savefig(file)
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # here, as in `new_figure`

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()  # once: savefig draws everything twice, the first time for the layout
    Image.fromarray(np.asarray(canvas.buffer_rgba())).save(file, "PNG", compress_level=1)  # it is read right away


def as_picture(image: Picture) -> np.ndarray:
    """Returns an array (H, W, C) or a tensor (C, H, W) of uint8, C = 1 or 3, or a PIL image as (H, W, 3) uint8."""
    if isinstance(image, Image.Image):
        return np.asarray(image.convert("RGB"))
    array = image.movedim(0, -1).numpy(force=True) if isinstance(image, torch.Tensor) else image
    if array.ndim != 3 or array.shape[-1] not in (1, 3) or array.dtype != np.uint8:
        raise ValueError(
            f"An image to draw on is a PIL image, an array (H, W, 3) or a tensor (C, H, W) of uint8, not "
            f"{type(image).__name__} {tuple(image.shape)} of {image.dtype}."
        )
    return np.broadcast_to(array, (*array.shape[:2], 3))


def check_size(picture: np.ndarray, values: np.ndarray, name: str) -> None:
    """Raises `ValueError` if a picture (H, W, 3) and values (..., H, W) to draw over it differ in size."""
    if picture.shape[:2] != values.shape[-2:]:
        sizes = ["x".join(map(str, size)) for size in (picture.shape[:2], values.shape[-2:])]
        raise ValueError(
            f"The image is of size {sizes[0]} (height x width), its {name} of {sizes[1]}. Bring it to the image's "
            "size, with target_sizes in post-processing."
        )


def row_height(picture: np.ndarray) -> float:
    """Returns the height in inches of the row of a picture (H, W, 3)."""
    return COLUMN_WIDTH * min(picture.shape[0] / picture.shape[1], MAX_ASPECT)


def first_rows(images: Sequence[Picture]) -> list[np.ndarray]:
    """Returns as many of the first images as a figure has room for, as pictures (H, W, 3)."""
    pictures = [as_picture(image) for image in images[:MAX_ROWS]]
    fitting = np.cumsum([row_height(picture) for picture in pictures]) <= MAX_HEIGHT
    return pictures[: max(1, int(fitting.sum()))]


def picture_rows(
    pictures: Sequence[np.ndarray], titles: Sequence[str], widths: Sequence[float], legend_lines: int = 0
) -> tuple["Figure", np.ndarray]:
    """Returns a figure with a row for each picture (H, W, 3), and its empty panels (rows, columns).

    The width of a column with a picture is 1; `legend_lines` of text have room at the bottom.
    """
    if not pictures:
        raise ValueError("There is no image to draw.")
    heights = [row_height(picture) for picture in pictures]
    width, height = COLUMN_WIDTH * sum(widths), sum(heights) + 0.3 + LEGEND_LINE * legend_lines
    figure = new_figure(width, height)
    figure.set_layout_engine("constrained", w_pad=0.02, h_pad=0.02, wspace=0.01, hspace=0.01)
    panels = figure.subplots(len(pictures), len(titles), squeeze=False, width_ratios=widths, height_ratios=heights)
    for panel, title in zip(panels[0], titles, strict=True):
        panel.set_title(title, fontsize=10, parse_math=False)  # a class may be called "$5_$", which is no formula
    return figure, panels


def show(panel: "Axes", picture: np.ndarray) -> None:
    """Draws a picture (H, W, 3) without a frame."""
    panel.imshow(picture)
    panel.set_anchor("S")  # room that is left over is the title's, which is cut off otherwise
    panel.set_axis_off()
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_visible(False)  # else the title looks for room above ticks that are not drawn


def draw_rows(rows: Sequence[Sequence[np.ndarray]], titles: Sequence[str], file: PictureFile) -> None:
    """Draws rows of pictures (H, W, 3), the image first; raises `ValueError` if there is none."""
    figure, panels = picture_rows(first_rows([row[0] for row in rows]), titles, [1.0] * len(titles))
    for panel, picture in zip(panels.flat, chain.from_iterable(rows), strict=False):
        show(panel, picture)
    save(figure, file)


class Objects(NamedTuple):
    """What is in an image: boxes or masks (N, ...), class numbers (N,) and scores (N,), NaN if there are none."""

    shapes: np.ndarray
    labels: np.ndarray
    scores: np.ndarray

    @classmethod
    def of(cls, result: Mapping[str, Any], name: str, dtype: DTypeLike, threshold: float) -> "Objects":
        """Returns the objects of a target, or those of a prediction whose score is at least a threshold.

        `name` is that of the shapes in `result`, `dtype` their type.
        """
        labels = as_array(result["class_labels"], np.int64)
        scores = as_array(result.get("scores", np.full(len(labels), np.nan)), np.float64)
        kept = np.isnan(scores) | (scores >= threshold)
        return cls(as_array(result[name], dtype)[kept], labels[kept], scores[kept])

    def texts(self, names: Sequence[str]) -> list[str]:
        """Returns the name of the class of each object, with its score if there is one."""
        pairs = zip(self.labels.tolist(), self.scores.tolist(), strict=True)
        return [names[label] if math.isnan(score) else f"{names[label]} {score:.2f}" for label, score in pairs]


def draw_comparison(
    images: Sequence[Picture],
    predictions: Sequence[T],
    targets: Sequence[T] | None,
    draw: Callable[["Axes", np.ndarray, T], None],
    file: PictureFile,
    names: Sequence[str] = (),
    labels_of: Callable[[T], np.ndarray] = lambda value: np.zeros(0, np.int64),
) -> None:
    """Draws a row for each of the first images: itself, then a panel for its target, if known, and its prediction.

    `draw` fills a panel, given the panel, the image (H, W, 3) and the value. The legend shows the class numbers that
    `labels_of` finds in the values, by their `names`. Raises `ValueError` if there is no image.
    """
    check_packages("A diagram", "matplotlib")
    from matplotlib.patches import Patch  # here, as training needs this package but not always a picture

    pictures, palette = first_rows(images), segmentation_palette(len(names))
    columns = {"truth": targets, "prediction": predictions}
    values = {title: column[: len(pictures)] for title, column in columns.items() if column is not None}
    found = {label for column in values.values() for own in column for label in np.unique(labels_of(own)).tolist()}
    entries = [(names[label], palette[label] / 255) for label in range(len(names)) if label in found]
    if len(entries) < len(found):  # labels beyond the classes
        entries.append(("ignored", np.array(IGNORED) / 255))
    widths, longest = [1.0] * (1 + len(values)), max((len(name) for name, _ in entries), default=1)
    beside = int(COLUMN_WIDTH * len(widths) / (LEGEND_PATCH + LEGEND_LETTER * longest))
    beside = max(1, min(beside, len(entries)))
    figure, panels = picture_rows(pictures, ["image", *values], widths, math.ceil(len(entries) / beside))
    for row, picture, *own in zip(panels, pictures, *values.values(), strict=False):
        show(row[0], picture)
        for panel, value in zip(row[1:], own, strict=True):
            draw(panel, picture, value)
    patches = [Patch(facecolor=tuple(color), label=name) for name, color in entries]
    add_legend(figure, handles=patches, loc="outside lower center", ncols=beside)
    save(figure, file)


def add_legend(place: "Axes | Figure", **options: Any) -> None:
    """Adds a legend to a diagram or a figure; names such as "$5_$" are not read as formulas."""
    legend = place.legend(frameon=False, fontsize=8, **options)
    for text in legend.get_texts():
        text.set_parse_math(False)


def large_enough(image: Picture) -> tuple[Image.Image, float]:
    """Returns an image as an RGB image of at least `MIN_SIDE` pixels, and the factor of its size."""
    picture = Image.fromarray(as_picture(image))
    scale = max(1.0, MIN_SIDE / max(picture.size))
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    return picture.resize(size, Image.Resampling.BICUBIC), scale


def line_width(picture: Image.Image) -> int:
    """Returns the width of lines in pixels."""
    return round(LINE_SHARE * max(picture.size))


def draw_text(line: str, color: str = "gray") -> Image.Image:
    """Returns a line of text."""
    font = ImageFont.load_default(TEXT_SIZE)
    picture = Image.new("RGB", (max(1, math.ceil(font.getlength(line))), TEXT_HEIGHT), "white")
    ImageDraw.Draw(picture).text((0, 2), line, color, font)
    return picture


def draw_label_tile(image: Image.Image, label: str, caption: str) -> Image.Image:
    """Returns an image above its label and a caption, all in `TILE_SIZE` pixels; small images keep their pixels."""
    method = Image.Resampling.NEAREST if max(image.size) < TILE_SIZE else Image.Resampling.LANCZOS
    tile = Image.new("RGB", (TILE_SIZE, TILE_SIZE + TILE_TEXT_HEIGHT), "white")
    tile.paste(ImageOps.pad(image, (TILE_SIZE, TILE_SIZE), method, "white"))
    pen = ImageDraw.Draw(tile)
    for line, top, color, size in ((label, 3, "black", 14), (caption, 21, "gray", 10)):
        line, font = fit_line(line, TILE_SIZE, size)
        pen.text((0, TILE_SIZE + top), line, color, font)
    return tile


def fit_line(line: str, width: float, size: float) -> tuple[str, Font]:
    """Returns a line, and PIL's own font of a size or smaller, so that it is no wider than `width` pixels.

    Where letters would be too small to read, the middle of the line is left out.
    """
    font = ImageFont.load_default(size)
    while size > LEAST_SIZE and font.getlength(line) > width:
        size = max(LEAST_SIZE, size - 1)
        font = ImageFont.load_default(size)
    while len(line) > 1 and font.getlength(line) > width:
        middle = len(line) // 2
        line = f"{line[: middle - 1]}…{line[middle + 1 :]}" if len(line) > 2 else "…"
    return line, font


def arrange_pages(tiles: Sequence[Image.Image], margin: int = 8) -> list[Image.Image]:
    """Arrange pictures of any sizes as `arrange_tiles` does, on pages that fit a screen."""
    if not tiles:
        return []
    room = MAX_SIDE - margin
    for tile in tiles:
        tile.thumbnail((room - margin, room - margin))
    columns, rows = (room // (max(tile.size[axis] for tile in tiles) + margin) for axis in (0, 1))
    columns = min(columns, max(5, math.ceil(math.sqrt(len(tiles)))))
    starts = range(0, len(tiles), columns * rows)
    return [arrange_tiles(tiles[start : start + columns * rows], columns, margin) for start in starts]


def arrange_tiles(tiles: Sequence[Image.Image], columns: int, margin: int = 8) -> Image.Image:
    """Returns pictures of any sizes in rows, on white, with a margin in pixels around each."""
    columns = min(columns, len(tiles))  # a page may have fewer tiles than the one before it has columns
    rows = [tiles[start : start + columns] for start in range(0, len(tiles), columns)]
    widths = [max(tile.width for tile in tiles[column::columns]) + margin for column in range(columns)]
    heights = [max(tile.height for tile in row) + margin for row in rows]
    canvas = Image.new("RGB", (sum(widths) + margin, sum(heights) + margin), "white")
    for number, tile in enumerate(tiles):
        row, column = divmod(number, columns)
        canvas.paste(tile, (margin + sum(widths[:column]), margin + sum(heights[:row])))
    return canvas
