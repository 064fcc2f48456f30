"""How far patches look, by layer and head."""

import os

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from ..metrics.streamed import as_array
from .attention import Attention
from .figures import new_figure, save
from .patches import patch_distances


def attention_distances(attention: Attention) -> Tensor:
    """Returns how far patches look: the distance of what they look at, weighted by how much they do, as a mean.

    Looks at tokens that are no patches do not count. The model looks at images globally from the layer on whose heads
    reach about as far as `patch_distances(...).mean()`, which is that of a look at everything alike.

    Args:
        attention: Of one image.

    Returns:
        (layers, heads) in pixels of what the model saw.

    Source: figure 7 of https://arxiv.org/abs/2010.11929.
    """
    first, last = attention.num_prefix, attention.num_prefix + attention.grid[0] * attention.grid[1]
    weights = attention.weights[..., first:last, first:last]  # (layers, heads, N, N)
    distances = patch_distances(attention.grid, attention.patch_size).to(weights)
    total = weights.sum(dim=-1).clamp(min=torch.finfo(weights.dtype).tiny)  # all may go to a register
    return ((weights * distances).sum(dim=-1) / total).mean(dim=-1)


def draw_attention_distances(distances: ArrayLike | Tensor, everywhere: float, file: str | os.PathLike[str]) -> None:
    """Draws how far the heads of each layer look, and their mean as a line.

    Args:
        distances: (layers, heads) in pixels, from `attention_distances`, maybe the mean of many images.
        everywhere: The distance of a look at everything alike, drawn as a dashed line.
        file: Where to save the picture; the suffix is the format.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    values = as_array(distances, np.float64)
    layers = np.arange(1, len(values) + 1)
    figure = new_figure(6, 4)
    axes = figure.subplots()
    axes.scatter(layers.repeat(values.shape[1]), values.ravel(), s=16, alpha=0.7, linewidth=0, label="head")
    axes.plot(layers, values.mean(axis=1), color="black", linewidth=1.2, label="mean of the heads")
    axes.axhline(everywhere, color="grey", linestyle="--", linewidth=1, label="everywhere alike")
    axes.set(xlabel="layer", ylabel="mean attention distance in pixels", xticks=layers)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    save(figure, file)
