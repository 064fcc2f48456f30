"""Patch features, their similarity and principal components, and figures of patch values.

Shapes: B batch, C channels, H W pixels, h w patch grid of an image, N = h·w, D hidden size.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from ..evaluation.base import as_array
from ..model.embeddings import Grid, image_grids
from ..model.pretrained import HfViTPreTrainedModel
from .colors import BAR_COLUMN, Axes, apply_color_map, draw_bar, value_range
from .figures import (
    COLUMN_WIDTH,
    LEGEND_LINE,
    MAX_ASPECT,
    MAX_ROWS,
    Array,
    Picture,
    PictureFile,
    as_picture,
    draw_rows,
    enlarge_small_image,
    new_figure,
    picture_rows,
    row_height,
    save,
    show,
)


Patch = tuple[int, int]  # Row and column of a patch

HEAT_COLORS = "inferno"
OPACITY = 0.65
MARK_SIZE = 9  # Size of the patch marker in points
NUM_COLORS = 3
HEATS_PER_ROW = 4
MAP_WIDTH = 0.75  # Width of one attention map in inches


def patch_at(point: tuple[float, float], image_size: tuple[int, int], grid: Grid) -> Patch:
    """Return row and column of the patch at a point (x, y) of an image that was resized without cropping.

    The point is in pixels of the image before resizing, whose height and width are `image_size`. A point outside of
    the image raises `ValueError`.
    """
    (x, y), (height, width) = point, image_size
    if not (0 <= x < width and 0 <= y < height):
        raise ValueError(f"The point {x:g},{y:g} (x, y) is outside of the image of {width} x {height} pixels.")
    return int(y * grid[0] / height), int(x * grid[1] / width)


def number_of(patch: Patch, grid: Grid) -> int:
    """Return the row-major number of a patch; raise `ValueError` if it is outside of the grid."""
    row, column = patch
    if not (0 <= row < grid[0] and 0 <= column < grid[1]):
        raise ValueError(
            f"There is no patch {patch} (row, column) in a grid of {grid[0]} x {grid[1]}. Use patch_at to convert "
            "pixel coordinates."
        )
    return row * grid[1] + column


def patch_grids(model: HfViTPreTrainedModel, pixel_values: Tensor, patch_attention_mask: Tensor | None) -> list[Grid]:
    """Return the numbers of rows and columns of patches of each image, without padding."""
    if patch_attention_mask is not None:
        return image_grids(patch_attention_mask)
    grid: Grid = model.base_model.embeddings.patch_embeddings.grid(pixel_values)
    return [grid] * len(pixel_values)


def check_eval_mode(model: HfViTPreTrainedModel) -> None:
    """Raise `ValueError` if the model is in training mode."""
    if model.training:
        raise ValueError("The model is in training mode, so dropout makes the result random. Call model.eval() first.")


def overlay_heat(image: Picture, values: Array, opacity: float = OPACITY) -> np.ndarray:
    """Blend a heatmap of patch values (h, w) over an image, and return the result, (H, W, 3) uint8.

    High values are bright. The color range excludes outliers. Small images are enlarged to make patches visible.
    """
    picture = np.asarray(enlarge_small_image(image)[0])
    heat = as_array(values, np.float64)
    smooth = F.interpolate(torch.from_numpy(heat)[None, None], picture.shape[:2], mode="bilinear")[0, 0].numpy()
    colors = apply_color_map(smooth, np.isfinite(smooth), value_range(heat.ravel()), HEAT_COLORS)
    return ((1 - opacity) * picture + opacity * colors).round().astype(np.uint8)


def draw_heat(image: Picture, values: Array, title: str, file: PictureFile, patch: Patch | None = None) -> None:
    """Draw an image, a heatmap of the values (h, w) of its patches, and a color bar; mark `patch`, if given."""
    heat = as_array(values, np.float64)
    figure, (panels,) = picture_rows([as_picture(image)], ["image", title, ""], [1.0, 1.0, BAR_COLUMN])
    show(panels[0], np.asarray(enlarge_small_image(image)[0]))
    show(panels[1], overlay_heat(image, heat))
    draw_bar(panels[2], value_range(heat.ravel()), HEAT_COLORS, "")
    mark_patch(panels[:2], patch, heat.shape)
    save(figure, file)


def draw_heats(image: Picture, heat: Mapping[str, Array], file: PictureFile) -> None:
    """Draw an image, followed by the heatmaps of patch values (h, w) by title, each with its own color range."""
    picture = as_picture(image)
    panels = {"image": np.asarray(enlarge_small_image(image)[0])}
    panels |= {title: overlay_heat(image, values) for title, values in heat.items()}
    columns = min(len(panels), HEATS_PER_ROW)
    rows = -(-len(panels) // columns)
    figure = new_figure(COLUMN_WIDTH * columns, rows * (row_height(picture) + LEGEND_LINE))
    places = figure.subplots(rows, columns, squeeze=False).ravel()
    for place in places:
        place.set_axis_off()
    for place, (title, shown) in zip(places, panels.items(), strict=False):
        show(place, shown)
        place.set_title(title, fontsize=10, parse_math=False)
    save(figure, file)


def mark_patch(panels: Sequence[Axes], patch: Patch | None, grid: Sequence[int]) -> None:
    """Mark a patch of a grid by a cross in panels that show the whole image; None marks nothing."""
    if patch is None:
        return
    x, y = ((number + 0.5) / count for number, count in zip(reversed(patch), reversed(grid), strict=True))
    for color, width in (("black", 3.0), ("white", 1.2)):  # White on black is visible on any image.
        for panel in panels:
            panel.plot(x, 1 - y, "+", color=color, markersize=MARK_SIZE, mew=width, transform=panel.transAxes)


def principal_components(rows: Tensor, count: int) -> Tensor:
    """Return the `count` directions (count, D) of largest variance of rows (M, D) in float64, by decreasing variance.

    Directions have length 1, and their largest entry is positive. At most min(M, D) directions are returned.
    """
    centered = rows.double() - rows.double().mean(dim=0)
    _, directions = torch.linalg.eigh(centered.T @ centered)  # columns in order of increasing variance
    components = directions.T.flip(0)[: min(count, *rows.shape)]
    largest = components.gather(1, components.abs().argmax(dim=1, keepdim=True))  # (count, 1)
    return components * largest.sign()


@torch.no_grad()
def patch_features(
    model: HfViTPreTrainedModel, pixel_values: Tensor, patch_attention_mask: Tensor | None = None
) -> list[Tensor]:
    """Return the features of patches after the last block and the final norm.

    Args:
        model: A model of any task; images are encoded without masking and without queries.
        pixel_values: Images (B, C, H, W).
        patch_attention_mask: Mask (B, h, w) bool, False for padding on the right and at the bottom.

    Returns:
        One tensor (h, w, D) of features per image, without padding, in float32 or float64.

    Raises:
        ValueError: if the model is in training mode, or does not accept the inputs.
    """
    check_eval_mode(model)
    encoder = model.base_model
    outputs = encoder(pixel_values, patch_attention_mask=patch_attention_mask, return_dict=True)
    tokens = outputs.last_hidden_state[:, model.config.num_prefix_tokens :]  # (B, N, D)
    tokens = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
    maps = tokens.unflatten(1, encoder.embeddings.patch_embeddings.grid(pixel_values))  # (B, h, w, D)
    grids = patch_grids(model, pixel_values, patch_attention_mask)
    return [own[:rows, :columns] for own, (rows, columns) in zip(maps, grids, strict=True)]


def patch_similarity(features: Tensor, patch: Patch) -> Tensor:
    """Return the cosine similarity (h, w) of one patch to all patches, in [-1, 1].

    Args:
        features: Features (h, w, D) of one image.
        patch: Row and column of the patch.

    Raises:
        ValueError: if the patch does not exist.
    """
    row, column = divmod(number_of(patch, (features.shape[0], features.shape[1])), features.shape[1])
    directions = F.normalize(features, dim=-1)
    return directions @ directions[row, column]


def feature_colors(features: Sequence[Tensor]) -> list[Tensor]:
    """Return colors of patches by the first three principal components, so that similar patches have similar colors.

    Args:
        features: Features (h, w, D) of each image. All images share the same components and color range.

    Returns:
        One tensor (h, w, 3) float64 per image, with red, green and blue in [0, 1].

    Raises:
        ValueError: if there are too few patches or features for three components.

    Source: figure 1 of https://arxiv.org/abs/2304.07193.
    """
    rows = torch.cat([own.flatten(0, 1) for own in features]).double()  # (M, D) for M patches of all images
    if min(rows.shape) <= NUM_COLORS:
        raise ValueError(
            f"{len(rows)} patches with {rows.shape[1]} features are too few for {NUM_COLORS} principal components. "
            "Use more or larger images."
        )
    values = rows @ principal_components(rows, NUM_COLORS).T  # (M, 3)
    lowest, highest = values.amin(dim=0), values.amax(dim=0)
    colors = (values - lowest) / (highest - lowest).clamp(min=torch.finfo(values.dtype).tiny)
    parts = colors.split([own[..., 0].numel() for own in features])
    return [part.view(*own.shape[:2], NUM_COLORS) for part, own in zip(parts, features, strict=True)]


def draw_feature_colors(images: Sequence[Picture], colors: Sequence[Array], file: PictureFile) -> None:
    """Draw each of the first `MAX_ROWS` images next to its patches in their colors (h, w, 3) from `feature_colors`.

    Raises `ValueError` if there is no image.
    """
    rows = []
    for image, own in list(zip(images, colors, strict=True))[:MAX_ROWS]:
        picture = enlarge_small_image(image)[0]
        patches = Image.fromarray((as_array(own, np.float64) * 255).round().astype(np.uint8))
        rows.append((np.asarray(picture), np.asarray(patches.resize(picture.size, Image.Resampling.NEAREST))))
    draw_rows(rows, ["image", "patches"], file)


def mosaic(maps: np.ndarray) -> np.ndarray:
    """Arrange maps (R, C, h, w) in R rows and C columns with NaN in the gaps, as float64."""
    framed = np.pad(maps.astype(np.float64), [(0, 0), (0, 0), (0, 1), (0, 1)], constant_values=np.nan)
    return np.block([list(row) for row in framed])[:-1, :-1]


def draw_attention(image: Picture, maps: Array, file: PictureFile, patch: Patch | None = None) -> None:
    """Draw an image next to the attention maps of each layer (rows) and head (columns), each with its own color range.

    Args:
        image: The uncropped image.
        maps: Attention maps (layers, heads, h, w), as returned by `attention_maps`.
        file: Output file.
        patch: Row and column of the attending patch, which is marked; None marks nothing.
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
    show(panels[0], np.asarray(enlarge_small_image(image)[0]))
    panels[0].set_anchor("N")
    mark_patch(panels[:1], patch, grid)
    # Aspect ratio of the patches in the image, which need not be square
    panels[1].imshow(mosaic(shares), cmap=HEAT_COLORS, aspect=height / grid[0] / (width / grid[1]))
    panels[1].set(xlabel="head", ylabel="layer")
    for axis, count, length in zip((panels[1].yaxis, panels[1].xaxis), (layers, heads), grid, strict=True):
        axis.set_ticks(np.arange(count) * (length + 1) + length / 2, range(1, count + 1), fontsize=8)
    panels[1].tick_params(length=0)
    panels[1].spines[:].set_visible(False)
    save(figure, file)
