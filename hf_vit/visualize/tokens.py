"""Figures of the tokens of an image, the attention between two patches, and the distances of attended patches.

Shapes: h w patch grid, N = h·w patches, P prefix tokens, L = P + N.
"""

import numpy as np
import torch
from torch import Tensor

from ..model.configuration_hf_vit import HfViTConfig, to_pair
from .attention import Attention, attention_maps
from .colors import Axes
from .figures import Picture, PictureFile, add_legend, enlarge_small_image, new_figure, save, show
from .patches import Patch, number_of


TILE_ROWS, TILE_COLUMNS = 4, 8  # Maximum number of rows and columns of drawn tokens
MARK_BOX = {"boxstyle": "round", "facecolor": "black", "edgecolor": "white", "pad": 0.2}


def attention_distances(recorded: Attention, patch_size: int | tuple[int, int]) -> Tensor:
    """Return the mean distance in pixels between a patch and the patches it attends to, (layers, heads).

    Distances are weighted by attention and averaged over all patches. Attention to non-patch tokens is ignored.
    Source: figure 7 of https://arxiv.org/abs/2010.11929.
    """
    numbers = torch.arange(recorded.grid[0] * recorded.grid[1], device=recorded.weights.device)
    centers = torch.stack((numbers // recorded.grid[1], numbers % recorded.grid[1]), dim=1).double()
    centers *= centers.new_tensor(to_pair(patch_size))
    tokens = slice(recorded.num_prefix, recorded.num_prefix + len(numbers))
    weights = recorded.weights[..., tokens, tokens].double()  # (layers, heads, N, N)
    distances = (weights * torch.cdist(centers, centers)).sum(dim=-1) / weights.sum(dim=-1)
    return distances.mean(dim=-1)


def convolution_distances(num_layers: int, image_size: tuple[int, int]) -> list[float]:
    """Return the mean distance in pixels between the center of a receptive field and its pixels, per convolution.

    The network consists of 3 x 3 convolutions, with 2 x 2 pooling after every second one, as in VGG
    (https://arxiv.org/abs/1409.1556). Receptive fields are at most as large as the image.
    """
    result, side, step = [], 1, 1  # Side of the receptive field, and distance between two outputs, in pixels
    for number in range(num_layers):
        if number and number % 2 == 0:
            side, step = side + step, 2 * step
        side += 2 * step
        rows, columns = (
            torch.arange(count).double() - (count - 1) / 2 for count in (min(side, s) for s in image_size)
        )
        result.append(torch.hypot(rows[:, None], columns).mean().item())
    return result


def most_attended(recorded: Attention, patch: Patch) -> Patch:
    """Return the patch, other than `patch`, to which `patch` attends most in the last layer, averaged over heads."""
    heat = attention_maps(recorded, patch)[-1].mean(dim=0)
    heat[patch] = -1
    return divmod(int(heat.argmax()), recorded.grid[1])


def draw_tokens(
    image: Picture, recorded: Attention, config: HfViTConfig, first: Patch, second: Patch, file: PictureFile
) -> None:
    """Draw the patches and tokens of an image, the attention between two patches, and the attention distances.

    The patches `first` and `second` are marked A and B. Raises `ValueError` if one of them does not exist.
    """
    picture = np.asarray(enlarge_small_image(image)[0])
    figure = new_figure(11, 8)
    panels = figure.subplots(2, 2)
    _draw_grid(panels[0, 0], picture, recorded.grid, {"A": first, "B": second})
    _draw_sequence(panels[0, 1], picture, recorded, config)
    layers = np.arange(1, len(recorded.weights) + 1)
    for pair, label, color in (((first, second), "from A to B", "C0"), ((second, first), "from B to A", "C1")):
        heads = attention_maps(recorded, pair[0]).cpu().numpy()[:, :, pair[1][0], pair[1][1]]  # (layers, heads)
        panels[1, 0].plot(layers, heads.mean(axis=1), "o-", color=color, label=f"{label}, mean of heads")
        panels[1, 0].plot(layers, heads, ".", color=color, alpha=0.4)
    num_tokens = recorded.weights.shape[-1]
    panels[1, 0].axhline(1 / num_tokens, color="gray", linestyle="--", label=f"equal attention to {num_tokens} tokens")
    panels[1, 0].set(xlabel="layer", ylabel="attention", title="attention between A and B")
    height, width = to_pair(config.patch_size)
    distances = attention_distances(recorded, (height, width)).cpu().numpy()
    size = recorded.grid[0] * height, recorded.grid[1] * width
    equal = Attention(torch.ones_like(recorded.weights[:1, :1]), recorded.grid, recorded.num_prefix, recorded.pooled)
    panels[1, 1].plot(layers, distances.mean(axis=1), "o-", color="C0", label="attention, mean of heads")
    panels[1, 1].plot(layers, distances, ".", color="C0", alpha=0.4)
    convolution = convolution_distances(len(layers), size)
    panels[1, 1].plot(layers, convolution, "s-", color="C2", label="receptive field of 3 x 3 convolutions")
    whole = attention_distances(equal, (height, width)).item()
    panels[1, 1].axhline(whole, color="gray", linestyle="--", label="equal attention to all patches")
    panels[1, 1].set(xlabel="layer", ylabel="pixels of the model input", title="mean distance of attended patches")
    for panel in panels[1]:
        panel.plot([], ".", color="gray", label="one head")
        panel.set_ylim(0, 1.35 * panel.get_ylim()[1])  # Leave space for the legend
        panel.xaxis.get_major_locator().set_params(integer=True)
        add_legend(panel)
    save(figure, file)


def _draw_grid(panel: Axes, picture: np.ndarray, grid: tuple[int, int], marks: dict[str, Patch]) -> None:
    """Draw a picture (H, W, 3) with the borders of its patches, and letters at patches."""
    (height, width), (rows, columns) = picture.shape[:2], grid
    show(panel, picture)
    panel.hlines(np.arange(1, rows) * height / rows - 0.5, -0.5, width - 0.5, color="white", linewidth=0.5)
    panel.vlines(np.arange(1, columns) * width / columns - 0.5, -0.5, height - 0.5, color="white", linewidth=0.5)
    for letter, patch in marks.items():
        number_of(patch, grid)  # raises ValueError if the patch does not exist
        y, x = (patch[0] + 0.5) * height / rows, (patch[1] + 0.5) * width / columns
        panel.text(x, y, letter, color="white", ha="center", va="center", fontsize=9, bbox=MARK_BOX)
    panel.set_title(f"{rows} x {columns} patches")


def _draw_sequence(panel: Axes, picture: np.ndarray, recorded: Attention, config: HfViTConfig) -> None:
    """Draw the first tokens and the last token of a picture (H, W, 3), each above its number and position."""
    (height, width), (rows, columns), num_prefix = picture.shape[:2], recorded.grid, recorded.num_prefix
    names = ["CLS"] * config.use_cls_token + ["distillation"] * config.use_distillation_token
    names += [f"register {number + 1}" for number in range(num_prefix - len(names))]
    count = num_prefix + rows * columns
    shown = list(range(min(count, TILE_ROWS * TILE_COLUMNS)))
    shown[-1] = count - 1
    for place, number in enumerate(shown):
        y, x = divmod(place, TILE_COLUMNS)
        if number < num_prefix:
            tile, caption = np.full((1, 1, 3), 225, np.uint8), f"{number}: {names[number]}"
        else:
            row, column = divmod(number - num_prefix, columns)
            top, bottom = (edge * height // rows for edge in (row, row + 1))
            left, right = (edge * width // columns for edge in (column, column + 1))
            tile, caption = picture[top:bottom, left:right], f"{number}: ({row}, {column})"
        panel.imshow(tile, extent=(x, x + 0.9, y + 0.7, y))
        panel.text(x + 0.45, y + 0.73, caption, ha="center", va="top", fontsize=6)
        if place and number > shown[place - 1] + 1:
            panel.text(x - 0.05, y + 0.35, "…", ha="center", va="center")
    panel.set(xlim=(0, TILE_COLUMNS), ylim=(-(-len(shown) // TILE_COLUMNS), 0), aspect="auto")
    panel.set_axis_off()
    panel.set_title(f"{count} tokens: number and (row, column)")
