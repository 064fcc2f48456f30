"""The random changes that images and the boxes of their objects go through together.

Shapes: C channels, H W pixels, N objects, h w pixels of the result.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..targets import without_crowds
from .crops import Crop, draw_crop
from .inputs import (
    GRAY,
    check_photometric,
    check_probabilities,
    check_scale_range,
    check_torchvision,
    distort,
    draw_scale,
    read_uint8,
)


MIN_SIDE = 1.0  # pixels of the result; less of an object is none
MIN_IMAGE_SIDE = 4  # pixels; the random crops of torchvision have no whole pixel of smaller ones


def detection_augmentation(
    size: tuple[int, int],
    *,
    num_channels: int = 3,
    scale_range: tuple[float, float] = (0.5, 2.0),
    iou_crop: float = 0.0,
    horizontal_flip: float = 0.5,
    photometric: float = 0.5,
    keep_aspect_ratio: bool = False,
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Returns the augmentation of training examples for object detection, which also brings them to one size.

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

    Returns:
        A function from an example (an image of any kind and size in `image`, `boxes` (N, 4), x1, y1, x2, y2 in its
        pixels, `class_labels` (N,), and whatever else) to one with `image` (C, h, w) uint8, `boxes` in pixels of the
        result and `class_labels` of the objects that are left, and `batch_draw`, a number in [0, 1) for what
        `ObjectDetectionCollator` draws for a whole batch.

    Raises:
        ImportError: if torchvision is not installed.
        ValueError: if a value is out of range, or colors shall change and C is neither 1 nor 3.
    """
    check_probabilities(iou_crop=iou_crop, horizontal_flip=horizontal_flip)
    check_scale_range(scale_range)
    check_photometric(photometric, num_channels)
    check_torchvision()
    return _DetectionAugmentation(
        size, num_channels, scale_range, iou_crop, horizontal_flip, photometric, keep_aspect_ratio
    )


@dataclass(frozen=True)
class _DetectionAugmentation:
    """The function that `detection_augmentation` returns; a class, so that it passes to worker processes."""

    size: tuple[int, int]
    num_channels: int
    scale_range: tuple[float, float]
    iou_crop: float
    horizontal_flip: float
    photometric: float
    keep_aspect_ratio: bool

    def __call__(self, example: dict[str, Any]) -> dict[str, Any]:
        example = without_crowds(example)
        batch_draw = float(torch.rand(()))
        image, boxes = read_uint8(example["image"], self.num_channels), example["boxes"]
        if torch.rand(()) < self.iou_crop:
            image, boxes = _iou_crop(image, boxes)
        crop = draw_crop(image.shape[-2:], self.size, draw_scale(self.scale_range), self.keep_aspect_ratio)
        image = crop.take_image(image, GRAY)  # (C, h, w)
        boxes, is_left = _take_boxes(crop, boxes)
        if torch.rand(()) < self.horizontal_flip:
            image = image.flip(-1)
            boxes = torch.stack((self.size[1] - boxes[:, 2], boxes[:, 1], self.size[1] - boxes[:, 0], boxes[:, 3]), 1)
        if torch.rand(()) < self.photometric:
            image = distort(image)
        rest = {name: value for name, value in example.items() if name != "areas"}
        objects = {"boxes": boxes[is_left], "class_labels": example["class_labels"][is_left]}
        return {**rest, "image": image, **objects, "batch_draw": batch_draw}


def _iou_crop(image: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Cuts a part out; boxes are not clipped, so that the center of an object is still that of all of it."""
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
    """Returns boxes (N, 4) as they lie in a crop, clipped to what of the image is in it, and which are left (N,)."""
    corners, is_left = [], torch.ones(len(boxes), dtype=torch.bool)
    for places, span in ((boxes[:, 0::2], crop.columns), (boxes[:, 1::2], crop.rows)):
        moved = span.move(places)  # (N, 2)
        clipped = moved.clamp(span.new_start, span.new_stop)
        centers = moved.mean(dim=1)
        is_left &= (centers >= span.new_start) & (centers <= span.new_stop)
        is_left &= clipped[:, 1] - clipped[:, 0] >= MIN_SIDE
        corners.append(clipped)
    return torch.stack(corners, dim=2).flatten(1), is_left
