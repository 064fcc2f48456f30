"""Semantic segmentation over images."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from ..metrics.streamed import as_array
from .comparison import Legend, draw_comparison, truth_and_prediction
from .figures import Picture, as_picture, check_size, show
from .palette import IGNORED, segmentation_palette


if TYPE_CHECKING:
    from matplotlib.axes import Axes


def overlay_segmentation(
    image: Picture, segmentation: ArrayLike | Tensor, palette: np.ndarray, opacity: float = 0.7
) -> np.ndarray:
    """Lays the colours of classes over an image.

    Args:
        image: PIL image, (H, W, 3) array or (C, H, W) tensor of uint8.
        segmentation: (H, W) class numbers. What is none of the K classes, such as 255, becomes grey.
        palette: (K, 3) uint8.
        opacity: 0 shows the image alone, 1 the colours alone.

    Returns:
        (H, W, 3) uint8.

    Raises:
        ValueError: if the sizes differ.
    """
    picture, labels = as_picture(image), as_array(segmentation, np.int64)
    check_size(picture, labels, "segmentation")
    colours = np.vstack([palette, IGNORED])
    labels = np.where((labels >= 0) & (labels < len(palette)), labels, len(palette))
    return ((1 - opacity) * picture + opacity * colours[labels]).round().astype(np.uint8)


def draw_segmentation(
    images: Sequence[Picture],
    predictions: Sequence[ArrayLike | Tensor],
    targets: Sequence[ArrayLike | Tensor] | None,
    names: Sequence[str],
    file: str | os.PathLike[str],
) -> None:
    """Draws a row for each of the first `MAX_ROWS` images: the image, the truth and the prediction over it.

    Args:
        images: N images of any sizes, see `overlay_segmentation`.
        predictions: N maps (H, W) of class numbers.
        targets: N maps (H, W) of class numbers; None where the truth is not known.
        names: The K class names. The legend shows those that occur.
        file: Where to save the picture; the suffix is the format.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if there is no image, or sizes differ.
    """
    palette = segmentation_palette(len(names))
    maps = truth_and_prediction(targets, predictions, lambda labels: as_array(labels, np.int64))

    def draw(panel: "Axes", picture: np.ndarray, labels: np.ndarray) -> None:
        show(panel, overlay_segmentation(picture, labels, palette))

    found = {label for column in maps.values() for labels in column for label in np.unique(labels).tolist()}
    draw_comparison(images, maps, draw, Legend(found, names, palette), file)
