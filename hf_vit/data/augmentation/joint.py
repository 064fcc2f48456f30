"""The random changes that images and their targets go through together, by `torchvision.transforms.v2`.

Shapes: C channels, H W pixels, M masks, N objects, K keypoints, h w pixels of the result.
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


# What a target has where the image does not reach.
OUTSIDE = {"segmentation_map": IGNORED_LABEL, "masks": 0, "depth_map": 0}
MAX_TRIES = 10
MIN_SIDE = 1.0  # pixels of the result; less of an object is none
MIN_IMAGE_SIDE = 4  # pixels; the random crops of torchvision have no whole pixel of smaller ones


@dataclass(frozen=True)
class _Augmentation:
    """What the augmentations of all targets share; classes rather than closures pass to worker processes."""

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
        """Return an image (C, H, W) uint8, maybe of other brightness, contrast and, of colors, saturation and hue."""
        from torchvision.transforms import v2  # here, as all else in the package does without torchvision

        jitter = v2.ColorJitter(brightness=0.125, contrast=0.5, saturation=0.5, hue=0.05)
        return jitter(image) if torch.rand(()) < self.photometric else image


@dataclass(frozen=True)
class DenseAugmentation(_Augmentation):
    """Augments training examples for segmentation and depth, which also brings them to one size.

    An image is scaled at random, and a crop of it, or where it is smaller a frame around it, is taken. Where the image
    does not reach, it is gray, and its target is 255 (classes), empty (masks) or 0 (depth). Masks without a pixel left
    are dropped, and those of crowds. A depth map is divided by the scale: what is twice as large is half as far
    (https://arxiv.org/abs/1406.2283, section 3.4).

    Args:
        size: Height h and width w of the result in pixels.
        num_channels: Number of channels C of the result; colors are converted as the image processor does.
        scale_range: Smallest and largest scale, drawn evenly on a logarithmic axis. At scale 1 the image is as large
            as an image processor makes it.
        keep_aspect_ratio: Whether the image keeps its proportions, and at scale 1 its shorter side is that of the
            result (`{"shortest_edge"}`), or else it is squeezed into the result (`{"height", "width"}`).
        max_class_share: Largest share of a crop's labeled pixels that one class may have, in (0, 1]; crops are drawn
            again up to ten times (as in mmsegmentation). For class maps only; 1 takes any crop.
        horizontal_flip: Probability of a mirror image, in [0, 1].
        max_rotation: Largest angle of a random rotation in degrees, either way.
        photometric: Probability that brightness, contrast and, of colors, saturation and hue change, in [0, 1]. The
            target stays as it is.

    Raises:
        ImportError: if torchvision is not installed.
        ValueError: if a value is out of range, or colors shall change and C is neither 1 nor 3.
    """

    _: KW_ONLY
    keep_aspect_ratio: bool = True
    max_class_share: float = 0.75
    max_rotation: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.max_class_share <= 1:
            raise ValueError(f"max_class_share={self.max_class_share} must lie in (0, 1]; 1 takes any crop.")
        check_rotation(self.max_rotation)

    def __call__(self, example: dict[str, Any]) -> dict[str, Any]:
        """Return an example with `image` (C, h, w) uint8 and its target (h, w) or (M, h, w).

        Args:
            example: An image of any kind and size in `image`, a target of its size in `segmentation_map`, `masks` and
                `class_labels`, or `depth_map`, and whatever else.
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
    """Return the share of the most frequent class, seen on every fourth pixel each way; 1 if there is none."""
    counts = labels[::4, ::4].flatten().bincount(minlength=IGNORED_LABEL)[:IGNORED_LABEL]
    return float(counts.max() / counts.sum()) if counts.any() else 1.0


def _rotate(image: Tensor, target: Tensor, angle: float, outside: float) -> tuple[Tensor, Tensor]:
    from torchvision import tv_tensors  # here, as all else in the package does without torchvision
    from torchvision.transforms.v2 import InterpolationMode, functional

    # The type of a tensor says how it turns: masks are never interpolated.
    turned = functional.rotate(tv_tensors.Mask(target), angle, fill=outside).as_subclass(Tensor)
    return functional.rotate(image, angle, InterpolationMode.BILINEAR, fill=GRAY), turned


@dataclass(frozen=True)
class DetectionAugmentation(_Augmentation):
    """Augments training examples for object detection, which also brings them to one size.

    An image is scaled at random, and a crop of it, or where it is smaller a gray frame around it, is taken
    (https://arxiv.org/abs/2012.07177). An object stays if the center of its box does, clipped to the image; it goes
    too if less than a pixel of its width or height is left, and if it is a crowd. An image may end without any.

    Args:
        size: Height h and width w of the result in pixels.
        num_channels: Number of channels C of the result; colors are converted as the image processor does.
        scale_range: Smallest and largest scale, drawn evenly on a logarithmic axis. At scale 1 the image is as large
            as an image processor makes it.
        iou_crop: Probability that first a part of the image is cut out that an object fills to a drawn share, in
            [0, 1] (SSD, https://arxiv.org/abs/1512.02325, section 2.2). It becomes as large as else the image.
        horizontal_flip: Probability of a mirror image, in [0, 1].
        photometric: Probability that brightness, contrast and, of colors, saturation and hue change, in [0, 1].
        keep_aspect_ratio: Whether the image keeps its proportions, and at scale 1 its shorter side is that of the
            result (`{"shortest_edge"}`), or else it is squeezed into the result (`{"height", "width"}`).

    Raises:
        ImportError: if torchvision is not installed.
        ValueError: if a value is out of range, or colors shall change and C is neither 1 nor 3.
    """

    _: KW_ONLY
    iou_crop: float = 0.0
    keep_aspect_ratio: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probabilities(iou_crop=self.iou_crop)

    def __call__(self, example: dict[str, Any]) -> dict[str, Any]:
        """Return an example with `image` (C, h, w) uint8, `boxes` in its pixels and `class_labels` of what is left.

        Args:
            example: An image of any kind and size in `image`, `boxes` (N, 4), x1, y1, x2, y2 in its pixels,
                `class_labels` (N,), and whatever else. Beside it, the result has `batch_draw`, a number in [0, 1) for
                what `ObjectDetectionCollator` draws for a whole batch.
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
    """Cut a part out; boxes are not clipped, so that the center of an object is still that of all of it."""
    from torchvision import tv_tensors  # here, as all else in the package does without torchvision
    from torchvision.transforms import v2

    if len(boxes) == 0 or min(image.shape[-2:]) < MIN_IMAGE_SIDE:
        return image, boxes
    known = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=tuple(image.shape[-2:]))
    part = v2.RandomIoUCrop().make_params([image, known])
    if not part:  # one of what is drawn is the whole image
        return image, boxes
    left, top = part["left"], part["top"]
    cut = image[:, top : top + part["height"], left : left + part["width"]]
    return cut, boxes - boxes.new_tensor((left, top, left, top))


def _take_boxes(crop: Crop, boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Return boxes (N, 4) as they lie in a crop, clipped to what of the image is in it, and which are left (N,)."""
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
    """Augments training examples for keypoints, which cuts each object out of its image.

    With nothing left to chance, the crop is the one that the image processor makes: bilinear, black outside the image.
    Keypoints that leave it count as not labeled.

    Args:
        size: Height h and width w of the crop in pixels.
        num_channels: Number of channels C of the result; colors are converted as the image processor does.
        box_padding: How many times wider and higher than the box a crop is at scale 1.
        scale_range: Smallest and largest scale of the object, drawn evenly on a logarithmic axis.
        max_rotation: Largest angle of a random rotation in degrees, either way.
        max_shift: How far the object is moved at most, either way, as a share of the width and height of the crop.
        horizontal_flip: Probability of a mirror image, in [0, 1].
        flip_pairs: Pairs of keypoints (numbers from 0) that a mirror image swaps, as the left and the right eye.
        photometric: Probability that brightness, contrast and, of colors, saturation and hue change, in [0, 1].

    Raises:
        ImportError: if torchvision is not installed.
        ValueError: if a value is out of range, or colors shall change and C is neither 1 nor 3.
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
            raise ValueError(f"box_padding={self.box_padding} must be positive; 1 cuts at the box.")
        if not 0 <= self.max_shift < 1:
            raise ValueError(f"max_shift={self.max_shift} is a share of the crop and must lie in [0, 1).")

    def __call__(self, example: dict[str, Any]) -> dict[str, Any]:
        """Return an example with `image` (C, h, w) uint8 and `keypoints` (K, 3) in pixels of the crop.

        Args:
            example: An image of any kind and size in `image`, `keypoints` (K, 3), x and y in its pixels and
                visibility, `box` (4,), x1, y1, x2, y2, and whatever else.
        """
        image, keypoints = read_uint8(example["image"], self.num_channels), example["keypoints"]
        matrix = self._draw_change() @ _square(crop_matrix(example["box"], self.size, self.box_padding))
        if self.is_flipped():
            matrix = torch.tensor([[-1.0, 0, self.size[1] - 1], [0, 1, 0], [0, 0, 1]], dtype=matrix.dtype) @ matrix
            keypoints = keypoints[mirrored_order(len(keypoints), self.flip_pairs)]
        image = warp(image, matrix[:2], self.size)  # (C, h, w)
        keypoints = crop_keypoints(keypoints, matrix[:2], self.size)
        image = self.distorted(image)
        # where the object was in the image, it is no more
        rest = {name: value for name, value in example.items() if name not in ("box", "area")}
        return {**rest, "image": image, "keypoints": keypoints}

    def _draw_change(self) -> Tensor:
        """Return a turn, scale and shift (3, 3) around the center of the crop, in its pixels."""
        scale, angle = draw_scale(self.scale_range), radians(uniform(-self.max_rotation, self.max_rotation))
        height, width = self.size
        shift = [uniform(-self.max_shift, self.max_shift) * length for length in (width, height)]
        linear = scale * torch.tensor([[cos(angle), -sin(angle)], [sin(angle), cos(angle)]], dtype=torch.float64)
        center = torch.tensor([(width - 1) / 2, (height - 1) / 2], dtype=torch.float64)
        offset = center + torch.tensor(shift, dtype=torch.float64) - linear @ center
        return _square(torch.cat((linear, offset[:, None]), dim=1))


def _square(matrix: Tensor) -> Tensor:
    """Complete an affine map (2, 3) to one that can be multiplied."""
    return torch.cat((matrix, matrix.new_tensor([[0, 0, 1]])))
