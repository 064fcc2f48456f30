"""Patches of an image: their numbers and distances, and heatmaps of their values.

Shapes: B batch, C channels, H W pixels, h w patch grid, N = h·w.
"""

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor

from ..evaluation.base import as_array
from ..model.embeddings import Grid, image_grids
from ..model.pretrained import HfViTPreTrainedModel
from .colors import BAR_COLUMN, Axes, draw_bar, in_colors, span_of
from .figures import Picture, PictureFile, as_picture, large_enough, picture_rows, save, show


Patch = tuple[int, int]  # row and column

HEAT_COLORS = "inferno"
OPACITY = 0.65
MARK_SIZE = 9  # of the cross in the marked patch, in points


def patch_at(point: tuple[float, float], image_size: tuple[int, int], grid: Grid) -> Patch:
    """Returns row and column of the patch under a point of an image that the model saw as a whole.

    Args:
        point: x and y in pixels of the image, from its upper left corner.
        image_size: Height and width of the image, which may differ from those of the model's input.
        grid: Rows and columns (h, w) of patches.

    Raises:
        ValueError: if the point lies outside the image.
    """
    (x, y), (height, width) = point, image_size
    if not (0 <= x < width and 0 <= y < height):
        raise ValueError(f"The point {x:g},{y:g} (x, y) lies outside an image of {width} x {height} pixels.")
    return int(y * grid[0] / height), int(x * grid[1] / width)


def number_of(patch: Patch, grid: Grid) -> int:
    """Returns the number of a patch, counted row by row; raises `ValueError` if it lies outside the grid."""
    row, column = patch
    if not (0 <= row < grid[0] and 0 <= column < grid[1]):
        raise ValueError(
            f"There is no patch {patch} (row, column) in a grid of {grid[0]} x {grid[1]}. Let patch_at find the one "
            "under a point."
        )
    return row * grid[1] + column


def patch_distances(grid: Grid, patch_size: tuple[int, int]) -> Tensor:
    """Returns the distances between the centers of all patches, (N, N) float64 in pixels.

    Args:
        grid: Rows and columns (h, w) of patches.
        patch_size: Height and width of a patch in pixels.
    """
    places = torch.cartesian_prod(*(torch.arange(count, dtype=torch.float64) for count in grid))  # (N, 2)
    steps = (places[:, None] - places) * torch.tensor(patch_size)  # (N, N, 2)
    return torch.linalg.vector_norm(steps, dim=-1)


def grids_of(model: HfViTPreTrainedModel, pixel_values: Tensor, patch_attention_mask: Tensor | None) -> list[Grid]:
    """Returns rows and columns of patches of each image, without padding."""
    if patch_attention_mask is not None:
        return image_grids(patch_attention_mask)
    grid: Grid = model.base_model.embeddings.patch_embeddings.grid(pixel_values)
    return [grid] * len(pixel_values)


def check_eval_mode(model: HfViTPreTrainedModel) -> None:
    """Raises `ValueError` if the model is in training mode."""
    if model.training:
        raise ValueError("In training mode chance has a part in the result (dropout). Call model.eval() before.")


def overlay_heat(image: Picture, values: ArrayLike | Tensor, opacity: float = OPACITY) -> np.ndarray:
    """Lays values of patches over an image as a heatmap, the highest bright.

    Args:
        image: PIL image, (H, W, 3) array or (C, H, W) tensor of uint8, that the model saw as a whole at any size.
        values: (h, w), whose lowest and highest, but for outliers, are the ends of the colors.
        opacity: 0 shows the image alone, 1 the colors alone.

    Returns:
        (H, W, 3) uint8. A small image is enlarged, so that the patches can be told apart.
    """
    picture = np.asarray(large_enough(image)[0])
    heat = as_array(values, np.float64)
    smooth = F.interpolate(torch.from_numpy(heat)[None, None], picture.shape[:2], mode="bilinear")[0, 0].numpy()
    colors = in_colors(smooth, np.isfinite(smooth), span_of(heat.ravel()), HEAT_COLORS)
    return ((1 - opacity) * picture + opacity * colors).round().astype(np.uint8)


def draw_heat(
    image: Picture, values: ArrayLike | Tensor, title: str, file: PictureFile, patch: Patch | None = None
) -> None:
    """Draws an image, a heatmap of its patches over it, and a color bar.

    Args:
        image: See `overlay_heat`.
        values: (h, w).
        title: What they are.
        file: Where to save the picture; the suffix is the format.
        patch: Row and column of the patch that they are about, to be marked; None where there is none.
    """
    heat = as_array(values, np.float64)
    figure, (panels,) = picture_rows([as_picture(image)], ["image", title, ""], [1.0, 1.0, BAR_COLUMN])
    show(panels[0], np.asarray(large_enough(image)[0]))
    show(panels[1], overlay_heat(image, heat))
    draw_bar(panels[2], span_of(heat.ravel()), HEAT_COLORS, "")
    if patch is not None:
        mark_patch(panels[0], patch, heat.shape)
        mark_patch(panels[1], patch, heat.shape)
    save(figure, file)


def mark_patch(panel: Axes, patch: Patch, grid: tuple[int, ...]) -> None:
    """Marks a patch of a grid by a cross in a panel that shows the whole image."""
    x, y = ((number + 0.5) / count for number, count in zip(reversed(patch), reversed(grid), strict=True))
    for color, width in (("black", 3.0), ("white", 1.2)):  # to be seen on light and on dark
        panel.plot(x, 1 - y, "+", color=color, markersize=MARK_SIZE, mew=width, transform=panel.transAxes)
