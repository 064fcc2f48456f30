"""Patches in the colours of their features."""

import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from PIL import Image
from torch import Tensor

from ..metrics.streamed import as_array
from .canvas import large_enough
from .figures import MAX_ROWS, Picture, as_picture, picture_rows, save, show
from .palette import IGNORED


def draw_feature_colours(
    images: Sequence[Picture], colours: Sequence[ArrayLike | Tensor], file: str | os.PathLike[str]
) -> None:
    """Draws a row for each of the first `MAX_ROWS` images: the image, and its patches in their colours.

    Args:
        images: PIL images, (H, W, 3) arrays or (C, H, W) tensors of uint8, that the model saw as a whole at any size.
        colours: (h, w, 3) of each in [0, 1], from `feature_colours`; NaN becomes grey.
        file: Where to save the picture; the suffix is the format.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if there is no image.
    """
    pictures = [as_picture(image) for image in images[:MAX_ROWS]]
    figure, panels = picture_rows(pictures, ["image", "patches"], [1.0, 1.0])
    for row, image, own in zip(panels, images, colours, strict=False):
        picture, _ = large_enough(image)
        show(row[0], np.asarray(picture))
        values = as_array(own, np.float64)
        levels = np.where(np.isnan(values), IGNORED, (values * 255).round()).astype(np.uint8)
        show(row[1], np.asarray(Image.fromarray(levels).resize(picture.size, Image.Resampling.NEAREST)))
    save(figure, file)
