"""Features of patches: similarity, principal components, and pictures of them.

Shapes: B batch, C channels, H W pixels, h w patch grid of an image, N = h·w, D hidden size.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from PIL import Image
from torch import Tensor

from ..evaluation.base import as_array
from ..model.pretrained import HfViTPreTrainedModel
from .colors import IGNORED
from .figures import Picture, PictureFile, first_rows, large_enough, picture_rows, save, show
from .patches import Patch, check_eval_mode, grids_of, number_of


def principal_components(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the `count` directions along which rows (M, D) vary most, and the share of the variance along each.

    The directions (count, D) have length 1 and a positive largest entry. Both are float64, as shares are small
    differences of large sums, the largest share first; there are no more than M or D.
    """
    centered = rows.double() - rows.double().mean(dim=0)
    variances, directions = torch.linalg.eigh(centered.T @ centered)  # of the least first; directions are columns
    count = min(count, *rows.shape)
    components = directions.T.flip(0)[:count]
    largest = components.gather(1, components.abs().argmax(dim=1, keepdim=True))  # (count, 1)
    total = variances.sum().clamp(min=torch.finfo(variances.dtype).tiny)
    return components * largest.sign(), variances.flip(0)[:count].clamp(min=0) / total


NUM_COLORS = 3


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


def feature_colors(features: Sequence[Tensor], foreground_threshold: float | None = None) -> list[Tensor]:
    """Returns colors of patches by their three principal components: similar patches have similar colors.

    Args:
        features: (h, w, D) of each image. All have the same directions and colors.
        foreground_threshold: Tells first foreground from background, by the one direction along which patches differ
            most, from 0 to 1 as they do: only those above have colors, by the directions along which these differ.
            The background is the side to which the borders of the images belong. None gives all patches colors.

    Returns:
        (h, w, 3) for each image, red, green and blue in [0, 1], float64; NaN in the background.

    Raises:
        ValueError: if there are too few patches for three directions.

    Source: figure 1 of https://arxiv.org/abs/2304.07193.
    """
    rows = torch.cat([own.flatten(0, 1) for own in features]).double()  # (M, D) of all images
    is_foreground = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    if foreground_threshold is not None:
        borders = torch.cat([_is_border(own).flatten() for own in features])  # (M,)
        (component,), _ = principal_components(rows, 1)
        places = (rows - rows.mean(dim=0)) @ component  # (M,)
        places = places if places[borders].mean() <= 0 else -places  # the borders lie low
        is_foreground = _spread(places[:, None])[:, 0] > foreground_threshold
    count = int(is_foreground.sum())
    if min(count, rows.shape[1]) <= NUM_COLORS:
        above = "" if foreground_threshold is None else f" above foreground_threshold={foreground_threshold}"
        raise ValueError(
            f"{count} patches{above}, of {rows.shape[1]} features, have no {NUM_COLORS} colors. Take more images, "
            "larger ones, or a lower threshold."
        )
    chosen = rows[is_foreground]
    components, _ = principal_components(chosen, NUM_COLORS)
    colors = rows.new_full((len(rows), NUM_COLORS), torch.nan)
    colors[is_foreground] = _spread(chosen @ components.T)
    sizes = [own.shape[:2] for own in features]
    parts = colors.split([height * width for height, width in sizes])
    return [part.unflatten(0, size) for part, size in zip(parts, sizes, strict=True)]


def _is_border(features: Tensor) -> Tensor:
    """Returns which patches of features (h, w, D) lie at the border of their image, (h, w)."""
    borders = torch.ones(features.shape[:2], dtype=torch.bool, device=features.device)
    borders[1:-1, 1:-1] = False
    return borders


def _spread(values: Tensor) -> Tensor:
    """Scales each column of values (M, K) to 0, the least, to 1, the largest."""
    lowest, highest = values.amin(dim=0), values.amax(dim=0)
    return (values - lowest) / (highest - lowest).clamp(min=torch.finfo(values.dtype).tiny)


def draw_feature_colors(images: Sequence[Picture], colors: Sequence[ArrayLike | Tensor], file: PictureFile) -> None:
    """Draws a row for each of the first `MAX_ROWS` images: the image, and its patches in their colors.

    Args:
        images: PIL images, (H, W, 3) arrays or (C, H, W) tensors of uint8, that the model saw as a whole at any size.
        colors: (h, w, 3) of each in [0, 1], from `feature_colors`; NaN becomes gray.
        file: Where to save the picture; the suffix is the format.

    Raises:
        ValueError: if there is no image.
    """
    pictures = first_rows(images)
    figure, panels = picture_rows(pictures, ["image", "patches"], [1.0, 1.0])
    for row, image, own in zip(panels, images, colors, strict=False):
        picture, _ = large_enough(image)
        show(row[0], np.asarray(picture))
        values = as_array(own, np.float64)
        levels = np.where(np.isnan(values), IGNORED, (values * 255).round()).astype(np.uint8)
        show(row[1], np.asarray(Image.fromarray(levels).resize(picture.size, Image.Resampling.NEAREST)))
    save(figure, file)
