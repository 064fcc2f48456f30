"""Figures of boxes and of keypoints with skeletons. Shape: K keypoints."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from ..evaluation.base import as_array
from .colors import IGNORED, Axes, segmentation_palette
from .figures import (
    MAX_ROWS,
    Array,
    Objects,
    Picture,
    PictureFile,
    as_picture,
    draw_comparison,
    enlarge_small_image,
    fit_line,
    line_width,
    show,
)


Rectangle = tuple[float, float, float, float]  # Left, top, right and bottom

LETTER_SHARE = 1 / 30  # Font size relative to the longer side of the image.
BRIGHT = 140  # Gray level of a color above which text on it is black instead of white.
GRAY = np.array([0.299, 0.587, 0.114])  # Weights of red, green and blue in the gray level.
HIDDEN, VISIBLE = 1, 2  # Visibility of labeled keypoints; 0 means unlabeled.
SMOOTH = 2  # Supersampling factor for drawing keypoints.
FAINTEST = 0.4  # Opacity of a keypoint with score 0.
MANY = 30  # Keypoints of objects with more keypoints than this are drawn smaller.
MARGIN = 0.15  # Margin around an object, relative to its longer side.


def draw_boxes(
    image: Picture, boxes: Array, class_labels: Array, names: Sequence[str], scores: Array | None = None
) -> Image.Image:
    """Draw boxes in the colors of their classes over an image. Boxes of higher score are on top.

    Each box is labeled with its class and score, unless the box is small, or the label would cover a label of higher
    score.

    Args:
        image: Image to draw over. A small image is enlarged to make room for text.
        boxes: Boxes (N, 4) as left, top, right and bottom in pixels of the image.
        class_labels: Class numbers (N,) of the boxes.
        names: The K class names.
        scores: Scores (N,) in [0, 1]; None for targets.
    """
    picture, scale = enlarge_small_image(image)
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
    """Draw each image next to its target boxes, and its predicted boxes whose score is at least `threshold`.

    Targets and predictions have `boxes` (M, 4) and `class_labels` (M,), predictions also `scores` (M,). For the other
    arguments and the errors, see `draw_comparison`.
    """

    def draw(panel: Axes, picture: np.ndarray, objects: Objects) -> None:
        show(panel, np.asarray(draw_boxes(picture, objects.shapes, objects.labels, names, objects.scores)))

    predicted = [Objects.of(result, "boxes", np.float64, threshold) for result in predictions[:MAX_ROWS]]
    true = None if targets is None else [Objects.of(target, "boxes", np.float64, 0) for target in targets[:MAX_ROWS]]
    draw_comparison(images, predicted, true, draw, file, names, lambda objects: objects.labels)


def _write_label(picture: Image.Image, box: np.ndarray, text: str, color: np.ndarray, taken: list[Rectangle]) -> None:
    """Write text above, inside or below a box (4,), and record the covered area."""
    draw, pad = ImageDraw.Draw(picture), line_width(picture)
    text, font = fit_line(text, picture.width - 2 * pad, LETTER_SHARE * max(picture.size))
    left, top, right, bottom = draw.textbbox((0, 0), text, font)
    width, height = right - left + 2 * pad, bottom - top + 2 * pad
    if (box[2:] - box[:2]).min() < height:
        return
    x = min(max(0, box[0]), max(0, picture.width - width))
    for y in (box[1] - height, box[1], box[3]):
        place = (x, y, x + width, y + height)
        if 0 <= y <= picture.height - height and not any(_overlap(place, other) for other in taken):
            draw.rectangle(place, fill=tuple(color))
            draw.text((x + pad - left, y + pad - top), text, "black" if color @ GRAY > BRIGHT else "white", font)
            taken.append(place)
            return


def _overlap(one: Rectangle, other: Rectangle) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


class Pose(NamedTuple):
    """Keypoints (K, 2) of an object, with the visibility (K,) of a target or the scores (K,) of a prediction."""

    keypoints: np.ndarray
    visibility: Any = None
    scores: Any = None


def draw_keypoints(
    image: Picture,
    keypoints: Array,
    visibility: Array | None = None,
    skeleton: Iterable[Sequence[int]] = (),
    scores: Array | None = None,
    boxes: Array | None = None,
) -> Image.Image:
    """Draw the keypoints of one or several objects over an image, in one color per keypoint, with lines between them.

    Args:
        image: Image to draw over. A small image is enlarged.
        keypoints: x and y in pixels, (K, 2) for one object or (N, K, 2); the center of the first pixel is at (0, 0).
        visibility: Visibility (K,) or (N, K): 2 for visible keypoints (default), 1 for hidden ones, which are drawn as
            rings, and 0 for unlabeled ones, which are not drawn.
        skeleton: Pairs of keypoint numbers that are joined by a line.
        scores: Scores (K,) or (N, K) in [0, 1]. Keypoints of lower score are more transparent.
        boxes: Left, top, right and bottom in pixels, (4,) or (N, 4). Boxes are drawn in gray below the keypoints.
    """
    picture, scale = enlarge_small_image(image)
    outlines = np.zeros((0, 4)) if boxes is None else scale * as_array(boxes, np.float64).reshape(-1, 4)
    for outline in outlines.tolist():
        ImageDraw.Draw(picture).rectangle(outline, outline=IGNORED)
    points = as_array(keypoints, np.float64)
    points = (points.reshape(-1, *points.shape[-2:]) + 0.5) * scale * SMOOTH  # (N, K, 2)
    shape, joined = points.shape[:2], list(skeleton)
    seen = np.full(shape, VISIBLE) if visibility is None else as_array(visibility, np.int64).reshape(shape)
    sure = np.ones(shape) if scores is None else as_array(scores, np.float64).reshape(shape).clip(0, 1)
    layer = Image.new("RGBA", (picture.width * SMOOTH, picture.height * SMOOTH))
    for pose in zip(points, seen, sure, strict=True):
        _draw_pose(layer, Pose(*pose), joined, SMOOTH * line_width(picture))
    return Image.alpha_composite(picture.convert("RGBA"), layer.resize(picture.size)).convert("RGB")


def draw_poses(
    images: Sequence[Picture],
    predictions: Sequence[Mapping[str, Any]],
    targets: Sequence[Mapping[str, Any]] | None,
    skeleton: Iterable[Sequence[int]],
    file: PictureFile,
    threshold: float | None = None,
) -> None:
    """Draw the image region of each object next to its target keypoints and its predicted keypoints.

    Predicted keypoints that are unlabeled in the target are not drawn, because scores ignore them.

    Args:
        images: Image of each object; at most `MAX_ROWS` are drawn.
        predictions: Results with `keypoints` (K, 2), `scores` (K,) and, if there are no targets, `box` (4,).
        targets: Dictionaries with `keypoints` (K, 3) as x, y and visibility, and `box` (4,) as left, top, right and
            bottom; None if targets are unknown.
        skeleton: Pairs of keypoint numbers that are joined by a line.
        file: Output file.
        threshold: Score above which predicted keypoints are drawn; None draws all.

    Raises:
        ValueError: if there is no image.
    """
    joined, crops, true, predicted = list(skeleton), list[Picture](), list[Pose](), list[Pose]()
    for number, picture in enumerate(map(as_picture, images[:MAX_ROWS])):
        result, target = predictions[number], None if targets is None else targets[number]
        truths = [] if target is None else [_pose(target)]
        pose = _seen(_pose(result), truths, threshold)
        box = as_array((result if target is None else target)["box"], np.float64)
        left, top, right, bottom = _region(picture, box, *truths, pose)
        crops.append(picture[top:bottom, left:right])
        true += [truth._replace(keypoints=truth.keypoints - (left, top)) for truth in truths]
        predicted.append(pose._replace(keypoints=pose.keypoints - (left, top)))

    def draw(panel: Axes, picture: np.ndarray, pose: Pose) -> None:
        show(panel, np.asarray(draw_keypoints(picture, pose.keypoints, pose.visibility, joined, pose.scores)))

    draw_comparison(crops, predicted, true or None, draw, file)


def _draw_pose(layer: Image.Image, pose: Pose, skeleton: list[Sequence[int]], width: int) -> None:
    """Draw the keypoints of an object, in pixels of the layer, with lines of a given width."""
    draw, points, seen = ImageDraw.Draw(layer), pose.keypoints, pose.visibility
    opacity = (255 * (FAINTEST + (1 - FAINTEST) * pose.scores)).round().astype(int)
    colors = segmentation_palette(len(points)).tolist()
    for start, end in skeleton:
        if seen[start] and seen[end]:
            line, alpha = [*points[start], *points[end]], min(opacity[start], opacity[end])
            draw.line(line, (0, 0, 0, alpha), 2 * width)
            draw.line(line, (*colors[end], alpha), width)
    radius = width * (1 if len(points) > MANY else 2)
    for number in np.flatnonzero(seen):
        place, alpha = tuple(points[number]), opacity[number]
        draw.circle(place, radius + width / 2, (0, 0, 0, alpha))
        draw.circle(place, radius, (*colors[number], alpha))
        if seen[number] == HIDDEN:
            draw.circle(place, radius / 2, (255, 255, 255, alpha))


def _pose(result: Mapping[str, Any]) -> Pose:
    """Return the pose of a target with visibility, or of a prediction with scores."""
    keypoints = as_array(result["keypoints"], np.float64)
    if "scores" in result:
        return Pose(keypoints, scores=as_array(result["scores"], np.float64))
    return Pose(keypoints[:, :2], visibility=keypoints[:, 2])


def _seen(pose: Pose, truths: Sequence[Pose], threshold: float | None) -> Pose:
    """Mark predicted keypoints as visible if their score passes the threshold and the target, if any, labels them."""
    seen = np.ones(len(pose.keypoints), dtype=bool) if threshold is None else pose.scores > threshold
    for truth in truths:
        seen = seen & (truth.visibility > 0)
    return pose._replace(visibility=np.where(seen, VISIBLE, 0))


def _region(picture: np.ndarray, box: np.ndarray, *poses: Pose) -> np.ndarray:
    """Return left, top, right and bottom of the part of a picture (H, W, 3) that contains a box (4,) and keypoints."""
    points = np.concatenate([box.reshape(2, 2), *(pose.keypoints[pose.visibility > 0] for pose in poses)])
    low, high = points.min(axis=0), points.max(axis=0)
    margin = MARGIN * (high - low).max()
    size = np.array(picture.shape[1::-1])
    low = np.floor(low - margin).clip(0, size - 1)
    return np.concatenate([low, np.ceil(high + margin).clip(low + 1, size)]).astype(int)
