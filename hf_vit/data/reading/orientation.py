"""EXIF orientation: images are loaded upright, and annotations that refer to the stored image are turned as well.

Shapes: I images, N objects, K points, H and W height and width in pixels.
"""

from typing import Literal, get_args

import numpy as np
from datasets import DatasetDict
from torch import Tensor
from transformers.utils import logging

from .files import image_headers


logger = logging.get_logger(__name__)
AnnotationOrientation = Literal["auto", "stored", "displayed"]
TURN = "turn"  # name of the column with the EXIF orientation to apply to masks and depth maps


def choose_orientations(
    headers: np.ndarray, given: np.ndarray, choice: AnnotationOrientation, split: str
) -> tuple[np.ndarray, np.ndarray]:
    """Choose the EXIF orientations to apply to the annotations of a split.

    Args:
        headers: Headers of images (I, 3): width, height, and EXIF orientation.
        given: Image sizes (I, 2) in the annotations, 0 if not given, or headers of masks (I, 3). Masks that have an
            EXIF orientation in their file are not changed.
        choice: "stored" to rotate all annotations, "displayed" to rotate none, or "auto" to rotate annotations whose
            size equals the stored image size. If stored and displayed size are equal, "auto" warns and rotates none.
        split: Name of the split in warnings.

    Returns:
        The EXIF orientation to apply to each annotation (I,), 1 for none, and the image size of the annotation (I, 2).
    """
    if choice not in get_args(AnnotationOrientation):
        raise ValueError(f"annotation_orientation={choice!r} is unknown. Use 'auto', 'stored' or 'displayed'.")
    stored, sizes = headers[:, :2], given[:, :2]
    displayed = upright_sizes(stored, headers[:, 2])
    is_tagged = (headers[:, 2] > 1) & (given[:, 2:] <= 1).all(axis=1)
    fits, fits_displayed = ((sizes <= 0).any(axis=1) | (sizes == own).all(axis=1) for own in (stored, displayed))
    is_turned = is_tagged & fits & (~fits_displayed if choice == "auto" else choice == "stored")
    if choice == "auto" and (count := int((is_tagged & fits & fits_displayed).sum())):
        logger.warning(
            "%d of %d %s images have an EXIF orientation, and their size does not show whether annotations refer to "
            "the stored or to the displayed image. The displayed image is assumed. Set annotation_orientation to "
            "'stored' if this is wrong, or to 'displayed' to disable this warning.",
            *(count, len(headers), split),
        )
    frames = np.where(is_turned[:, None], stored, displayed)
    return np.where(is_turned, headers[:, 2], 1), np.where((fits | fits_displayed)[:, None], frames, sizes)


def upright_sizes(sizes: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """Return widths and heights (I, 2) after applying EXIF orientations (I,)."""
    return np.where(turns[:, None] > 4, sizes[:, ::-1], sizes)


def flipped_axes(turns: np.ndarray | int) -> np.ndarray:
    """Return (..., 2) bool: whether EXIF orientations reverse x and y. Orientations above 4 first swap x and y."""
    return np.stack([np.isin(turns, (2, 3, 6, 7)), np.isin(turns, (3, 4, 7, 8))], axis=-1)


def orient_points(points: np.ndarray, turns: np.ndarray, sizes: np.ndarray, last: int = 0) -> np.ndarray:
    """Apply EXIF orientations (N,) to points (N, K, 2) in images of width and height `sizes` (N, 2).

    On a reversed axis, x becomes `size - last - x`. Use `last=1` if integer coordinates are pixel centers, and
    `last=0` if they are pixel edges.
    """
    points = np.where(turns[:, None, None] > 4, points[..., ::-1], points)
    return np.where(
        flipped_axes(turns)[:, None], upright_sizes(sizes, turns)[:, None] - last - points, points
    )  # (N, K, 2)


def orient_map(values: Tensor, turn: int) -> Tensor:
    """Apply an EXIF orientation to a map (..., H, W)."""
    return (values.mT if turn > 4 else values).flip((-1 - np.flatnonzero(flipped_axes(turn))).tolist())


def add_turn_column(splits: DatasetDict, column: str | None, choice: AnnotationOrientation) -> DatasetDict:
    """Add the column `TURN` to splits with pixelwise targets that need an EXIF orientation, see `choose_orientations`.

    Target sizes come from the images in `column` or, if it is `None`, from the columns `width` and `height`.
    """
    found = DatasetDict()
    for split, rows in splits.items():
        headers = image_headers(rows)
        given, tagged = np.zeros_like(headers), np.flatnonzero(headers[:, 2] > 1)
        if column is None:
            given[:, :2] = np.array([rows["width"][:], rows["height"][:]]).T
        else:
            given[tagged] = image_headers(rows.select(tagged), column)
        turns, _ = choose_orientations(headers, given, choice, split)
        found[split] = rows.add_column(TURN, turns) if (turns > 1).any() else rows
    return found
