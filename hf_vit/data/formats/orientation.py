"""EXIF orientations: images are always turned upright, and with them the annotations of the stored image.

Shapes: I images, N objects, K points, H W pixels.
"""

from typing import Literal, get_args

import numpy as np
from datasets import DatasetDict
from torch import Tensor
from transformers.utils import logging

from .files import image_headers


logger = logging.get_logger(__name__)
AnnotationOrientation = Literal["auto", "stored", "displayed"]
TURN = "turn"  # the column of the EXIF orientation by which pixelwise targets are to be turned


def find_turns(
    headers: np.ndarray, given: np.ndarray, choice: AnnotationOrientation, split: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return by which EXIF orientation (I,) to turn annotations, 1 for none, and which size (I, 2) they refer to."""
    # Of the headers of images (I, 3), and the sizes (I, 2) that annotations give, 0 if they give none, or the headers
    # of masks (I, 3), which their own EXIF orientation alone turns. "stored" turns all annotations, "displayed" none,
    # "auto" those of the stored size. If the size does not tell, "auto" means "displayed", with a warning.
    if choice not in get_args(AnnotationOrientation):
        raise ValueError(f"annotation_orientation={choice!r} is unknown. Choose 'auto', 'stored' or 'displayed'.")
    stored, sizes = headers[:, :2], given[:, :2]
    displayed = upright_sizes(stored, headers[:, 2])
    is_tagged = (headers[:, 2] > 1) & (given[:, 2:] <= 1).all(axis=1)
    fits, fits_displayed = ((sizes <= 0).any(axis=1) | (sizes == own).all(axis=1) for own in (stored, displayed))
    is_turned = is_tagged & fits & (~fits_displayed if choice == "auto" else choice == "stored")
    if choice == "auto" and (count := int((is_tagged & fits & fits_displayed).sum())):
        logger.warning(
            "%d of %d %s images are turned by their EXIF orientation, and the size does not tell whether their "
            "annotations are of the stored or of the displayed image. They are taken for those of the displayed one; "
            "set annotation_orientation to 'stored' if they are not, or to 'displayed' if they are.",
            *(count, len(headers), split),
        )
    frames = np.where(is_turned[:, None], stored, displayed)
    return np.where(is_turned, headers[:, 2], 1), np.where((fits | fits_displayed)[:, None], frames, sizes)


def upright_sizes(sizes: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """Return sizes (I, 2), width and height, after a turn by EXIF orientations (I,)."""
    return np.where(turns[:, None] > 4, sizes[:, ::-1], sizes)


def reversed_axes(turns: np.ndarray | int) -> np.ndarray:
    """Return (..., 2) bool, whether EXIF orientations reverse x and y, after they have swapped them from 5 on."""
    return np.stack([np.isin(turns, (2, 3, 6, 7)), np.isin(turns, (3, 4, 7, 8))], axis=-1)


def turn_points(points: np.ndarray, turns: np.ndarray, sizes: np.ndarray, last: int = 0) -> np.ndarray:
    """Return places (N, K, 2), x and y in images of sizes (N, 2), after a turn by EXIF orientations (N,).

    A reversed axis of a length ends at its length - `last`: 1 for the centers of pixels, 0 for edges.
    """
    points = np.where(turns[:, None, None] > 4, points[..., ::-1], points)
    return np.where(
        reversed_axes(turns)[:, None], upright_sizes(sizes, turns)[:, None] - last - points, points
    )  # (N, K, 2)


def turn_map(values: Tensor, turn: int) -> Tensor:
    """Return a map (..., H, W) after a turn by an EXIF orientation."""
    return (values.mT if turn > 4 else values).flip((-1 - np.flatnonzero(reversed_axes(turn))).tolist())


def with_turns(splits: DatasetDict, column: str | None, choice: AnnotationOrientation) -> DatasetDict:
    """Add the column `TURN` to splits of which pixelwise targets are to be turned, see `find_turns`.

    Targets are the images in a column, or of the columns `width` and `height` if that is `None`.
    """
    found = DatasetDict()
    for split, rows in splits.items():
        headers = image_headers(rows)
        given, tagged = np.zeros_like(headers), np.flatnonzero(headers[:, 2] > 1)
        if column is None:
            given[:, :2] = np.array([rows["width"][:], rows["height"][:]]).T
        else:
            given[tagged] = image_headers(rows.select(tagged), column)
        turns, _ = find_turns(headers, given, choice, split)
        found[split] = rows.add_column(TURN, turns) if (turns > 1).any() else rows
    return found
