"""Boxes over images: object detection."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from PIL import Image, ImageDraw
from torch import Tensor

from ..evaluation.base import as_array
from .colors import Axes, segmentation_palette
from .figures import (
    MAX_ROWS,
    Objects,
    Picture,
    PictureFile,
    draw_comparison,
    fit_line,
    large_enough,
    letter_size,
    line_width,
    readable_on,
    show,
)


Rectangle = tuple[float, float, float, float]  # left, top, right and bottom


def draw_boxes(
    image: Picture,
    boxes: ArrayLike | Tensor,
    class_labels: ArrayLike | Tensor,
    names: Sequence[str],
    scores: ArrayLike | Tensor | None = None,
) -> Image.Image:
    """Draws boxes in the colors of their classes over an image, the surest on top.

    Each bears its class and score, the surest first, unless that would cover another label or all of a small box.

    Args:
        image: PIL image, (H, W, 3) array or (C, H, W) tensor of uint8.
        boxes: (N, 4) left, top, right and bottom in pixels of the image.
        class_labels: (N,) class numbers.
        names: The K class names.
        scores: (N,) in [0, 1]; None where there are none, as in the truth.

    Returns:
        RGB image. A small one is enlarged, so that there is room for letters.
    """
    picture, scale = large_enough(image)
    draw, palette, width = ImageDraw.Draw(picture), segmentation_palette(len(names)), line_width(picture)
    edges = scale * as_array(boxes, np.float64).reshape(-1, 4)
    labels = as_array(class_labels, np.int64)
    shares = np.full(len(labels), np.nan) if scores is None else as_array(scores, np.float64)
    texts = Objects(edges, labels, shares).texts(names)
    order = np.argsort(-shares, kind="stable").tolist()
    for number in reversed(order):
        left, top, right, bottom = edges[number].tolist()
        right, bottom = max(left, right), max(top, bottom)
        draw.rectangle((left - 1, top - 1, right + 1, bottom + 1), outline="black", width=width + 2)
        draw.rectangle((left, top, right, bottom), outline=tuple(palette[labels[number]]), width=width)
    taken: list[Rectangle] = []
    for number in order:
        _write_label(picture, edges[number], texts[number], palette[labels[number]], taken)
    return picture


def draw_detections(
    images: Sequence[Picture],
    predictions: Sequence[Mapping[str, Any]],
    targets: Sequence[Mapping[str, Any]] | None,
    names: Sequence[str],
    file: PictureFile,
    threshold: float = 0.3,
) -> None:
    """Draws a row for each of the first `MAX_ROWS` images: the image, the true and the predicted boxes over it.

    Args:
        images: N images of any sizes, see `draw_boxes`.
        predictions: N results, each `boxes` (M, 4), `class_labels` (M,) and `scores` (M,).
        targets: N dicts with `boxes` (M, 4) and `class_labels` (M,); None where the truth is not known.
        names: The K class names. The legend shows those that occur.
        file: Where to save the picture; the suffix is the format.
        threshold: Lowest score of predictions that are drawn.

    Raises:
        ValueError: if there is no image.
    """

    def draw(panel: Axes, picture: np.ndarray, objects: Objects) -> None:
        show(panel, np.asarray(draw_boxes(picture, objects.shapes, objects.labels, names, objects.scores)))

    predicted = [Objects.of(result, "boxes", np.float64, threshold) for result in predictions[:MAX_ROWS]]
    true = None if targets is None else [Objects.of(target, "boxes", np.float64, 0) for target in targets[:MAX_ROWS]]
    draw_comparison(images, predicted, true, draw, file, names, lambda objects: objects.labels)


def _write_label(picture: Image.Image, box: np.ndarray, text: str, color: np.ndarray, taken: list[Rectangle]) -> None:
    """Writes above, into or below a box (4,), where there is room, and notes the place that it takes."""
    draw, pad = ImageDraw.Draw(picture), line_width(picture)
    text, font = fit_line(text, picture.width - 2 * pad, letter_size(picture))
    left, top, right, bottom = draw.textbbox((0, 0), text, font)
    width, height = right - left + 2 * pad, bottom - top + 2 * pad
    if (box[2:] - box[:2]).min() < height:
        return
    x = min(max(0, box[0]), max(0, picture.width - width))
    for y in (box[1] - height, box[1], box[3]):
        place = (x, y, x + width, y + height)
        if 0 <= y <= picture.height - height and not any(_overlap(place, other) for other in taken):
            draw.rectangle(place, fill=tuple(color))
            draw.text((x + pad - left, y + pad - top), text, readable_on(color), font)
            taken.append(place)
            return


def _overlap(one: Rectangle, other: Rectangle) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
