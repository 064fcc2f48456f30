"""Truth and prediction beside each image, with a legend of classes."""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from .colors import IGNORED
from .figures import COLUMN_WIDTH, MAX_ROWS, Picture, as_picture, picture_rows, save, show


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar("T")

PATCH_WIDTH, LETTER_WIDTH = 0.5, 0.075  # inches in a legend


def truth_and_prediction(
    targets: Sequence[Any] | None, predictions: Sequence[Any], prepare: Callable[[Any], T]
) -> dict[str, list[T]]:
    """Returns what is drawn beside the first `MAX_ROWS` images, under the title of its column."""
    columns = {} if targets is None else {"truth": targets}
    return {
        title: [prepare(value) for value in column[:MAX_ROWS]]
        for title, column in {**columns, "prediction": predictions}.items()
    }


def draw_comparison(
    images: Sequence[Picture],
    columns: Mapping[str, Sequence[T]],
    draw: Callable[["Axes", np.ndarray, T], None],
    legend: "Legend",
    file: str | os.PathLike[str],
) -> None:
    """Draws a row for each of the first `MAX_ROWS` images: the image, then the columns.

    Args:
        images: N images of any sizes.
        columns: What is drawn for each image, under its title.
        draw: Fills a panel; takes the panel, the image (H, W, 3) and what the column holds for it.
        legend: The legend below.
        file: Where to save the picture; the suffix is the format.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if there is no image, or a column has not as many entries as there are images.
    """
    pictures = [as_picture(image) for image in images[:MAX_ROWS]]
    widths = [1.0] * (1 + len(columns))
    figure, panels = picture_rows(pictures, ["image", *columns], widths, legend.lines(COLUMN_WIDTH * len(widths)))
    for row, picture, *values in zip(panels, pictures, *columns.values(), strict=True):
        show(row[0], picture)
        for panel, value in zip(row[1:], values, strict=True):
            draw(panel, picture, value)
    legend.draw(figure)
    save(figure, file)


class Legend:
    """Names of those classes that occur in a figure, beside their colors."""

    def __init__(self, labels: Iterable[int], names: Sequence[str], palette: np.ndarray) -> None:
        """Chooses the entries.

        Args:
            labels: Class numbers, in any order; those that are none of the K classes stand for what is ignored.
            names: The K class names.
            palette: (K, 3) uint8.
        """
        found = set(labels)
        known = [label for label in range(len(names)) if label in found]
        self.entries = [(names[label], tuple(palette[label] / 255)) for label in known]
        if len(known) < len(found):
            self.entries.append(("ignored", tuple(np.array(IGNORED) / 255)))

    def lines(self, width: float) -> int:
        """Returns how many lines it takes in a figure of a width in inches."""
        return math.ceil(len(self.entries) / self._columns(width))

    def draw(self, figure: "Figure") -> None:
        """Puts the legend at the bottom of a figure."""
        from matplotlib.patches import Patch  # here, as training needs this package but not always a picture

        patches = [Patch(facecolor=color, label=name) for name, color in self.entries]
        columns = self._columns(figure.get_figwidth())
        legend = figure.legend(handles=patches, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)
        for text in legend.get_texts():
            text.set_parse_math(False)  # a class may be called "$5_$", which is no formula

    def _columns(self, width: float) -> int:
        """Returns how many entries fit beside each other."""
        longest = max((len(name) for name, _ in self.entries), default=1)
        return max(1, min(int(width / (PATCH_WIDTH + LETTER_WIDTH * longest)), len(self.entries)))
