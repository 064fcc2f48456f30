"""Colors of classes, and color maps of values."""

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np


if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
else:
    Axes = Any  # matplotlib is imported only by functions that draw

BAR_COLUMN = 0.28  # Width of the column of a color bar with its labels, relative to a picture.
BAR_WIDTH = 0.2  # Width of the color bar, relative to its column.
OUTLIERS = 1  # Percentage of values clipped at each end of the color range.
IGNORED = (128, 128, 128)  # Color of pixels without a class.
# Palette of Okabe and Ito (https://jfly.uni-koeln.de/color) without black and sky blue
FIRST = ((0, 114, 178), (230, 159, 0), (0, 158, 115), (213, 94, 0), (240, 228, 66), (204, 121, 167))
LIGHTNESS_WEIGHT = 0.5  # Weight of lightness in color differences; low, because image shading hides lightness.
DARKEST, LIGHTEST = 0.5, 0.92  # Limits of the lightness: darker or lighter colors look like shadow or light.
# Matrices in linear RGB that simulate the color vision deficiencies protanopia and deuteranopia (Machado et al. 2009).
DEFICIENCIES = (
    ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
)
# Matrices of the conversion to Oklab (Ottosson 2020), a color space in which distances are perceived differences.
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
    """Return a color per class. Palettes of different sizes share their first colors.

    The first six colors are from Okabe and Ito. Each further color is the one that differs most from all previous
    colors, gray, black and white, averaged over normal vision, protanopia and deuteranopia.

    Args:
        num_labels: Number of classes.

    Returns:
        (num_labels, 3) uint8 RGB colors; read-only.
    """
    levels = np.linspace(0, 255, 18).round()
    candidates = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), axis=-1).reshape(-1, 3)
    lightness = _to_oklab_views(candidates)[0, :, 0]
    candidates = candidates[(lightness > DARKEST) & (lightness < LIGHTEST)]
    chosen, seen = [*FIRST], _to_oklab_views(candidates)
    taken = _to_oklab_views(np.array([IGNORED, (0, 0, 0), (255, 255, 255), *FIRST], dtype=float))
    nearest = np.min([_difference(seen, color) for color in taken.swapaxes(0, 1)], axis=0)
    while len(chosen) < num_labels:
        best = int(nearest.argmax())
        chosen.append(tuple(candidates[best]))
        nearest = np.minimum(nearest, _difference(seen, seen[:, best]))
    palette = np.array(chosen[:num_labels], dtype=np.uint8).reshape(-1, 3)
    palette.flags.writeable = False
    return palette


def _to_oklab_views(colors: np.ndarray) -> np.ndarray:
    """Convert sRGB colors (N, 3) to Oklab for normal vision, protanopia and deuteranopia, (3, N, 3)."""
    shares = colors / 255
    linear = np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)
    views = np.stack([linear, *(linear @ np.array(matrix).T for matrix in DEFICIENCIES)]).clip(0, 1)
    return np.cbrt(views @ np.array(RGB_TO_LMS).T) @ np.array(LMS_TO_LAB).T


def _difference(seen: np.ndarray, color: np.ndarray) -> np.ndarray:
    """Return the difference (N,) of colors (3, N, 3) from one color (3, 3), averaged over the types of vision."""
    return np.linalg.norm((seen - color[:, None]) * (LIGHTNESS_WEIGHT, 1, 1), axis=-1).mean(axis=0)


def value_range(values: np.ndarray) -> tuple[float, float]:
    """Return the minimum and maximum of values (N,) without outliers; 0 and 1 if there are no values."""
    if not len(values):
        return 0.0, 1.0
    lowest, highest = np.percentile(values, [OUTLIERS, 100 - OUTLIERS])
    return float(lowest), float(highest)


def apply_color_map(values: np.ndarray, valid: np.ndarray, span: tuple[float, float], colors: str) -> np.ndarray:
    """Map values (H, W) in the range `span` to RGB colors (H, W, 3) uint8; invalid pixels become gray."""
    from matplotlib import colormaps  # Imported here because matplotlib is optional

    lowest, highest = span
    above = np.where(valid, values, lowest) - lowest
    shares = above / (highest - lowest) if highest > lowest else np.zeros_like(above)
    picture = colormaps[colors](shares.clip(0, 1), bytes=True)[..., :3]
    return np.where(valid[..., None], picture, np.array(IGNORED, dtype=np.uint8))


def draw_bar(
    panel: Axes, span: tuple[float, float], colors: str, label: str, ticks: dict[float, str] | None = None
) -> None:
    """Draw a color bar for a range of values at the left of a panel."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    panel.set_axis_off()
    inset = panel.inset_axes((0, 0, BAR_WIDTH, 1))
    bar = panel.figure.colorbar(ScalarMappable(Normalize(*span), colors), cax=inset)
    bar.set_label(label, fontsize=8)
    bar.ax.tick_params(labelsize=8)
    if ticks is not None:
        bar.set_ticks(list(ticks), labels=list(ticks.values()))
