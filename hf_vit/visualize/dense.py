"""Segmentation and depth over images."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..evaluation.base import as_array
from .colors import BAR_COLUMN, IGNORED, Axes, draw_bar, in_colors, segmentation_palette, span_of
from .figures import (
    COLUMN_WIDTH,
    MAX_ROWS,
    Array,
    Objects,
    Picture,
    PictureFile,
    as_picture,
    check_size,
    draw_comparison,
    first_rows,
    picture_rows,
    row_height,
    save,
    show,
)


OUTLINES = 500  # outlines that fit next to each other into the longer side of an image
LETTER_SIZE, LETTER_WIDTH = 7, 0.065  # points, inches
MIN_LABELED = 0.04  # radius inside a segment, as a share of the image's shorter side, that has room for a label
DEPTH_COLORS, INVERSE_DEPTH_COLORS = "viridis_r", "viridis"  # near is bright
ERROR_COLORS = "magma"
MAX_ERROR = 0.5  # of the truth: larger errors are as bright as this one


def overlay_segmentation(image: Picture, segmentation: Array, palette: np.ndarray, opacity: float = 0.7) -> np.ndarray:
    """Lays the colors of classes over an image.

    Args:
        image: PIL image, (H, W, 3) array or (C, H, W) tensor of uint8.
        segmentation: (H, W) class numbers. What is none of the K classes, such as 255, becomes gray.
        palette: (K, 3) uint8.
        opacity: 0 shows the image alone, 1 the colors alone.

    Returns:
        (H, W, 3) uint8.

    Raises:
        ValueError: if the sizes differ.
    """
    picture, labels = as_picture(image), as_array(segmentation, np.int64)
    check_size(picture, labels, "segmentation")
    colors = np.vstack([palette, IGNORED])
    labels = np.where((labels >= 0) & (labels < len(palette)), labels, len(palette))
    return ((1 - opacity) * picture + opacity * colors[labels]).round().astype(np.uint8)


def draw_segmentation(
    images: Sequence[Picture],
    predictions: Sequence[Array],
    targets: Sequence[Array] | None,
    names: Sequence[str],
    file: PictureFile,
) -> None:
    """Draws a row for each of the first `MAX_ROWS` images: the image, the truth and the prediction over it.

    Args:
        images: N images of any sizes, see `overlay_segmentation`.
        predictions: N maps (H, W) of class numbers.
        targets: N maps (H, W) of class numbers; None where the truth is not known.
        names: The K class names. The legend shows those that occur.
        file: Where to save the picture; the suffix is the format.

    Raises:
        ValueError: if there is no image, or sizes differ.
    """
    palette = segmentation_palette(len(names))

    def draw(panel: Axes, picture: np.ndarray, labels: Array) -> None:
        show(panel, overlay_segmentation(picture, labels, palette))

    draw_comparison(images, predictions, targets, draw, file, names, lambda labels: as_array(labels, np.int64))


def overlay_segments(
    image: Picture, masks: Array, class_labels: Array, palette: np.ndarray, opacity: float = 0.65
) -> np.ndarray:
    """Lays segments in the colors of their classes over an image, each with a white outline inside.

    Args:
        image: PIL image, (H, W, 3) array or (C, H, W) tensor of uint8.
        masks: (M, H, W). Where they overlap, the last is on top.
        class_labels: (M,) class numbers.
        palette: (K, 3) uint8.
        opacity: 0 shows the image alone, 1 the colors alone.

    Returns:
        (H, W, 3) uint8.

    Raises:
        ValueError: if the sizes differ.
    """
    from scipy.ndimage import binary_erosion  # here, as training needs this package but not always a picture

    picture, segments = as_picture(image).copy(), as_array(masks, np.bool_)
    check_size(picture, segments, "masks")
    thickness = max(1, round(max(picture.shape) / OUTLINES))
    original = picture.astype(float)
    for mask, label in zip(segments, as_array(class_labels, np.int64), strict=True):
        picture[mask] = ((1 - opacity) * original[mask] + opacity * palette[label]).round()
        picture[mask & ~binary_erosion(mask, iterations=thickness, border_value=1)] = 255
    return picture


def draw_panoptic(
    images: Sequence[Picture],
    predictions: Sequence[Mapping[str, Any]],
    targets: Sequence[Mapping[str, Any]] | None,
    names: Sequence[str],
    file: PictureFile,
    threshold: float = 0.5,
) -> None:
    """Draws a row for each of the first `MAX_ROWS` images: the image, the true and the predicted segments over it.

    Args:
        images: N images of any sizes, see `overlay_segments`.
        predictions: N results, each `segmentation` (H, W) ids with `segments_info`, a dict with `id`, `label_id` and
            `score` for each segment; or `masks` (M, H, W), `class_labels` (M,) and `scores` (M,).
        targets: N dicts with `masks` (M, H, W) and `class_labels` (M,); None where the truth is not known.
        names: The K class names. Segments bear them where there is room, the legend shows those that occur.
        file: Where to save the picture; the suffix is the format.
        threshold: Lowest score of predicted `masks` that are drawn; of a segmentation all are.

    Raises:
        ValueError: if there is no image, or sizes differ.
    """
    palette = segmentation_palette(len(names))

    def draw(panel: Axes, picture: np.ndarray, segments: Objects) -> None:
        show(panel, overlay_segments(picture, segments.shapes, segments.labels, palette))
        for mask, text in zip(segments.shapes, segments.texts(names), strict=True):
            _write_label(panel, mask, text)

    predicted = [_segments(result, threshold) for result in predictions[:MAX_ROWS]]
    true = None if targets is None else [_segments(target, threshold) for target in targets[:MAX_ROWS]]
    draw_comparison(images, predicted, true, draw, file, names, lambda segments: segments.labels)


def _segments(result: Mapping[str, Any], threshold: float) -> Objects:
    """Returns the segments of a result: all of a segmentation, of masks those whose score reaches a threshold."""
    if "masks" in result:
        return Objects.of(result, "masks", np.bool_, threshold)
    info = result["segments_info"]
    ids, labels = (as_array([segment[name] for segment in info], np.int64) for name in ("id", "label_id"))
    masks = as_array(result["segmentation"], np.int64) == ids[:, None, None]
    return Objects(masks, labels, as_array([segment["score"] for segment in info], np.float64))


def _write_label(panel: Axes, mask: np.ndarray, label: str) -> None:
    """Write into the middle of a segment (H, W), where it is widest, if there is room."""
    from scipy.ndimage import distance_transform_edt

    distance = distance_transform_edt(np.pad(mask, 1))[1:-1, 1:-1]  # to the outside, also of the image
    if distance.max() < MIN_LABELED * min(mask.shape):
        return
    y, x = np.unravel_index(distance.argmax(), mask.shape)
    room = min(COLUMN_WIDTH, row_height(mask) * mask.shape[1] / mask.shape[0])  # inches across, of a high image less
    share = LETTER_WIDTH * (len(label) + 1) / room  # of the image's width
    width = min(1, share) * mask.shape[1]
    x = min(max(x, width / 2), mask.shape[1] - width / 2)
    box = {"boxstyle": "round,pad=0.15", "facecolor": "black", "alpha": 0.6, "linewidth": 0}
    look: dict[str, Any] = {"color": "white", "ha": "center", "va": "center", "bbox": box, "clip_on": True}
    panel.text(x, y, label, fontsize=LETTER_SIZE / max(1, share), parse_math=False, **look)


def draw_depth(
    images: Sequence[Picture],
    predictions: Sequence[Array],
    targets: Sequence[Array] | None,
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
    has_error = targets is not None and not relative
    titles = ["image", *["truth"] * (targets is not None), "prediction", "", *["error", ""] * has_error]
    figure, panels = picture_rows(pictures, titles, [1.0 if title else BAR_COLUMN for title in titles])
    for number, (row, picture) in enumerate(zip(panels, pictures, strict=True)):
        columns = {"target": targets, "prediction": predictions}
        maps = {name: as_array(own[number], np.float64) for name, own in columns.items() if own is not None}
        for name, values in maps.items():
            check_size(picture, values, name)
        show(row[0], picture)
        _draw_maps(row[1:], maps, relative)
        if has_error:
            truth, valid = maps["target"], is_valid(maps["target"])
            error = np.abs(maps["prediction"] - truth) / np.where(valid, truth, 1.0)
            show(row[-2], in_colors(error, valid & np.isfinite(error), (0, MAX_ERROR), ERROR_COLORS))
            draw_bar(row[-1], (0, MAX_ERROR), ERROR_COLORS, "share of the truth")
    save(figure, file)


def _draw_maps(panels: np.ndarray, maps: Mapping[str, np.ndarray], relative: bool) -> None:
    """Draws the target, if there is one, the prediction and their color bar."""
    valid = {name: is_valid(values) for name, values in maps.items()}
    if relative:  # a target is depth, a prediction inverse depth of any sign
        maps = {name: 1 / np.where(valid[name], own, 1.0) if name == "target" else own for name, own in maps.items()}
        valid["prediction"] = np.isfinite(maps["prediction"])
    spans = [span_of(values[valid[name]]) for name, values in maps.items()]
    colors = INVERSE_DEPTH_COLORS if relative else DEPTH_COLORS
    for panel, (name, values), span in zip(panels, maps.items(), spans, strict=False):
        show(panel, in_colors(values, valid[name], span if relative else spans[0], colors))
    if relative:
        draw_bar(panels[len(maps)], (0, 1), colors, "relative", {0: "far", 1: "near"})
    else:
        draw_bar(panels[len(maps)], spans[0], colors, "meters")


def is_valid(depth: np.ndarray) -> np.ndarray:
    """Returns where depth is known: above 0 and finite."""
    return np.isfinite(depth) & (depth > 0)
