"""Values in colours, and a bar that says which."""

from typing import TYPE_CHECKING

import numpy as np

from .palette import IGNORED


if TYPE_CHECKING:
    from matplotlib.axes import Axes


BAR_COLUMN = 0.28  # of a picture: the bar, its numbers and what they are
BAR_WIDTH = 0.2  # of that column
OUTLIERS = 1  # per cent of the values, at either end, that do not stretch the colours


def span_of(values: np.ndarray) -> tuple[float, float]:
    """Returns the lowest and the highest of values (N,), without outliers; 0 and 1 where there are none."""
    if not len(values):
        return 0.0, 1.0
    lowest, highest = np.percentile(values, [OUTLIERS, 100 - OUTLIERS])
    return float(lowest), float(highest)


def in_colours(values: np.ndarray, valid: np.ndarray, span: tuple[float, float], colours: str) -> np.ndarray:
    """Returns values in colours.

    Args:
        values: (H, W).
        valid: (H, W) bool; where it is False, the colour is grey.
        span: The values of the first and the last colour.
        colours: Name of a colour map of matplotlib.

    Returns:
        (H, W, 3) uint8.
    """
    from matplotlib import colormaps  # here, as training needs this package but not always a picture

    lowest, highest = span
    above = np.where(valid, values, lowest) - lowest
    shares = above / (highest - lowest) if highest > lowest else np.zeros_like(above)
    picture = colormaps[colours](shares.clip(0, 1), bytes=True)[..., :3]
    return np.where(valid[..., None], picture, np.array(IGNORED, dtype=np.uint8))


def draw_bar(
    panel: "Axes", span: tuple[float, float], colours: str, label: str, ticks: dict[float, str] | None = None
) -> None:
    """Draws the colours of a span of values at the left of a panel."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    panel.set_axis_off()
    inset = panel.inset_axes((0, 0, BAR_WIDTH, 1))
    bar = panel.figure.colorbar(ScalarMappable(Normalize(*span), colours), cax=inset)
    bar.set_label(label, fontsize=8)
    bar.ax.tick_params(labelsize=8)
    if ticks is not None:
        bar.set_ticks(list(ticks), labels=list(ticks.values()))
