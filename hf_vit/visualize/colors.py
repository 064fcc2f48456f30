"""Colors of classes and of values."""

from colorsys import hsv_to_rgb
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np


if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
else:
    Axes = Any  # matplotlib is imported where something is drawn

BAR_COLUMN = 0.28  # of a picture: the bar, its numbers and its label
BAR_WIDTH = 0.2  # of that column
OUTLIERS = 1  # per cent of the values, at either end, that do not stretch the colors
IGNORED = (128, 128, 128)  # of pixels that belong to no class
# Okabe and Ito's (https://jfly.uni-koeln.de/color) without black and the lighter of the two blues
FIRST = ((0, 114, 178), (230, 159, 0), (0, 158, 115), (213, 94, 0), (240, 228, 66), (204, 121, 167))
GOLDEN_RATIO = 0.618034  # steps of it around the circle of hues never come close to an earlier one
FIRST_HUE, SATURATIONS, VALUES = 0.55, (1.0, 0.5), (1.0, 0.5, 0.75)


@cache
def segmentation_palette(num_labels: int) -> np.ndarray:
    """Return a color per class. The colors of fewer classes are the first ones of more classes.

    The first six are those of Okabe and Ito, which people with a color-vision deficiency can tell apart. The others
    differ in hue, saturation and value.

    Args:
        num_labels: Number of classes.

    Returns:
        (num_labels, 3) uint8, red, green and blue; read-only.
    """
    others = [
        hsv_to_rgb((FIRST_HUE + GOLDEN_RATIO * number) % 1, SATURATIONS[number % 2], VALUES[number % 3])
        for number in range(num_labels - len(FIRST))
    ]
    palette = np.array([*FIRST, *(255 * np.array(others)).round()][:num_labels], dtype=np.uint8).reshape(-1, 3)
    palette.flags.writeable = False
    return palette


def span_of(values: np.ndarray) -> tuple[float, float]:
    """Returns the lowest and the highest of values (N,), without outliers; 0 and 1 where there are none."""
    if not len(values):
        return 0.0, 1.0
    lowest, highest = np.percentile(values, [OUTLIERS, 100 - OUTLIERS])
    return float(lowest), float(highest)


def in_colors(values: np.ndarray, valid: np.ndarray, span: tuple[float, float], colors: str) -> np.ndarray:
    """Returns values (H, W) in a color map with the ends `span`, (H, W, 3) uint8; gray where not `valid` (H, W)."""
    from matplotlib import colormaps  # here, as training needs this package but not always a picture

    lowest, highest = span
    above = np.where(valid, values, lowest) - lowest
    shares = above / (highest - lowest) if highest > lowest else np.zeros_like(above)
    picture = colormaps[colors](shares.clip(0, 1), bytes=True)[..., :3]
    return np.where(valid[..., None], picture, np.array(IGNORED, dtype=np.uint8))


def draw_bar(
    panel: Axes, span: tuple[float, float], colors: str, label: str, ticks: dict[float, str] | None = None
) -> None:
    """Draws the colors of a span of values at the left of a panel."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    panel.set_axis_off()
    inset = panel.inset_axes((0, 0, BAR_WIDTH, 1))
    bar = panel.figure.colorbar(ScalarMappable(Normalize(*span), colors), cax=inset)
    bar.set_label(label, fontsize=8)
    bar.ax.tick_params(labelsize=8)
    if ticks is not None:
        bar.set_ticks(list(ticks), labels=list(ticks.values()))
