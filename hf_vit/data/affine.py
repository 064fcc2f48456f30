"""Crops of objects by any affine map, so that pixels are resampled once.

Coordinates are continuous, with the centre of pixel i at i, as for the crops that the image processor makes.
Shapes: C channels, H W pixels of an image, h w pixels of a crop, K keypoints.
"""

import torch
from torch import Tensor

from ..image_crops_hf_vit import crop_regions, keep_inside, sample_pixels


def crop_matrix(box: Tensor, size: tuple[int, int], padding: float) -> Tensor:
    """Returns the affine map (2, 3) float64 from an image to the crop of a box that the image processor makes.

    Args:
        box: (4,), x1, y1, x2, y2 in pixels.
        size: Height and width of the crop in pixels.
        padding: How many times wider and higher than the box what is cut out is.

    Raises:
        ValueError: if the box is a point or not finite.
    """
    [region] = crop_regions(box[None], size, padding)  # (4,)
    span = region[2:] - region[:2]
    if not (torch.isfinite(span) & (span > 0)).all():
        raise ValueError(f"The box {box.tolist()} has no size. Boxes are x1, y1, x2, y2 with x1 < x2 and y1 < y2.")
    scale = torch.tensor((size[1] - 1, size[0] - 1), dtype=torch.float64) / span
    return torch.cat((scale.diag(), (-scale * region[:2])[:, None]), dim=1)


def invert_matrix(matrix: Tensor) -> Tensor:
    """Returns the map back (2, 3) of an affine map (2, 3)."""
    linear = torch.linalg.inv(matrix[:, :2])
    return torch.cat((linear, -linear @ matrix[:, 2:]), dim=1)


def apply_matrix(points: Tensor, matrix: Tensor) -> Tensor:
    """Returns where an affine map (2, 3) takes points (..., 2), x and y in pixels, in their own dtype."""
    return (points.to(matrix.dtype) @ matrix[:, :2].T + matrix[:, 2]).to(points.dtype)


def crop_keypoints(keypoints: Tensor, matrix: Tensor, size: tuple[int, int]) -> Tensor:
    """Returns where keypoints of an image lie in a crop.

    Args:
        keypoints: (K, 3), x and y in pixels of the image, and visibility, 0 where a keypoint is not labelled.
        matrix: (2, 3), from the image to the crop.
        size: Height and width of the crop in pixels.

    Returns:
        (K, 3) in pixels of the crop, all zeros for keypoints without label and those on no pixel of the crop.
    """
    return keep_inside(torch.cat((apply_matrix(keypoints[:, :2], matrix), keypoints[:, 2:]), dim=1), size)


def warp(image: Tensor, matrix: Tensor, size: tuple[int, int]) -> Tensor:
    """Returns the crop of an image that an affine map leads to, bilinear, black outside the image.

    Pixels are not averaged where the image shrinks, as in the crops of the image processor.

    Args:
        image: (C, H, W), uint8 or float32.
        matrix: (2, 3), from the image to the crop, as `crop_matrix` returns it, maybe times another.
        size: Height h and width w of the crop in pixels.

    Returns:
        (C, h, w) in dtype of `image`.
    """
    inverse = invert_matrix(matrix)
    rows, columns = (torch.arange(length, dtype=torch.float64) for length in size)
    # (h, w), where the pixels of the crop lie in the image
    x, y = (a * columns + (b * rows + c)[:, None] for a, b, c in inverse.tolist())
    return sample_pixels(image, x, y)
