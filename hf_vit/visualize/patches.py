"""Patches of an image: their features and similarity, and pictures of them.

Shapes: B batch, C channels, H W pixels, h w patch grid of an image, N = h·w, D hidden size.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from ..evaluation.base import as_array
from ..model.embeddings import Grid, image_grids
from ..model.pretrained import HfViTPreTrainedModel
from .colors import BAR_COLUMN, Axes, draw_bar, in_colors, span_of
from .figures import (
    COLUMN_WIDTH,
    MAX_ASPECT,
    MAX_ROWS,
    Array,
    Picture,
    PictureFile,
    as_picture,
    draw_rows,
    large_enough,
    new_figure,
    picture_rows,
    save,
    show,
)


Patch = tuple[int, int]  # row and column

HEAT_COLORS = "inferno"
OPACITY = 0.65
MARK_SIZE = 9  # of the cross in the marked patch, in points
NUM_COLORS = 3
MAP_WIDTH = 0.75  # inches, of one map among many


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


def overlay_heat(image: Picture, values: Array, opacity: float = OPACITY) -> np.ndarray:
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


def draw_heat(image: Picture, values: Array, title: str, file: PictureFile, patch: Patch | None = None) -> None:
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
    mark_patch(panels[:2], patch, heat.shape)
    save(figure, file)


def mark_patch(panels: Sequence[Axes], patch: Patch | None, grid: Sequence[int]) -> None:
    """Marks a patch of a grid, if there is one, by a cross in panels that show the whole image."""
    if patch is None:
        return
    x, y = ((number + 0.5) / count for number, count in zip(reversed(patch), reversed(grid), strict=True))
    for color, width in (("black", 3.0), ("white", 1.2)):  # to be seen on light and on dark
        for panel in panels:
            panel.plot(x, 1 - y, "+", color=color, markersize=MARK_SIZE, mew=width, transform=panel.transAxes)


def principal_components(rows: Tensor, count: int) -> Tensor:
    """Returns the directions (count, D) in float64 along which rows (M, D) vary most, the most important first.

    The directions have length 1 and a positive largest entry; there are no more than M or D.
    """
    centered = rows.double() - rows.double().mean(dim=0)
    _, directions = torch.linalg.eigh(centered.T @ centered)  # columns, that of the least variance first
    components = directions.T.flip(0)[: min(count, *rows.shape)]
    largest = components.gather(1, components.abs().argmax(dim=1, keepdim=True))  # (count, 1)
    return components * largest.sign()


@torch.no_grad()
def patch_features(
    model: HfViTPreTrainedModel, pixel_values: Tensor, patch_attention_mask: Tensor | None = None
) -> list[Tensor]:
    """Returns the features of patches after the last block and the final norm.

    Args:
        model: A model of any task; its encoder sees the images without masks and without queries.
        pixel_values: (B, C, H, W).
        patch_attention_mask: (B, h, w) bool, False for padding on the right and at the bottom.

    Returns:
        (h, w, D) for each image, without padding, in float32 at least.

    Raises:
        ValueError: if the model is in training mode, or an input does not fit it.
    """
    check_eval_mode(model)
    encoder = model.base_model
    outputs = encoder(pixel_values, patch_attention_mask=patch_attention_mask, return_dict=True)
    tokens = outputs.last_hidden_state[:, model.config.num_prefix_tokens :]  # (B, N, D)
    tokens = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
    maps = tokens.unflatten(1, encoder.embeddings.patch_embeddings.grid(pixel_values))  # (B, h, w, D)
    grids = grids_of(model, pixel_values, patch_attention_mask)
    return [own[:rows, :columns] for own, (rows, columns) in zip(maps, grids, strict=True)]


def patch_similarity(features: Tensor, patch: Patch) -> Tensor:
    """Returns the similarity of one patch to all patches, (h, w) cosines from -1 to 1.

    Args:
        features: (h, w, D) of one image.
        patch: Row and column.

    Raises:
        ValueError: if there is no such patch.
    """
    row, column = divmod(number_of(patch, (features.shape[0], features.shape[1])), features.shape[1])
    directions = F.normalize(features, dim=-1)
    return directions @ directions[row, column]


def feature_colors(features: Sequence[Tensor]) -> list[Tensor]:
    """Return colors of patches by their three principal components: similar patches have similar colors.

    Args:
        features: (h, w, D) of each image. All have the same directions and colors.

    Returns:
        (h, w, 3) for each image, red, green and blue in [0, 1], float64.

    Raises:
        ValueError: if there are too few patches for three directions.

    Source: figure 1 of https://arxiv.org/abs/2304.07193.
    """
    rows = torch.cat([own.flatten(0, 1) for own in features]).double()  # (M, D) of all images
    if min(rows.shape) <= NUM_COLORS:
        raise ValueError(
            f"{len(rows)} patches, of {rows.shape[1]} features, have no {NUM_COLORS} colors. Take more images, or "
            "larger ones."
        )
    values = rows @ principal_components(rows, NUM_COLORS).T  # (M, 3)
    lowest, highest = values.amin(dim=0), values.amax(dim=0)
    colors = (values - lowest) / (highest - lowest).clamp(min=torch.finfo(values.dtype).tiny)
    parts = colors.split([own[..., 0].numel() for own in features])
    return [part.view(*own.shape[:2], NUM_COLORS) for part, own in zip(parts, features, strict=True)]


def draw_feature_colors(images: Sequence[Picture], colors: Sequence[Array], file: PictureFile) -> None:
    """Draws a row for each of the first `MAX_ROWS` images: the image, and its patches in their colors.

    Args:
        images: PIL images, (H, W, 3) arrays or (C, H, W) tensors of uint8, that the model saw as a whole at any size.
        colors: (h, w, 3) of each in [0, 1], from `feature_colors`.
        file: Where to save the picture; the suffix is the format.

    Raises:
        ValueError: if there is no image.
    """
    rows = []
    for image, own in list(zip(images, colors, strict=True))[:MAX_ROWS]:
        picture, values = large_enough(image)[0], as_array(own, np.float64)
        patches = Image.fromarray((values * 255).round().astype(np.uint8)).resize(
            picture.size, Image.Resampling.NEAREST
        )
        rows.append((np.asarray(picture), np.asarray(patches)))
    draw_rows(rows, ["image", "patches"], file)


def mosaic(maps: np.ndarray) -> np.ndarray:
    """Return maps (R, C, h, w) side by side in rows and columns, with gaps of NaN in between, as float64."""
    framed = np.pad(maps.astype(np.float64), [(0, 0), (0, 0), (0, 1), (0, 1)], constant_values=np.nan)
    return np.block([list(row) for row in framed])[:-1, :-1]


def draw_attention(image: Picture, maps: Array, file: PictureFile, patch: Patch | None = None) -> None:
    """Draws an image beside the attention of each layer (a row) and head (a column), in its own span of colors.

    Args:
        image: PIL image, (H, W, 3) array or (C, H, W) tensor of uint8, that the model saw as a whole at any size.
        maps: (layers, heads, h, w), from `attention_maps`.
        file: Where to save the picture; the suffix is the format.
        patch: Row and column of the patch that attends, to be marked; None where none does.
    """
    values = as_array(maps, np.float64)
    layers, heads, *grid = values.shape
    above = values - values.min(axis=(2, 3), keepdims=True)
    shares = above / np.maximum(above.max(axis=(2, 3), keepdims=True), np.finfo(np.float64).tiny)
    height, width = as_picture(image).shape[:2]
    map_height = MAP_WIDTH * min(height / width, MAX_ASPECT)
    figure_height = max(layers * map_height, COLUMN_WIDTH * height / width) + 0.6
    figure = new_figure(COLUMN_WIDTH + heads * MAP_WIDTH + 0.4, figure_height)
    panels = figure.subplots(1, 2, width_ratios=[COLUMN_WIDTH, heads * MAP_WIDTH])
    show(panels[0], np.asarray(large_enough(image)[0]))
    panels[0].set_anchor("N")
    mark_patch(panels[:1], patch, grid)
    # Cells are as high as those of the image, also where patches are not square.
    panels[1].imshow(mosaic(shares), cmap=HEAT_COLORS, aspect=height / grid[0] / (width / grid[1]))
    panels[1].set(xlabel="head", ylabel="layer")
    for axis, count, length in zip((panels[1].yaxis, panels[1].xaxis), (layers, heads), grid, strict=True):
        axis.set_ticks(np.arange(count) * (length + 1) + length / 2, range(1, count + 1), fontsize=8)
    panels[1].tick_params(length=0)
    panels[1].spines[:].set_visible(False)
    save(figure, file)
