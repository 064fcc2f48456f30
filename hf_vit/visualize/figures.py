"""Figures with rows of images, targets and predictions, image grids, and text labels.

In all modules of figures, a `Picture` is a PIL image, an array (H, W, 3) or a tensor (C, H, W) of uint8, of any size.
The suffix of an output file determines the format.
"""

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

MAX_SIDE = 1600  # Maximum side of a figure in pixels.
MAX_ROWS = 8  # Maximum number of images in a figure; fewer if images are tall.
COLUMN_WIDTH = 3.0  # Width of a column in inches.
MAX_ASPECT = 1.4  # Maximum ratio of height to width of a row.
# Height of a line, width of a color patch and width of a letter in legends, in inches.
LEGEND_LINE, LEGEND_PATCH, LEGEND_LETTER = 0.22, 0.5, 0.075
RESOLUTION = 120  # Resolution of figures in pixels per inch.
MAX_HEIGHT = 12.5  # Maximum height of all rows in inches, without title and legend.
MIN_SIDE = 480  # Minimum longer side in pixels; smaller images are enlarged for text.
LINE_SHARE = 1 / 220  # Line width relative to the longer side of the image.
TILE_SIZE, TILE_TEXT_HEIGHT = 128, 40  # Size of label tiles in pixels.
TEXT_HEIGHT, TEXT_SIZE = 20, 13  # Size of text lines in pixels.
LEAST_SIZE = 7  # Minimum readable font size in pixels.


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure of a size in inches; raise `ImportError` if matplotlib is not installed."""
    check_packages("A diagram", "matplotlib")
    from matplotlib.figure import Figure  # Imported here because matplotlib is optional

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: "Figure", file: PictureFile) -> None:
    """Write a figure to a file and limit its size. The suffix determines the format; file objects receive PNG data."""
    figure.set_dpi(min(RESOLUTION, MAX_SIDE / max(figure.get_size_inches())))
    if isinstance(file, str | os.PathLike):
        figure.savefig(file)
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # Imported here because matplotlib is optional

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()  # `draw` is used instead of `savefig`, which draws the figure twice.
    Image.fromarray(np.asarray(canvas.buffer_rgba())).save(file, "PNG", compress_level=1)  # Level 1 compresses fastest


def as_picture(image: Picture) -> np.ndarray:
    """Convert an array (H, W, C) or tensor (C, H, W) of uint8, C = 1 or 3, or a PIL image to (H, W, 3) uint8."""
    if isinstance(image, Image.Image):
        return np.asarray(image.convert("RGB"))
    array = image.movedim(0, -1).numpy(force=True) if isinstance(image, torch.Tensor) else image
    if array.ndim != 3 or array.shape[-1] not in (1, 3) or array.dtype != np.uint8:
        raise ValueError(
            f"An image to draw must be a PIL image, an array (H, W, 3) or a tensor (C, H, W) of uint8, not "
            f"{type(image).__name__} {tuple(image.shape)} of {image.dtype}."
        )
    return np.broadcast_to(array, (*array.shape[:2], 3))


def check_size(picture: np.ndarray, values: np.ndarray, name: str) -> None:
    """Raise `ValueError` if a picture (H, W, 3) and values (..., H, W) to draw over it differ in size."""
    if picture.shape[:2] != values.shape[-2:]:
        sizes = ["x".join(map(str, size)) for size in (picture.shape[:2], values.shape[-2:])]
        raise ValueError(
            f"The image has the size {sizes[0]} (height x width), but its {name} has {sizes[1]}. Resize it to the "
            "image size, for example with target_sizes in post-processing."
        )


def row_height(picture: np.ndarray) -> float:
    """Return the height in inches of the figure row that shows a picture (H, W, 3)."""
    return COLUMN_WIDTH * min(picture.shape[0] / picture.shape[1], MAX_ASPECT)


def select_pictures(images: Sequence[Picture]) -> list[np.ndarray]:
    """Return the first images that fit into a figure, as pictures (H, W, 3)."""
    pictures = [as_picture(image) for image in images[:MAX_ROWS]]
    fitting = np.cumsum([row_height(picture) for picture in pictures]) <= MAX_HEIGHT
    return pictures[: max(1, int(fitting.sum()))]


def picture_rows(
    pictures: Sequence[np.ndarray], titles: Sequence[str], widths: Sequence[float], legend_lines: int = 0
) -> tuple["Figure", np.ndarray]:
    """Return a figure with one row per picture (H, W, 3), and its empty panels (rows, columns).

    `widths` are column widths relative to a picture. `legend_lines` reserves lines of text at the bottom.
    """
    if not pictures:
        raise ValueError("There is no image to draw. Give at least one image.")
    heights = [row_height(picture) for picture in pictures]
    width, height = COLUMN_WIDTH * sum(widths), sum(heights) + 0.3 + LEGEND_LINE * legend_lines
    figure = new_figure(width, height)
    figure.set_layout_engine("constrained", w_pad=0.02, h_pad=0.02, wspace=0.01, hspace=0.01)
    panels = figure.subplots(len(pictures), len(titles), squeeze=False, width_ratios=widths, height_ratios=heights)
    for panel, title in zip(panels[0], titles, strict=True):
        panel.set_title(title, fontsize=10, parse_math=False)  # "$" must not start a formula
    return figure, panels


def show(panel: "Axes", picture: np.ndarray) -> None:
    """Draw a picture (H, W, 3) without a frame."""
    panel.imshow(picture)
    panel.set_anchor("S")  # Leave free space above for the title, which would otherwise be cut off
    panel.set_axis_off()
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_visible(False)  # Invisible ticks would still displace the title


def draw_rows(rows: Sequence[Sequence[np.ndarray]], titles: Sequence[str], file: PictureFile) -> None:
    """Draw rows of pictures (H, W, 3), the image first; raise `ValueError` if there is no row."""
    figure, panels = picture_rows(select_pictures([row[0] for row in rows]), titles, [1.0] * len(titles))
    for panel, picture in zip(panels.flat, chain.from_iterable(rows), strict=False):
        show(panel, picture)
    save(figure, file)


class Objects(NamedTuple):
    """Objects of an image: boxes or masks (N, ...), class numbers (N,), and scores (N,), which are NaN if unknown."""

    shapes: np.ndarray
    labels: np.ndarray
    scores: np.ndarray

    @classmethod
    def of(cls, result: Mapping[str, Any], name: str, dtype: DTypeLike, threshold: float) -> "Objects":
        """Return all objects of a target, or the objects of a prediction whose score is at least `threshold`.

        `name` is the key of the boxes or masks in `result`, and `dtype` is their data type.
        """
        labels = as_array(result["class_labels"], np.int64)
        scores = as_array(result.get("scores", np.full(len(labels), np.nan)), np.float64)
        kept = np.isnan(scores) | (scores >= threshold)
        return cls(as_array(result[name], dtype)[kept], labels[kept], scores[kept])

    def texts(self, names: Sequence[str]) -> list[str]:
        """Return the class name of each object, followed by its score if there is one."""
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
    """Draw a row for each of the first images: the image, its target (if known), and its prediction.

    Args:
        images: Images, of which at most `MAX_ROWS` are drawn.
        predictions: Prediction for each image.
        targets: Target of each image; None if targets are unknown.
        draw: Function that draws a target or prediction into a panel, given the panel and the image (H, W, 3).
        file: Output file.
        names: The K class names. The legend shows the classes that occur.
        labels_of: Function that returns the class numbers in a target or prediction.

    Raises:
        ValueError: if there is no image, or an image and its target or prediction differ in size.
    """
    check_packages("A diagram", "matplotlib")
    from matplotlib.patches import Patch  # Imported here because matplotlib is optional

    pictures, palette = select_pictures(images), segmentation_palette(len(names))
    columns = {"truth": targets, "prediction": predictions}
    values = {title: column[: len(pictures)] for title, column in columns.items() if column is not None}
    found = {label for column in values.values() for own in column for label in np.unique(labels_of(own)).tolist()}
    entries = [(names[label], palette[label] / 255) for label in range(len(names)) if label in found]
    if len(entries) < len(found):  # Some labels, such as 255, are not classes
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
    """Add a legend to a diagram or a figure; names such as "$5_$" are not drawn as formulas."""
    legend = place.legend(frameon=False, fontsize=8, **options)
    for text in legend.get_texts():
        text.set_parse_math(False)


def enlarge_small_image(image: Picture) -> tuple[Image.Image, float]:
    """Return an image as RGB, enlarged to at least `MIN_SIDE` pixels on its longer side, and the scale factor."""
    picture = Image.fromarray(as_picture(image))
    scale = max(1.0, MIN_SIDE / max(picture.size))
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    return picture.resize(size, Image.Resampling.BICUBIC), scale


def line_width(picture: Image.Image) -> int:
    """Return the line width in pixels for a picture."""
    return round(LINE_SHARE * max(picture.size))


def draw_text(line: str, color: str = "gray") -> Image.Image:
    """Return a picture of a line of text."""
    font = ImageFont.load_default(TEXT_SIZE)
    picture = Image.new("RGB", (max(1, math.ceil(font.getlength(line))), TEXT_HEIGHT), "white")
    ImageDraw.Draw(picture).text((0, 2), line, color, font)
    return picture


def draw_label_tile(image: Image.Image, label: str, caption: str) -> Image.Image:
    """Return a tile with an image above a label and a caption. Small images are enlarged without smoothing."""
    method = Image.Resampling.NEAREST if max(image.size) < TILE_SIZE else Image.Resampling.LANCZOS
    tile = Image.new("RGB", (TILE_SIZE, TILE_SIZE + TILE_TEXT_HEIGHT), "white")
    tile.paste(ImageOps.pad(image, (TILE_SIZE, TILE_SIZE), method, "white"))
    pen = ImageDraw.Draw(tile)
    for line, top, color, size in ((label, 3, "black", 14), (caption, 21, "gray", 10)):
        line, font = fit_line(line, TILE_SIZE, size)
        pen.text((0, TILE_SIZE + top), line, color, font)
    return tile


def fit_line(line: str, width: float, size: float) -> tuple[str, Font]:
    """Return a line and the font of PIL at a size, reduced so that the line is at most `width` pixels wide.

    If the font would be too small to read, the middle of the line is omitted.
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
    """Arrange pictures of any sizes in grids on pages that fit on a screen, see `arrange_tiles`."""
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
    """Arrange pictures of any sizes in a grid on white, with a margin in pixels around each."""
    columns = min(columns, len(tiles))  # the last page may have fewer tiles than columns
    rows = [tiles[start : start + columns] for start in range(0, len(tiles), columns)]
    widths = [max(tile.width for tile in tiles[column::columns]) + margin for column in range(columns)]
    heights = [max(tile.height for tile in row) + margin for row in rows]
    canvas = Image.new("RGB", (sum(widths) + margin, sum(heights) + margin), "white")
    for number, tile in enumerate(tiles):
        row, column = divmod(number, columns)
        canvas.paste(tile, (margin + sum(widths[:column]), margin + sum(heights[:row])))
    return canvas
