"""Crops of single objects for keypoints: the region of an image that they show, and the points in them.

A coordinate is continuous, with the center of pixel i at i, as in ViTPose and COCO's keypoints. A crop shows a region
whose ends are the centers of its outermost pixels. So points go to the crop, to heatmaps of any size and back without
a bias ("UDP", https://arxiv.org/abs/1911.07524).

Shapes: N objects, K keypoints, C channels, H W pixels of an image, h w of a crop.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .image_targets import check_count, read_boxes


EDGE_TOLERANCE = 1e-3  # pixels, above the rounding of coordinates


def read_object_boxes(boxes: Any, sizes: Sequence[tuple[int, int] | None]) -> list[Tensor]:
    """Returns the boxes (N, 4) of each image, left, top, right and bottom in pixels, checked."""
    # None stands for the whole image, of one image or of all; among `sizes`, (height, width), for one that is unknown.
    given = [None] * len(sizes) if boxes is None else boxes
    check_count(given, "object_boxes", sizes)
    return [
        _own_boxes(own, size, f"object_boxes[{index}]")
        for index, (own, size) in enumerate(zip(given, sizes, strict=True))
    ]


def _own_boxes(boxes: Any, size: tuple[int, int] | None, name: str) -> Tensor:
    if boxes is None:
        if size is None:
            raise ValueError(f"{name} is None, the whole image, whose size is not known. Pass target_sizes.")
        return torch.tensor([[0.0, 0.0, size[1], size[0]]])
    values = read_boxes(boxes, name)
    for index, (left, top, right, bottom) in enumerate(values.tolist()):
        if right == left or bottom == top:
            raise ValueError(f"{name}[{index}] is {values[index].tolist()}, of no area. Leave it out or enlarge it.")
        if size is not None and (right <= 0 or bottom <= 0 or left >= size[1] or top >= size[0]):
            raise ValueError(
                f"{name}[{index}] is {values[index].tolist()}, outside of its image of {size[1]} x {size[0]} pixels. "
                "Boxes are (left, top, right, bottom) in pixels of the image as it is given."
            )
    return values


def read_keypoints(keypoints: Any, counts: list[int]) -> list[Tensor]:
    """Returns the keypoints (N, K, 3) float32 of each image's objects: x, y in pixels and visibility, checked."""
    # An image with one object may have (K, 3); `counts` are the numbers N of objects.
    check_count(keypoints, "keypoints", counts)
    read = [
        _own_keypoints(own, count, f"keypoints[{i}]")
        for i, (own, count) in enumerate(zip(keypoints, counts, strict=True))
    ]
    numbers = sorted({own.shape[1] for own in read})
    if len(numbers) > 1:
        raise ValueError(f"The objects have {' and '.join(map(str, numbers))} keypoints. Give each the same ones.")
    return read


def _own_keypoints(keypoints: Any, count: int, name: str) -> Tensor:
    try:
        values = torch.as_tensor(np.asarray(keypoints) if isinstance(keypoints, list | tuple) else keypoints)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name}={keypoints!r} must be (N, K, 3): as many keypoints of each object, three numbers each."
        ) from error
    values = values.detach().float()
    values = values[None] if values.ndim == 2 else values
    if values.ndim != 3 or values.shape[2] != 3 or len(values) != count:
        raise ValueError(
            f"{name} has the shape {tuple(values.shape)}, but must be (N, K, 3) for the {count} objects of its image: "
            "x, y and visibility of each keypoint."
        )
    wrong = ~values.isfinite().all(dim=2) | ~torch.isin(values[..., 2], values.new_tensor([0, 1, 2]))  # (N, K)
    if wrong.any():
        index, number = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{name}[{index}][{number}] is {values[index, number].tolist()}, but must be finite x, y and a visibility "
            "of 0 (not labeled), 1 (hidden) or 2 (visible)."
        )
    return values


def crop_regions(boxes: Tensor, size: tuple[int, int], padding: float) -> Tensor:
    """Returns the regions (N, 4) float64 of crops: boxes (N, 4) times `padding`, in the aspect ratio of `size`."""
    # Source: `box_to_center_and_scale` of https://github.com/ViTAE-Transformer/ViTPose.
    boxes, ratio = boxes.double(), size[1] / size[0]
    width, height = (boxes[:, 2:] - boxes[:, :2]).unbind(dim=1)  # (N,)
    half = torch.stack((width.maximum(height * ratio), height.maximum(width / ratio)), dim=1) * padding / 2  # (N, 2)
    center = (boxes[:, :2] + boxes[:, 2:]) / 2  # (N, 2)
    return torch.cat((center - half, center + half), dim=1)


def points_to_crops(points: Tensor, regions: Tensor, size: tuple[int, int]) -> Tensor:
    """Returns points (N, K, 2) of images in pixels of crops, or of heatmaps, of `size`, height and width."""
    origin, scale = _origin_and_scale(regions, size)
    return ((points - origin) / scale).to(points.dtype)


def points_from_crops(points: Tensor, regions: Tensor, size: tuple[int, int]) -> Tensor:
    """Returns points (N, K, 2) of crops, or of heatmaps, of `size` in pixels of their images."""
    origin, scale = _origin_and_scale(regions, size)
    return (points * scale + origin).to(points.dtype)


def _origin_and_scale(regions: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Returns where regions start and how many pixels of the image one of the crop is, (N, 1, 2) each."""
    steps = regions.new_tensor([size[1] - 1, size[0] - 1])
    return regions[:, None, :2], ((regions[:, 2:] - regions[:, :2]) / steps)[:, None]


def keypoints_to_crops(keypoints: Tensor, regions: Tensor, size: tuple[int, int]) -> Tensor:
    """Returns keypoints (N, K, 3) of images in pixels of crops of `size`; see `keep_inside`."""
    places = points_to_crops(keypoints[..., :2], regions.to(keypoints.device), size)
    return keep_inside(torch.cat((places, keypoints[..., 2:]), dim=-1), size)


def keep_inside(keypoints: Tensor, size: tuple[int, int]) -> Tensor:
    """Returns keypoints (..., 3) in pixels of crops of `size`, all zeros where one is not labeled or on no pixel."""
    places, last = keypoints[..., :2], keypoints.new_tensor([size[1], size[0]]) - 0.5
    is_left = (keypoints[..., 2] > 0) & ((places >= -0.5) & (places <= last)).all(dim=-1)
    return torch.where(is_left[..., None], keypoints, 0)


def crop_region(image: Tensor, region: Tensor, size: tuple[int, int]) -> Tensor:
    """Returns the region (4,) of an image (C, H, W) as a crop (C, h, w) of `size`; see `sample_pixels`."""
    left, top, right, bottom = region.tolist()
    columns, rows = (
        torch.linspace(*ends, dtype=torch.float64) for ends in ((left, right, size[1]), (top, bottom, size[0]))
    )
    return sample_pixels(image, *torch.meshgrid(columns, rows, indexing="xy"))


def sample_pixels(image: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Samples an image (C, H, W), uint8 or float32, bilinearly at x and y (h, w) in pixels; black outside."""
    # The type stays; uint8 is rounded to the nearest.
    columns, across, has_column = _along(x, image.shape[-1])
    rows, down, has_row = _along(y, image.shape[-2])
    grid = torch.stack((across, down), dim=-1)[None].to(image.device)  # (1, h, w, 2)
    part = image[None, :, rows, columns].float()
    values = F.grid_sample(part, grid, padding_mode="border", align_corners=True)[0]  # (C, h, w)
    values = values * (has_row & has_column).to(image.device)
    return values if image.is_floating_point() else (values + 0.5).floor().to(image.dtype)


def _along(places: Tensor, side: int) -> tuple[slice, Tensor, Tensor]:
    """Returns where positions (h, w) in pixels are along a side of an image.

    These are the slice of pixels that are needed, the positions from -1 for the first of these to 1 for the last, and
    which are in the image.
    """
    start, stop = (min(max(int(end), 0), side - 1) for end in (places.min().floor(), places.max().ceil()))
    relative = (places - start) / max(stop - start, 1) * 2 - 1
    is_inside = (places >= -EDGE_TOLERANCE) & (places <= side - 1 + EDGE_TOLERANCE)
    return slice(start, stop + 1), relative.float(), is_inside
