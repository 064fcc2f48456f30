"""Values of patches over the image that they are of."""

import os
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor

from ..evaluation.base import as_array
from .colors import BAR_COLUMN, draw_bar, in_colors, span_of
from .figures import Picture, as_picture, large_enough, picture_rows, save, show
from .patches import Patch


if TYPE_CHECKING:
    from matplotlib.axes import Axes


HEAT_COLORS = "inferno"
OPACITY = 0.65
MARK_SIZE = 9  # of letters, in points: the cross in the patch that is meant


def overlay_heat(image: Picture, values: ArrayLike | Tensor, opacity: float = OPACITY) -> np.ndarray:
    """Lays values of patches over an image, the highest bright.

    Args:
        image: PIL image, (H, W, 3) array or (C, H, W) tensor of uint8, that the model saw as a whole at any size.
        values: (h, w), whose lowest and highest, but for outliers, are the ends of the colors.
        opacity: 0 shows the image alone, 1 the colors alone.

    Returns:
        (H, W, 3) uint8. A small image is enlarged, so that the patches can be told apart.
    """
    picture = np.asarray(large_enough(image)[0])
    heat = as_array(values, np.float64)
    height, width = picture.shape[:2]
    smooth = F.interpolate(torch.from_numpy(heat)[None, None], (height, width), mode="bilinear")[0, 0].numpy()
    colors = in_colors(smooth, np.isfinite(smooth), span_of(heat.ravel()), HEAT_COLORS)
    return ((1 - opacity) * picture + opacity * colors).round().astype(np.uint8)


def draw_heat(
    image: Picture,
    values: ArrayLike | Tensor,
    title: str,
    file: str | os.PathLike[str],
    patch: Patch | None = None,
) -> None:
    """Draws an image, values of its patches over it, and a bar that says which color is what.

    Args:
        image: See `overlay_heat`.
        values: (h, w).
        title: What they are.
        file: Where to save the picture; the suffix is the format.
        patch: Row and column of the patch that they are about, to be marked; None where there is none.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    heat = as_array(values, np.float64)
    figure, (panels,) = picture_rows([as_picture(image)], ["image", title, ""], [1.0, 1.0, BAR_COLUMN])
    show(panels[0], np.asarray(large_enough(image)[0]))
    show(panels[1], overlay_heat(image, heat))
    draw_bar(panels[2], span_of(heat.ravel()), HEAT_COLORS, "")
    if patch is not None:
        mark(panels[0], patch, heat.shape)
        mark(panels[1], patch, heat.shape)
    save(figure, file)


def mark(panel: "Axes", patch: Patch, grid: tuple[int, ...]) -> None:
    """Marks a patch of a grid by a cross in a panel that shows the whole image."""
    x, y = ((number + 0.5) / count for number, count in zip(reversed(patch), reversed(grid), strict=True))
    for color, width in (("black", 3.0), ("white", 1.2)):  # to be seen on light and on dark
        panel.plot(x, 1 - y, "+", color=color, markersize=MARK_SIZE, mew=width, transform=panel.transAxes)
