"""Colors of classes and of values."""

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
LIGHTNESS_WEIGHT = 0.5  # a difference in lightness is half lost in an image's own light and shade
DARKEST, LIGHTEST = 0.5, 0.92  # beyond, a color over an image looks like shadow or light
# How linear RGB looks without the receptors for red and for green (Machado et al. 2009)
DEFICIENCIES = (
    ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
)
# Oklab (Ottosson 2020), whose distances are perceived differences
RGB_TO_LMS = (
    (0.4122214708, 0.5363325363, 0.0514459929),
    (0.2119034982, 0.6806995451, 0.1073969566),
    (0.0883024619, 0.2817188376, 0.6299787005),
)
LMS_TO_LAB = (
    (0.2104542553, 0.7936177850, -0.0040720468),
    (1.9779984951, -2.4285922050, 0.4505937099),
    (0.0259040371, 0.7827717662, -0.8086757660),
)


@cache
def segmentation_palette(num_labels: int) -> np.ndarray:
    """Return a color per class. The colors of fewer classes are the first ones of more classes.

    The first six are those of Okabe and Ito. Each of the others is the one that looks most different from those before
    it, from gray, black and white, on average over normal, red-blind and green-blind eyes.

    Args:
        num_labels: Number of classes.

    Returns:
        (num_labels, 3) uint8, red, green and blue; read-only.
    """
    levels = np.linspace(0, 255, 18).round()
    candidates = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), axis=-1).reshape(-1, 3)
    lightness = _as_seen(candidates)[0, :, 0]
    candidates = candidates[(lightness > DARKEST) & (lightness < LIGHTEST)]
    chosen, seen = [*FIRST], _as_seen(candidates)
    taken = _as_seen(np.array([IGNORED, (0, 0, 0), (255, 255, 255), *FIRST], dtype=float))
    nearest = np.min([_difference(seen, color) for color in taken.swapaxes(0, 1)], axis=0)
    while len(chosen) < num_labels:
        best = int(nearest.argmax())
        chosen.append(tuple(candidates[best]))
        nearest = np.minimum(nearest, _difference(seen, seen[:, best]))
    palette = np.array(chosen[:num_labels], dtype=np.uint8).reshape(-1, 3)
    palette.flags.writeable = False
    return palette


def _as_seen(colors: np.ndarray) -> np.ndarray:
    """Return sRGB colors (N, 3) in Oklab as normal, red-blind and green-blind eyes see them, (3, N, 3)."""
    shares = colors / 255
    linear = np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)
    views = np.stack([linear, *(linear @ np.array(matrix).T for matrix in DEFICIENCIES)]).clip(0, 1)
    return np.cbrt(views @ np.array(RGB_TO_LMS).T) @ np.array(LMS_TO_LAB).T


def _difference(seen: np.ndarray, color: np.ndarray) -> np.ndarray:
    """Return how different colors (3, N, 3) look from one (3, 3), on average over the eyes, (N,)."""
    return np.linalg.norm((seen - color[:, None]) * (LIGHTNESS_WEIGHT, 1, 1), axis=-1).mean(axis=0)


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
