"""Depth in colors."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from ..evaluation.base import as_array
from .colors import BAR_COLUMN, draw_bar, in_colors, span_of
from .figures import Picture, PictureFile, check_size, first_rows, picture_rows, save, show


DEPTH_COLORS, INVERSE_DEPTH_COLORS = "viridis_r", "viridis"  # what is near is bright
ERROR_COLORS = "magma"
MAX_ERROR = 0.5  # of the truth: beyond, an error is as bright as this one


def color_depth(depth: ArrayLike | Tensor, lowest: float, highest: float) -> np.ndarray:
    """Gives each depth a color: bright is near, gray is invalid.

    Args:
        depth: (H, W) depth; 0, NaN, negative or infinite is invalid.
        lowest: Depth of the brightest color.
        highest: Depth of the darkest color.

    Returns:
        (H, W, 3) uint8.
    """
    values = as_array(depth, np.float64)
    return in_colors(values, _is_valid(values), (lowest, highest), DEPTH_COLORS)


def draw_depth(
    images: Sequence[Picture],
    predictions: Sequence[ArrayLike | Tensor],
    targets: Sequence[ArrayLike | Tensor] | None,
    file: PictureFile,
    relative: bool = False,
) -> None:
    """Draws a row for each of the first `MAX_ROWS` images: image, truth and prediction in the same colors, and error.

    The colors of a row span the depth of its truth, or of its prediction where there is no truth. Pixels without a
    valid depth are gray. Relative depth has no common scale: each picture spans its own values, and no error is drawn.

    Args:
        images: N images of any sizes: PIL images, (H, W, 3) arrays or (C, H, W) tensors of uint8.
        predictions: N maps (H, W) of depth in meters, or of relative inverse depth.
        targets: N maps (H, W) of depth in meters, where 0, NaN, negative or infinite is invalid; None where the truth
            is not known.
        file: Where to save the picture; the suffix is the format.
        relative: Whether predictions are relative inverse depth.

    Raises:
        ValueError: if there is no image, or sizes differ.
    """
    pictures = first_rows(images)
    truths = [None] * len(pictures) if targets is None else [as_array(target, np.float64) for target in targets]
    titles = ["image", *([] if targets is None else ["truth"]), "prediction", ""]
    if targets is not None and not relative:
        titles += ["error", ""]
    figure, panels = picture_rows(pictures, titles, [1.0 if title else BAR_COLUMN for title in titles])
    for row, picture, own, truth in zip(panels, pictures, predictions, truths, strict=False):
        prediction = as_array(own, np.float64)
        check_size(picture, prediction, "prediction")
        show(row[0], picture)
        if truth is not None:
            check_size(picture, truth, "target")
        _draw_maps(row[1:], prediction, truth, relative)
        if truth is not None and not relative:
            error = np.abs(prediction - truth) / np.where(_is_valid(truth), truth, 1.0)
            show(row[-2], in_colors(error, _is_valid(truth) & np.isfinite(error), (0, MAX_ERROR), ERROR_COLORS))
            draw_bar(row[-1], (0, MAX_ERROR), ERROR_COLORS, "share of the truth")
    save(figure, file)


def _draw_maps(panels: np.ndarray, prediction: np.ndarray, truth: np.ndarray | None, relative: bool) -> None:
    """Draws truth, where there is one, prediction and color bar."""
    maps = [(prediction, np.isfinite(prediction) if relative else _is_valid(prediction))]
    if truth is not None:
        valid = _is_valid(truth)
        maps.insert(0, (1 / np.where(valid, truth, 1.0) if relative else truth, valid))
    spans = [span_of(values[valid]) for values, valid in maps]
    colors = INVERSE_DEPTH_COLORS if relative else DEPTH_COLORS
    for panel, (values, valid), span in zip(panels, maps, spans, strict=False):
        show(panel, in_colors(values, valid, span if relative else spans[0], colors))
    if relative:
        draw_bar(panels[len(maps)], (0, 1), colors, "relative", {0: "far", 1: "near"})
    else:
        draw_bar(panels[len(maps)], spans[0], colors, "meters")


def _is_valid(depth: np.ndarray) -> np.ndarray:
    return np.isfinite(depth) & (depth > 0)
