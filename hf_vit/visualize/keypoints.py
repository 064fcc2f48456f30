"""Keypoints and skeletons over images. Shape: K keypoints."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from PIL import Image, ImageDraw
from torch import Tensor

from ..evaluation.base import as_array
from .colors import IGNORED, Axes, segmentation_palette
from .figures import (
    MAX_ROWS,
    Picture,
    PictureFile,
    as_picture,
    draw_comparison,
    large_enough,
    line_width,
    show,
)


HIDDEN, VISIBLE = 1, 2  # visibility of a keypoint that is labeled; 0 is not labeled
SMOOTH = 2  # times finer than the picture is what is drawn
FAINTEST = 0.4  # opacity of a keypoint of score 0
MANY = 30  # keypoints, which are drawn smaller
MARGIN = 0.15  # around an object, as a share of its longer side


class Pose(NamedTuple):
    """The keypoints of an object: places (K, 2), visibility (K,) and scores (K,)."""

    keypoints: np.ndarray
    visibility: np.ndarray | None
    scores: np.ndarray | None


def draw_keypoints(
    image: Picture,
    keypoints: ArrayLike | Tensor,
    visibility: ArrayLike | Tensor | None = None,
    skeleton: Iterable[Sequence[int]] = (),
    scores: ArrayLike | Tensor | None = None,
    boxes: ArrayLike | Tensor | None = None,
) -> Image.Image:
    """Draws the keypoints of one or several objects over an image, each in its color, with lines between them.

    Args:
        image: PIL image, (H, W, 3) array or (C, H, W) tensor of uint8.
        keypoints: (K, 2) or (N, K, 2) x and y in pixels; the center of the first pixel is at 0.
        visibility: (K,) or (N, K): 2 is seen, 1 hidden, drawn as a ring, and 0 not labeled, not drawn; 2 by default.
        skeleton: Pairs of keypoints (numbers) that a line joins.
        scores: (K,) or (N, K) in [0, 1]; the lower, the fainter.
        boxes: (4,) or (N, 4) left, top, right and bottom in pixels of the image, drawn in gray below; none by default.

    Returns:
        RGB image. A small one is enlarged.
    """
    picture, scale = large_enough(image)
    outlines = np.zeros((0, 4)) if boxes is None else scale * as_array(boxes, np.float64).reshape(-1, 4)
    for outline in outlines.tolist():
        ImageDraw.Draw(picture).rectangle(outline, outline=IGNORED)
    points = as_array(keypoints, np.float64)
    points = (points.reshape(-1, *points.shape[-2:]) + 0.5) * scale * SMOOTH  # (N, K, 2)
    shape = points.shape[:2]
    seen = np.full(shape, 2) if visibility is None else as_array(visibility, np.int64).reshape(shape)
    sure = np.ones(shape) if scores is None else as_array(scores, np.float64).reshape(shape).clip(0, 1)
    layer = Image.new("RGBA", (picture.width * SMOOTH, picture.height * SMOOTH))
    for pose in zip(points, seen, sure, strict=True):
        _draw_pose(layer, *pose, list(skeleton), SMOOTH * line_width(picture))
    return Image.alpha_composite(picture.convert("RGBA"), layer.resize(picture.size)).convert("RGB")


def draw_poses(
    images: Sequence[Picture],
    predictions: Sequence[Mapping[str, Any]],
    targets: Sequence[Mapping[str, Any]] | None,
    skeleton: Iterable[Sequence[int]],
    file: PictureFile,
    threshold: float | None = None,
) -> None:
    """Draws a row for each of the first `MAX_ROWS` objects: the part of its image, its true and predicted keypoints.

    Predicted keypoints that the truth says are not there have no part in the picture, as in the scores.

    Args:
        images: N images of any sizes, see `draw_keypoints`; one for each object.
        predictions: N results, each `keypoints` (K, 2) and `scores` (K,), and `box` (4,) where there are no targets.
        targets: N dicts with `keypoints` (K, 3), of which the last is the visibility, and `box` (4,) of left, top,
            right and bottom; None where the truth is not known.
        skeleton: Pairs of keypoints (numbers) that a line joins.
        file: Where to save the picture; the suffix is the format.
        threshold: Score above which a predicted keypoint is drawn; None draws all.

    Raises:
        ValueError: if there is no image.
    """
    pictures = [as_picture(image) for image in images[:MAX_ROWS]]
    count = len(pictures)
    true = None if targets is None else [_pose(target) for target in targets[:count]]
    known: Sequence[Pose | None] = [None] * count if true is None else true
    predicted = [
        _seen(_pose(result), truth, threshold) for result, truth in zip(predictions[:count], known, strict=True)
    ]
    boxes = [as_array(result["box"], np.float64) for result in (predictions if targets is None else targets)]
    joined, crops = list(skeleton), []
    for number, (picture, box) in enumerate(zip(pictures, boxes, strict=False)):
        columns = [column for column in (true, predicted) if column is not None]
        left, top, right, bottom = _region(picture, box, *(column[number] for column in columns))
        crops.append(picture[top:bottom, left:right])
        for column in columns:
            column[number] = column[number]._replace(keypoints=column[number].keypoints - (left, top))

    def draw(panel: Axes, picture: np.ndarray, pose: Pose) -> None:
        show(panel, np.asarray(draw_keypoints(picture, pose.keypoints, pose.visibility, joined, pose.scores)))

    draw_comparison(crops, predicted, true, draw, file)


def _draw_pose(
    layer: Image.Image,
    points: np.ndarray,
    visibility: np.ndarray,
    scores: np.ndarray,
    skeleton: list[Sequence[int]],
    width: int,
) -> None:
    """Draws an object's keypoints (K, 2) in pixels of the layer, with lines of a width."""
    draw = ImageDraw.Draw(layer)
    opacity = (255 * (FAINTEST + (1 - FAINTEST) * scores)).round().astype(int)
    colors = [
        (*color, alpha) for color, alpha in zip(segmentation_palette(len(points)).tolist(), opacity, strict=True)
    ]
    for start, end in skeleton:
        if visibility[start] and visibility[end]:
            line = [*points[start], *points[end]]
            draw.line(line, (0, 0, 0, min(opacity[start], opacity[end])), 2 * width)
            draw.line(line, (*colors[end][:3], min(opacity[start], opacity[end])), width)
    radius = width * (1 if len(points) > MANY else 2)
    for (x, y), color, seen in zip(points, colors, visibility, strict=True):
        if seen:
            draw.circle((x, y), radius + width / 2, (0, 0, 0, color[3]))
            draw.circle((x, y), radius, color)
            if seen == HIDDEN:
                draw.circle((x, y), radius / 2, (255, 255, 255, color[3]))


def _pose(result: Mapping[str, Any]) -> Pose:
    """Returns the pose of a target with its visibility, or of a prediction with its scores."""
    keypoints = as_array(result["keypoints"], np.float64)
    if "scores" in result:
        return Pose(keypoints, None, as_array(result["scores"], np.float64))
    return Pose(keypoints[:, :2], keypoints[:, 2], None)


def _seen(pose: Pose, truth: Pose | None, threshold: float | None) -> Pose:
    """Returns a predicted pose with the visibility of its keypoints: whether they are sure and somewhere in truth."""
    seen = np.ones(len(pose.keypoints), dtype=bool)
    if threshold is not None and pose.scores is not None:
        seen &= pose.scores > threshold
    if truth is not None and truth.visibility is not None:
        seen &= truth.visibility > 0
    return pose._replace(visibility=np.where(seen, VISIBLE, 0))


def _region(picture: np.ndarray, box: np.ndarray, *poses: Pose) -> np.ndarray:
    """Returns left, top, right and bottom of the part of a picture (H, W, 3) that shows a box (4,) and keypoints."""
    labeled = [pose.keypoints if pose.visibility is None else pose.keypoints[pose.visibility > 0] for pose in poses]
    points = np.concatenate([box.reshape(2, 2), *labeled])
    low, high = points.min(axis=0), points.max(axis=0)
    margin = MARGIN * (high - low).max()
    size = np.array(picture.shape[1::-1])
    low = np.floor(low - margin).clip(0, size - 1)
    return np.concatenate([low, np.ceil(high + margin).clip(low + 1, size)]).astype(int)
