"""Patches of an image: which one is meant, and how many there are.

Shapes: B batch, C channels, H W pixels, h w patch grid, N = h·w.
"""

import torch
from torch import Tensor

from ..model.configuration_hf_vit import to_pair
from ..model.embeddings import Grid, image_grids
from ..model.pretrained import HfViTPreTrainedModel


Patch = tuple[int, int]  # row and column


def patch_at(point: tuple[float, float], image_size: tuple[int, int], grid: Grid) -> Patch:
    """Returns row and column of the patch under a point of an image that the model saw as a whole.

    Args:
        point: x and y in pixels of the image, from its upper left corner.
        image_size: Height and width of the image, which may be another than that of what the model saw.
        grid: Rows and columns (h, w) of patches.

    Raises:
        ValueError: if the point lies outside the image.
    """
    (x, y), (height, width) = point, image_size
    if not (0 <= x < width and 0 <= y < height):
        raise ValueError(f"The point {x:g},{y:g} (x, y) lies outside an image of {width} x {height} pixels.")
    return int(y * grid[0] / height), int(x * grid[1] / width)


def number_of(patch: Patch, grid: Grid) -> int:
    """Returns the number of a patch, counted row by row.

    Raises:
        ValueError: if it lies outside the grid.
    """
    row, column = patch
    if not (0 <= row < grid[0] and 0 <= column < grid[1]):
        raise ValueError(
            f"There is no patch {patch} (row, column) in a grid of {grid[0]} x {grid[1]}. Let patch_at find the one "
            "under a point."
        )
    return row * grid[1] + column


def patch_distances(grid: Grid, patch_size: tuple[int, int]) -> Tensor:
    """Returns how far the centers of all patches lie apart, in pixels.

    Args:
        grid: Rows and columns (h, w) of patches.
        patch_size: Height and width of a patch in pixels.

    Returns:
        (N, N) float64.
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


def patch_size_of(model: HfViTPreTrainedModel) -> tuple[int, int]:
    """Returns height and width of a model's patches in pixels."""
    return to_pair(model.config.patch_size)


def check_evaluates(model: HfViTPreTrainedModel) -> None:
    """Raises `ValueError` if the model is in training mode."""
    if model.training:
        raise ValueError("In training mode chance has a part in the result (dropout). Call model.eval() before.")
