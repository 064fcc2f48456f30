"""Many small maps beside each other: attention heads, position similarities, patch filters.

Shapes: R C rows and columns of maps, h w of each.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor

from ..evaluation.base import as_array
from ..model.pretrained import HfViTPreTrainedModel
from .colors import Axes
from .features import principal_components
from .figures import COLUMN_WIDTH, MAX_ASPECT, Picture, PictureFile, as_picture, large_enough, new_figure, save, show
from .patches import HEAT_COLORS, Patch, mark_patch


MAP_WIDTH = 0.75  # inches
MAX_POSITIONS = 14  # rows and columns of position embeddings; more would be too small
FILTERS_BESIDE = 7  # as in the paper


@torch.no_grad()
def position_similarity(model: HfViTPreTrainedModel) -> Tensor:
    """Returns the similarity of the position embeddings of all patches, at the native size of the model.

    Args:
        model: A model with a table of positions, learned or fixed; rotary ones beside it have no part in this.

    Returns:
        (h, w, h, w) cosines, from -1 to 1: of a row and column with every row and column.

    Raises:
        ValueError: if it has no table.

    Source: figure 7 of https://arxiv.org/abs/2010.11929.
    """
    table = model.get_position_embeddings()
    if table is None:
        raise ValueError(
            f"A model with position_embedding_type={model.config.position_embedding_type!r} adds no positions to its "
            "patches, so there are none to compare. Those of 'learned', 'sincos2d' and 'learned+rotary' do."
        )
    table = table.to(torch.promote_types(table.dtype, torch.float32))
    directions = F.normalize(table[0, model.config.num_prefix_positions :], dim=-1)  # (N, D)
    grid = model.config.grid_size
    return (directions @ directions.T).unflatten(1, grid).unflatten(0, grid)


@torch.no_grad()
def patch_filters(model: HfViTPreTrainedModel, count: int = 28) -> Tensor:
    """Returns the principal components of the kernels of the patch embedding.

    Args:
        model: A model of any task.
        count: How many of them; there are no more than the model has kernels, or a patch has pixels and channels.

    Returns:
        (count, height of a patch, its width, C) float64, the most important first; each of length 1, its sign chance.

    Source: figure 7 of https://arxiv.org/abs/2010.11929.
    """
    kernels = model.base_model.embeddings.patch_embeddings.projection.weight.movedim(1, -1)  # (D, p, q, C)
    components, _ = principal_components(kernels.flatten(1), count)
    return components.unflatten(1, kernels.shape[1:])


def mosaic(maps: np.ndarray) -> np.ndarray:
    """Puts maps (R, C, h, w), maybe with channels (R, C, h, w, K), into rows and columns with gaps of NaN, float64."""
    gaps = [(0, 0), (0, 0), (0, 1), (0, 1), (0, 0)][: maps.ndim]
    framed = np.pad(maps.astype(np.float64), gaps, constant_values=np.nan).swapaxes(1, 2)  # (R, h + 1, C, w + 1)
    rows, height, columns, width = framed.shape[:4]
    return framed.reshape(rows * height, columns * width, *maps.shape[4:])[:-1, :-1]


def draw_attention(image: Picture, maps: ArrayLike | Tensor, file: PictureFile, patch: Patch | None = None) -> None:
    """Draws an image beside the attention of each layer (a row) and head (a column), in its own span of colors.

    Args:
        image: PIL image, (H, W, 3) array or (C, H, W) tensor of uint8, that the model saw as a whole at any size.
        maps: (layers, heads, h, w), from `attention_maps`.
        file: Where to save the picture; the suffix is the format.
        patch: Row and column of the patch that attends, to be marked; None where none does.
    """
    values = as_array(maps, np.float64)
    layers, heads, *grid = values.shape
    highest = values.max(axis=(2, 3), keepdims=True)
    lowest = values.min(axis=(2, 3), keepdims=True)
    shares = (values - lowest) / np.maximum(highest - lowest, np.finfo(np.float64).tiny)
    height, width = as_picture(image).shape[:2]
    map_height = MAP_WIDTH * min(height / width, MAX_ASPECT)
    figure_height = max(layers * map_height, COLUMN_WIDTH * height / width) + 0.6
    figure = new_figure(COLUMN_WIDTH + heads * MAP_WIDTH + 0.4, figure_height)
    panels = figure.subplots(1, 2, width_ratios=[COLUMN_WIDTH, heads * MAP_WIDTH])
    show(panels[0], np.asarray(large_enough(image)[0]))
    panels[0].set_anchor("N")
    if patch is not None:
        mark_patch(panels[0], patch, tuple(grid))
    # Cells are as high as those of the image, also where patches are not square.
    aspect = height / grid[0] / (width / grid[1])
    panels[1].imshow(mosaic(shares), cmap=HEAT_COLORS, aspect=aspect)
    panels[1].set(xlabel="head", ylabel="layer")
    _number(panels[1], (range(1, layers + 1), range(1, heads + 1)), (grid[0], grid[1]))
    save(figure, file)


def draw_position_similarity(similarity: ArrayLike | Tensor, file: PictureFile) -> None:
    """Draws, at the place of each position, its similarity to all others.

    Args:
        similarity: (h, w, h, w), from `position_similarity`. Of many rows or columns, evenly spread ones are drawn.
        file: Where to save the picture; the suffix is the format.
    """
    values = as_array(similarity, np.float64)
    rows, columns = (np.linspace(0, n - 1, min(n, MAX_POSITIONS)).round().astype(int) for n in values.shape[:2])
    figure = new_figure(len(columns) * MAP_WIDTH * 0.8 + 1, len(rows) * MAP_WIDTH * 0.8 + 0.6)
    axes = figure.subplots()
    drawn = axes.imshow(mosaic(values[np.ix_(rows, columns)]), cmap="viridis")
    axes.set(xlabel="column of the patch", ylabel="row of the patch")
    _number(axes, (rows + 1, columns + 1), values.shape[2:])
    figure.colorbar(drawn, shrink=0.6).set_label("cosine similarity", fontsize=8)
    save(figure, file)


def _number(axes: Axes, numbers: Sequence[Iterable[int]], size: Sequence[int]) -> None:
    """Numbers the rows and columns of a mosaic of maps of a size (h, w)."""
    for axis, own, length in zip((axes.yaxis, axes.xaxis), numbers, size, strict=True):
        labels = [str(number) for number in own]
        axis.set_ticks(np.arange(len(labels)) * (length + 1) + length / 2, labels, fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def draw_patch_filters(filters: ArrayLike | Tensor, file: PictureFile) -> None:
    """Draws filters in rows, the most important first; gray is 0.

    Args:
        filters: (count, height, width, C), from `patch_filters`; those of neither 1 nor 3 channels show their first.
        file: Where to save the picture; the suffix is the format.
    """
    values = as_array(filters, np.float64)
    values = values if values.shape[-1] == 3 else np.repeat(values[..., :1], 3, axis=-1)
    strongest = np.abs(values).max(axis=(1, 2, 3), keepdims=True)
    colors = 0.5 + 0.5 * values / np.maximum(strongest, np.finfo(np.float64).tiny)
    missing = -len(colors) % FILTERS_BESIDE
    colors = np.pad(colors, [(0, missing), (0, 0), (0, 0), (0, 0)], constant_values=1.0)
    picture = mosaic(colors.reshape(-1, FILTERS_BESIDE, *colors.shape[1:]))
    figure = new_figure(FILTERS_BESIDE * MAP_WIDTH, len(colors) // FILTERS_BESIDE * MAP_WIDTH + 0.2)
    show(figure.subplots(), np.nan_to_num(picture, nan=1.0))
    save(figure, file)
