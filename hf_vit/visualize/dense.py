"""Figures of segmentation and depth next to their images."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..evaluation.base import as_array
from .colors import BAR_COLUMN, IGNORED, Axes, apply_color_map, draw_bar, segmentation_palette, value_range
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
    picture_rows,
    row_height,
    save,
    select_pictures,
    show,
)


OUTLINES = 500  # Longer side of an image divided by the thickness of an outline.
LETTER_SIZE, LETTER_WIDTH = 7, 0.065  # Font size of labels in points, and width per letter in inches.
MIN_LABELED = 0.04  # Minimum radius of a labeled segment, relative to the image.
DEPTH_COLORS, INVERSE_DEPTH_COLORS = "viridis_r", "viridis"  # Near pixels are bright.
ERROR_COLORS = "magma"
MAX_ERROR = 0.5  # Upper end of the color range of errors, relative to the target.


def overlay_segmentation(image: Picture, segmentation: Array, palette: np.ndarray, opacity: float = 0.7) -> np.ndarray:
    """Blend the colors of classes over an image, and return the result, (H, W, 3) uint8.

    Args:
        image: Image to draw over.
        segmentation: Class numbers (H, W). Values outside of the K classes, such as 255, become gray.
        palette: RGB color of each class, (K, 3) uint8.
        opacity: Opacity of the colors, from 0 to 1.

    Raises:
        ValueError: if the sizes of the image and the segmentation differ.
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
    """Draw each image next to overlays of its target and prediction, which are class numbers (H, W).

    For the other arguments and the errors, see `draw_comparison`.
    """
    palette = segmentation_palette(len(names))

    def draw(panel: Axes, picture: np.ndarray, labels: Array) -> None:
        show(panel, overlay_segmentation(picture, labels, palette))

    draw_comparison(images, predictions, targets, draw, file, names, lambda labels: as_array(labels, np.int64))


def overlay_segments(
    image: Picture, masks: Array, class_labels: Array, palette: np.ndarray, opacity: float = 0.65
) -> np.ndarray:
    """Blend segments in the colors of their classes over an image, with white outlines; return (H, W, 3) uint8.

    Args:
        image: Image to draw over.
        masks: Segment masks (M, H, W). If masks overlap, the last one is on top.
        class_labels: Class numbers (M,).
        palette: RGB color of each class, (K, 3) uint8.
        opacity: Opacity of the colors, from 0 to 1.

    Raises:
        ValueError: if the sizes of the image and the segmentation differ.
    """
    from scipy.ndimage import binary_erosion  # Imported here because scipy is optional

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
    """Draw each image next to overlays of its target and predicted segments, of which large ones are labeled.

    A target has `masks` (M, H, W) and `class_labels` (M,). A prediction also has `scores` (M,), and masks whose score
    is below `threshold` are not drawn, or it has a `segmentation` (H, W) of ids and `segments_info`, dicts with `id`,
    `label_id` and `score`. For the other arguments and the errors, see `draw_comparison`.
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
    """Return all segments of a segmentation, or the masks of a result whose score is at least `threshold`."""
    if "masks" in result:
        return Objects.of(result, "masks", np.bool_, threshold)
    info = result["segments_info"]
    ids, labels = (as_array([segment[name] for segment in info], np.int64) for name in ("id", "label_id"))
    masks = as_array(result["segmentation"], np.int64) == ids[:, None, None]
    return Objects(masks, labels, as_array([segment["score"] for segment in info], np.float64))


def _write_label(panel: Axes, mask: np.ndarray, label: str) -> None:
    """Write a label at the widest place of a segment (H, W), if there is room."""
    from scipy.ndimage import distance_transform_edt

    # Distance of each pixel to the border of the segment or image
    distance = distance_transform_edt(np.pad(mask, 1))[1:-1, 1:-1]
    if distance.max() < MIN_LABELED * min(mask.shape):
        return
    y, x = np.unravel_index(distance.argmax(), mask.shape)
    room = min(COLUMN_WIDTH, row_height(mask) * mask.shape[1] / mask.shape[0])  # Panel width in inches.
    share = LETTER_WIDTH * (len(label) + 1) / room  # Text width relative to the image.
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
    """Draw each image next to its target and prediction in the same colors, and the error.

    A row has the color range of its target or, if there is none, of its prediction. Pixels without a valid depth
    are gray. Relative depth has no common scale: each map has its own color range, and no error is drawn.

    Args:
        images: Images, of which the first are drawn.
        predictions: Depth (H, W) in meters of each image, or relative inverse depth.
        targets: Depth (H, W) in meters of each image; only finite values above 0 are valid. None if it is unknown.
        file: Output file.
        relative: Whether predictions are relative inverse depth.

    Raises:
        ValueError: if there is no image, or an image and its target or prediction differ in size.
    """
    pictures = select_pictures(images)
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
            show(row[-2], apply_color_map(error, valid & np.isfinite(error), (0, MAX_ERROR), ERROR_COLORS))
            draw_bar(row[-1], (0, MAX_ERROR), ERROR_COLORS, "share of the truth")
    save(figure, file)


def _draw_maps(panels: np.ndarray, maps: Mapping[str, np.ndarray], relative: bool) -> None:
    """Draw the target (if available), the prediction and their color bar."""
    valid = {name: is_valid(values) for name, values in maps.items()}
    if relative:  # Targets are depth; predictions are inverse depth and may be negative.
        maps = {name: 1 / np.where(valid[name], own, 1.0) if name == "target" else own for name, own in maps.items()}
        valid["prediction"] = np.isfinite(maps["prediction"])
    spans = [value_range(values[valid[name]]) for name, values in maps.items()]
    colors = INVERSE_DEPTH_COLORS if relative else DEPTH_COLORS
    for panel, (name, values), span in zip(panels, maps.items(), spans, strict=False):
        show(panel, apply_color_map(values, valid[name], span if relative else spans[0], colors))
    if relative:
        draw_bar(panels[len(maps)], (0, 1), colors, "relative", {0: "far", 1: "near"})
    else:
        draw_bar(panels[len(maps)], spans[0], colors, "meters")


def is_valid(depth: np.ndarray) -> np.ndarray:
    """Return a mask of valid depths: above 0 and finite."""
    return np.isfinite(depth) & (depth > 0)
