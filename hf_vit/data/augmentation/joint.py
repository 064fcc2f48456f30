"""Augmentation of images together with their masks, depth maps, boxes or keypoints.

Shapes: C channels, H and W image size, h and w output size in pixels, M masks, N objects, K keypoints.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from math import cos, radians, sin
from typing import Any

import torch
from torch import Tensor

from ...extras import check_packages
from ...model.image_geometry import resize_nearest
from ...model.image_targets import IGNORED_LABEL
from ...model.task_keypoint_detection import mirrored_order
from ..targets import without_crowds
from .operations import (
    GRAY,
    Crop,
    check_colors,
    check_probabilities,
    check_rotation,
    crop_keypoints,
    crop_matrix,
    draw_crop,
    draw_scale,
    read_uint8,
    uniform,
    warp,
)


# Value of target pixels outside the image, by key of the target in an example.
OUTSIDE = {"segmentation_map": IGNORED_LABEL, "masks": 0, "depth_map": 0}
MAX_TRIES = 10
MIN_SIDE = 1.0  # Minimum width and height of a box in the output, in pixels.
MIN_IMAGE_SIDE = 4  # Minimum side in pixels: RandomIoUCrop can return empty crops of smaller images.


@dataclass(frozen=True)
class _Augmentation:
    """Base class of augmentations. Unlike closures, its instances can be pickled for worker processes."""

    size: tuple[int, int]
    _: KW_ONLY
    num_channels: int = 3
    scale_range: tuple[float, float] = (0.5, 2.0)
    horizontal_flip: float = 0.5
    photometric: float = 0.5

    def __post_init__(self) -> None:
        check_probabilities(horizontal_flip=self.horizontal_flip, photometric=self.photometric)
        if not 0 < self.scale_range[0] <= self.scale_range[1]:
            raise ValueError(f"scale_range={self.scale_range} must be two positive numbers, the smaller one first.")
        check_colors(self.num_channels, photometric=self.photometric)
        check_packages("Augmentation", "torchvision")

    def is_flipped(self) -> bool:
        return bool(torch.rand(()) < self.horizontal_flip)

    def distorted(self, image: Tensor) -> Tensor:
        """Randomly change brightness and contrast (for color images also saturation and hue) of a (C, H, W) image."""
        from torchvision.transforms import v2  # imported here because torchvision is optional

        jitter = v2.ColorJitter(brightness=0.125, contrast=0.5, saturation=0.5, hue=0.05)
        return jitter(image) if torch.rand(()) < self.photometric else image


@dataclass(frozen=True)
class DenseAugmentation(_Augmentation):
    """Augmentation for segmentation and depth estimation, which also resizes examples.

    The image is randomly scaled, then cropped or padded at random to the output size. Padding is gray in the image and
    255 (class maps), False (masks) or 0 (depth) in the target. Masks of crowds and masks without any remaining pixel
    are removed. Depth is divided by the scale, because an object that appears twice as large is half as far away
    (https://arxiv.org/abs/1406.2283, section 3.4).

    Args:
        size: Height h and width w of the output in pixels.
        num_channels: Number of channels C of the output. The image processor uses the same color conversion.
        scale_range: Minimum and maximum of the log-uniform random scale. Scale 1 is the size that the image processor
            resizes the image to.
        keep_aspect_ratio: Whether to keep the aspect ratio. If set, scale 1 resizes the shorter side of the image to
            the shorter side of the output, like an image processor with the size `{"shortest_edge": ...}`. Otherwise,
            scale 1 resizes the image to the output size, like one with `{"height": ..., "width": ...}`.
        max_class_share: Maximum fraction of the labeled pixels of a crop that one class may have, in (0, 1]. If a
            crop exceeds it, another crop is drawn, up to ten times, as in mmsegmentation. This applies only to class
            maps. 1 allows any crop.
        horizontal_flip: Probability of a horizontal flip, in [0, 1].
        max_rotation: Maximum angle of the random rotation in degrees, in both directions.
        photometric: Probability of changing brightness, contrast and, for color images, saturation and hue, in [0, 1].

    Raises:
        ImportError: if torchvision is not installed.
        ValueError: if a value is out of range, or if color augmentation is enabled and C is neither 1 nor 3.
    """

    _: KW_ONLY
    keep_aspect_ratio: bool = True
    max_class_share: float = 0.75
    max_rotation: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.max_class_share <= 1:
            raise ValueError(f"max_class_share={self.max_class_share} must lie in (0, 1]; 1 allows any crop.")
        check_rotation(self.max_rotation)

    def __call__(self, example: dict[str, Any]) -> dict[str, Any]:
        """Augment an example. Return `image` (C, h, w) uint8 and the target: a map (h, w) or masks (M, h, w).

        Args:
            example: Dictionary of `image` (any mode and size), a target of the same size (`segmentation_map`,
                `depth_map`, or `masks` with `class_labels`), and other values, which are not changed.
        """
        example = without_crowds(example)
        name = next(name for name in OUTSIDE if name in example)
        image, target = read_uint8(example["image"], self.num_channels), example[name]
        scale = draw_scale(self.scale_range)
        crop = draw_crop(image.shape[-2:], self.size, scale, self.keep_aspect_ratio)
        for _ in range(MAX_TRIES if name == "segmentation_map" and self.max_class_share < 1 else 0):
            if _largest_share(crop.cut(target)) <= self.max_class_share:
                break
            crop = draw_crop(image.shape[-2:], self.size, scale, self.keep_aspect_ratio)
        image = crop.take_image(image, GRAY)  # (C, h, w)
        target = crop.place(resize_nearest(crop.cut(target), *crop.inner), OUTSIDE[name])  # (h, w) or (M, h, w)
        if self.is_flipped():
            image, target = image.flip(-1), target.flip(-1)
        if self.max_rotation:
            image, target = _rotate(image, target, uniform(-self.max_rotation, self.max_rotation), OUTSIDE[name])
        changed = {"image": self.distorted(image), name: target / scale if name == "depth_map" else target}
        if name == "masks":
            is_left = target.flatten(1).any(dim=1)  # (M,)
            changed |= {"masks": target[is_left], "class_labels": example["class_labels"][is_left]}
        return {**example, **changed}


def _largest_share(labels: Tensor) -> float:
    """Return the fraction of the most frequent class among labeled pixels, estimated from every fourth row and column.

    The result is 1 if there are no labeled pixels.
    """
    counts = labels[::4, ::4].flatten().bincount(minlength=IGNORED_LABEL)[:IGNORED_LABEL]
    return float(counts.max() / counts.sum()) if counts.any() else 1.0


def _rotate(image: Tensor, target: Tensor, angle: float, outside: float) -> tuple[Tensor, Tensor]:
    from torchvision import tv_tensors  # imported here because torchvision is optional
    from torchvision.transforms.v2 import InterpolationMode, functional

    # torchvision rotates tensors of type Mask without interpolation.
    turned = functional.rotate(tv_tensors.Mask(target), angle, fill=outside).as_subclass(Tensor)
    return functional.rotate(image, angle, InterpolationMode.BILINEAR, fill=GRAY), turned


@dataclass(frozen=True)
class DetectionAugmentation(_Augmentation):
    """Augmentation for object detection, which also resizes examples.

    The image is randomly scaled, then cropped or padded with gray at random to the output size
    (https://arxiv.org/abs/2012.07177). Boxes are clipped to the visible part of the image. Objects are removed if the
    center of their box is not visible, if their clipped box is less than one pixel wide or high, or if they are
    crowds, so an image may have no objects left.

    Args:
        size: Height h and width w of the output in pixels.
        num_channels: Number of channels C of the output. The image processor uses the same color conversion.
        scale_range: Minimum and maximum of the log-uniform random scale. Scale 1 is the size that the image processor
            resizes the image to.
        iou_crop: Probability, in [0, 1], of first cropping the image so that the IoU of the crop and an object exceeds
            a random minimum (SSD, https://arxiv.org/abs/1512.02325, section 2.2).
        horizontal_flip: Probability of a horizontal flip, in [0, 1].
        photometric: Probability of changing brightness, contrast and, for color images, saturation and hue, in [0, 1].
        keep_aspect_ratio: Whether to keep the aspect ratio. If set, scale 1 resizes the shorter side of the image to
            the shorter side of the output, like an image processor with the size `{"shortest_edge": ...}`. Otherwise,
            scale 1 resizes the image to the output size, like one with `{"height": ..., "width": ...}`.

    Raises:
        ImportError: if torchvision is not installed.
        ValueError: if a value is out of range, or if color augmentation is enabled and C is neither 1 nor 3.
    """

    _: KW_ONLY
    iou_crop: float = 0.0
    keep_aspect_ratio: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probabilities(iou_crop=self.iou_crop)

    def __call__(self, example: dict[str, Any]) -> dict[str, Any]:
        """Augment an example. Return `image` (C, h, w) uint8, and `boxes` and `class_labels` of the kept objects.

        Args:
            example: Dictionary of `image` (any mode and size), `boxes` (N, 4) as x1, y1, x2, y2 in pixels,
                `class_labels` (N,), and other values, which are not changed, except that `areas` is removed.

        Returns:
            The example with an additional random number `batch_draw` in [0, 1), which `ObjectDetectionCollator` uses
            to choose the image size of a batch.
        """
        example = without_crowds(example)
        batch_draw = float(torch.rand(()))
        image, boxes = read_uint8(example["image"], self.num_channels), example["boxes"]
        if torch.rand(()) < self.iou_crop:
            image, boxes = _iou_crop(image, boxes)
        crop = draw_crop(image.shape[-2:], self.size, draw_scale(self.scale_range), self.keep_aspect_ratio)
        image = crop.take_image(image, GRAY)  # (C, h, w)
        boxes, is_left = _take_boxes(crop, boxes)
        if self.is_flipped():
            image = image.flip(-1)
            boxes = torch.stack((self.size[1] - boxes[:, 2], boxes[:, 1], self.size[1] - boxes[:, 0], boxes[:, 3]), 1)
        image = self.distorted(image)
        rest = {name: value for name, value in example.items() if name != "areas"}
        objects = {"boxes": boxes[is_left], "class_labels": example["class_labels"][is_left]}
        return {**rest, "image": image, **objects, "batch_draw": batch_draw}


def _iou_crop(image: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Crop an image with `RandomIoUCrop` without clipping boxes, so that a box keeps the center of its object."""
    from torchvision import tv_tensors  # imported here because torchvision is optional
    from torchvision.transforms import v2

    if len(boxes) == 0 or min(image.shape[-2:]) < MIN_IMAGE_SIDE:
        return image, boxes
    known = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=tuple(image.shape[-2:]))
    part = v2.RandomIoUCrop().make_params([image, known])
    if not part:  # empty parameters mean that `RandomIoUCrop` chose the whole image
        return image, boxes
    left, top = part["left"], part["top"]
    cut = image[:, top : top + part["height"], left : left + part["width"]]
    return cut, boxes - boxes.new_tensor((left, top, left, top))


def _take_boxes(crop: Crop, boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Convert boxes (N, 4) to pixels of a crop and clip them to it. Also return a mask (N,) of the boxes to keep."""
    corners, is_left = [], torch.ones(len(boxes), dtype=torch.bool)
    for places, span in ((boxes[:, 0::2], crop.columns), (boxes[:, 1::2], crop.rows)):
        moved = span.move(places)  # (N, 2)
        clipped = moved.clamp(span.new_start, span.new_stop)
        centers = moved.mean(dim=1)
        is_left &= (centers >= span.new_start) & (centers <= span.new_stop)
        is_left &= clipped[:, 1] - clipped[:, 0] >= MIN_SIDE
        corners.append(clipped)
    return torch.stack(corners, dim=2).flatten(1), is_left


@dataclass(frozen=True)
class KeypointAugmentation(_Augmentation):
    """Augmentation for keypoint detection, which crops an object out of its image.

    Without random changes, the crop equals that of the image processor: the interpolation is bilinear, and pixels
    outside the image are black. Keypoints outside the crop become unlabeled.

    Args:
        size: Height h and width w of the crop in pixels.
        num_channels: Number of channels C of the output. The image processor uses the same color conversion.
        box_padding: Ratio of the crop size at scale 1 to the box size.
        scale_range: Minimum and maximum of the log-uniform random scale of the object.
        max_rotation: Maximum angle of the random rotation in degrees, in both directions.
        max_shift: Maximum shift of the object in both directions, as a fraction of the width and height of the crop.
        horizontal_flip: Probability of a horizontal flip, in [0, 1].
        flip_pairs: Pairs of keypoint indices that a horizontal flip swaps, such as the left and right eye.
        photometric: Probability of changing brightness, contrast and, for color images, saturation and hue, in [0, 1].

    Raises:
        ImportError: if torchvision is not installed.
        ValueError: if a value is out of range, or if color augmentation is enabled and C is neither 1 nor 3.
    """

    _: KW_ONLY
    scale_range: tuple[float, float] = (0.65, 1.35)
    box_padding: float = 1.25
    max_rotation: float = 40.0
    max_shift: float = 0.1
    flip_pairs: Sequence[Sequence[int]] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rotation(self.max_rotation)
        if not self.box_padding > 0:
            raise ValueError(f"box_padding={self.box_padding} must be positive; 1 crops exactly to the box.")
        if not 0 <= self.max_shift < 1:
            raise ValueError(f"max_shift={self.max_shift} must lie in [0, 1), as a fraction of the crop size.")

    def __call__(self, example: dict[str, Any]) -> dict[str, Any]:
        """Augment an example. The output `image` is (C, h, w) uint8, and `keypoints` (K, 3) are in pixels of the crop.

        Args:
            example: Dictionary of `image` (any mode and size), `keypoints` (K, 3) as x and y in pixels and
                visibility, `box` (4,) as x1, y1, x2, y2 in pixels, and other values, which are not changed, except
                that `box` and `area` are removed.
        """
        image, keypoints = read_uint8(example["image"], self.num_channels), example["keypoints"]
        matrix = self._draw_change() @ _square(crop_matrix(example["box"], self.size, self.box_padding))
        if self.is_flipped():
            matrix = torch.tensor([[-1.0, 0, self.size[1] - 1], [0, 1, 0], [0, 0, 1]], dtype=matrix.dtype) @ matrix
            keypoints = keypoints[mirrored_order(len(keypoints), self.flip_pairs)]
        image = warp(image, matrix[:2], self.size)  # (C, h, w)
        keypoints = crop_keypoints(keypoints, matrix[:2], self.size)
        image = self.distorted(image)
        # `box` and `area` refer to the original image, so they are removed.
        rest = {name: value for name, value in example.items() if name not in ("box", "area")}
        return {**rest, "image": image, "keypoints": keypoints}

    def _draw_change(self) -> Tensor:
        """Return a random rotation, scaling and shift about the center of the crop as a matrix (3, 3), in pixels."""
        scale, angle = draw_scale(self.scale_range), radians(uniform(-self.max_rotation, self.max_rotation))
        height, width = self.size
        shift = [uniform(-self.max_shift, self.max_shift) * length for length in (width, height)]
        linear = scale * torch.tensor([[cos(angle), -sin(angle)], [sin(angle), cos(angle)]], dtype=torch.float64)
        center = torch.tensor([(width - 1) / 2, (height - 1) / 2], dtype=torch.float64)
        offset = center + torch.tensor(shift, dtype=torch.float64) - linear @ center
        return _square(torch.cat((linear, offset[:, None]), dim=1))


def _square(matrix: Tensor) -> Tensor:
    """Extend an affine matrix (2, 3) to homogeneous coordinates (3, 3)."""
    return torch.cat((matrix, matrix.new_tensor([[0, 0, 1]])))
