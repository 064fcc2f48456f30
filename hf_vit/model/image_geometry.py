"""Image geometry: resizing, center crops, padding with a padding mask, and crops of single objects.

Coordinates in object crops are continuous, with the center of pixel i at i, as in ViTPose and COCO keypoints. The
bounds of a crop region are the centers of its outermost pixels. Points can thus be mapped between image, crop and
heatmaps of any size without a bias ("UDP", https://arxiv.org/abs/1911.07524).

Shapes: B batch, N objects, K keypoints, C channels, H W pixels of an image, h w patches or pixels of a
crop.
"""

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.image_transforms import get_size_with_aspect_ratio
from transformers.image_utils import PILImageResampling, SizeDict, get_image_size_for_max_height_width
from transformers.utils.import_utils import is_vision_available

from .configuration_hf_vit import to_pair


if is_vision_available():
    import PIL.Image


# Valid key combinations of the option `size`
RESIZE_KEYS = (
    ("height", "width"),
    ("shortest_edge",),
    ("longest_edge",),
    ("shortest_edge", "longest_edge"),
    ("max_height", "max_width"),
)
EXACT_KEYS = RESIZE_KEYS[:1]
# Rounding modes for the offset of a center crop with an odd margin. transformers rounds down; torchvision and timm
# round halves to the nearest even number.
CROP_ROUNDINGS = ("down", "half_to_even")
# Rounding modes for height and width, which are rounded to multiples of `ensure_multiple_of` pixels
MULTIPLE_ROUNDINGS = ("nearest", "down")
# Maximum number of pixels of a resized image: about 5800 x 5800 pixels, or 400 MB of float32 RGB. No ViT needs more,
# and the limit prevents a mistyped `size` from exhausting the memory.
MAX_OUTPUT_PIXELS = 2**25
EDGE_TOLERANCE = 1e-3  # tolerance in pixels for rounding errors of coordinates at image borders


def to_size_dict(
    size: Any, name: str, forms: tuple[tuple[str, ...], ...] = RESIZE_KEYS, default_to_square: bool = True
) -> SizeDict | None:
    """Converts a size in pixels to the `SizeDict` of transformers.

    Args:
        size: An int (a square, or the shortest edge if `default_to_square` is false), `(height, width)`, a dictionary,
            or `None`, which is returned unchanged.
        name: Name of the option, for error messages.
        forms: Valid combinations of keys.
        default_to_square: Whether an int stands for a square.

    Raises:
        ValueError: If the keys are not in `forms` or a value is not a positive int.
    """
    if size is None:
        return None
    keys: Any = size
    if isinstance(size, int):
        keys = {"height": size, "width": size} if default_to_square else {"shortest_edge": size}
    elif isinstance(size, list | tuple) and len(size) == 2:
        keys = {"height": size[0], "width": size[1]}
    elif isinstance(size, SizeDict):
        keys = dict(size)
    if not isinstance(keys, dict) or {*keys} not in [{*form} for form in forms]:
        allowed = " or ".join("{" + ", ".join(f'"{key}"' for key in form) + "}" for form in forms)
        raise ValueError(f"{name}={size!r} must be an int, (height, width), or a dictionary with the keys {allowed}.")
    if not all(type(value) is int and value > 0 for value in keys.values()):
        raise ValueError(f"{name}={size!r} must contain only positive integers, in pixels.")
    return SizeDict(**keys)


def height_and_width(size: Any) -> tuple[int, int]:
    """Returns (height, width) of a `SizeDict` or dictionary with the keys "height" and "width"."""
    return size["height"], size["width"]


def compute_resized_size(
    height: int,
    width: int,
    *,
    size: Any,
    ensure_multiple_of: Any = None,
    keep_aspect_ratio: bool | None = False,
    multiple_rounding: str = "nearest",
    name: str = "the image",
    **_: Any,
) -> tuple[int, int]:
    """Returns the height and width in pixels to which an image processor resizes an image.

    `size` is an exact height and width or a bound on the edges. With `keep_aspect_ratio` and an exact size, the image
    is scaled to the height or the width, whichever changes it less. Both sides are then rounded, to the nearest or
    down, to a positive multiple of `ensure_multiple_of`.

    Raises:
        ValueError: If the result has more than `MAX_OUTPUT_PIXELS`, for example a thin image with "shortest_edge".
    """
    rows, columns = (1, 1) if ensure_multiple_of is None else to_pair(ensure_multiple_of)
    is_cut, size = multiple_rounding == "down", dict(size)
    scale = _size_of_smaller_change if keep_aspect_ratio else _size_as_in_yolos if is_cut else _scaled_size
    scaled, times = scale(height, width, size), math.floor if is_cut else round
    new_height = max(1, times(scaled[0] / rows)) * rows
    new_width = max(1, times(scaled[1] / columns)) * columns
    if new_height * new_width > MAX_OUTPUT_PIXELS:
        raise ValueError(
            f"{name} with {height} x {width} pixels would become {new_height} x {new_width} with size={size}, more "
            f"than {MAX_OUTPUT_PIXELS} pixels. Limit the long side too, as in {{'shortest_edge': 224, 'longest_edge': "
            "1024}, or set an exact height and width."
        )
    return new_height, new_width


def _size_of_smaller_change(height: int, width: int, size: dict[str, int]) -> tuple[float, float]:
    """Scales an image to the height or width of `size`, whichever changes it less, without rounding, as in DPT."""
    by_height, by_width = size["height"] / height, size["width"] / width
    scale = by_width if abs(1 - by_width) < abs(1 - by_height) else by_height
    return scale * height, scale * width


def _size_as_in_yolos(height: int, width: int, size: dict[str, int]) -> tuple[float, float]:
    """Computes the resized (height, width) of an image as in transformers' YOLOS, before rounding to multiples."""
    # Unlike DETR, YOLOS also rescales portrait images that already have the right size. For example, 864 pixels may
    # become 863, which is then rounded down to 848, a multiple of 16.
    is_bounded = {*size} == {"shortest_edge", "longest_edge"} and width < height
    if is_bounded and height / width * size["shortest_edge"] > size["longest_edge"]:
        short = size["longest_edge"] * width / height
        return int(short * height / width), round(short)
    return _scaled_size(height, width, size)


def _scaled_size(height: int, width: int, size: dict[str, int]) -> tuple[int, int]:
    """Computes the resized (height, width) as in transformers' image processors, before rounding to multiples."""
    if "height" in size:
        return size["height"], size["width"]
    if "max_height" in size:
        return get_image_size_for_max_height_width((height, width), size["max_height"], size["max_width"])
    if {*size} == {"shortest_edge", "longest_edge"}:
        return get_size_with_aspect_ratio((height, width), size["shortest_edge"], size["longest_edge"])
    ((edge, pixels),) = size.items()
    side = min(height, width) if edge == "shortest_edge" else max(height, width)
    return height * pixels // side, width * pixels // side


def resize_nearest(image: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Resizes an image (..., H, W) to (..., height, width) by nearest-neighbor interpolation at pixel centers."""
    # Use integer arithmetic, because torchvision and PIL round centers between two pixels differently.
    rows = (2 * torch.arange(height, device=image.device) + 1) * image.shape[-2] // (2 * height)
    columns = (2 * torch.arange(width, device=image.device) + 1) * image.shape[-1] // (2 * width)
    return image[..., rows[:, None], columns]


def center_crop(image: torch.Tensor, height: int, width: int, rounding: str = "down", fill: float = 0) -> torch.Tensor:
    """Crops the center of an image (..., H, W) to (..., height, width), padding smaller images with `fill`.

    `rounding`, one of `CROP_ROUNDINGS`, applies to the offset of the crop if the margin is odd.
    """
    left, right = split_between_ends(width - image.shape[-1], rounding)
    top, bottom = split_between_ends(height - image.shape[-2], rounding)
    return F.pad(image, (left, right, top, bottom), value=fill)  # (..., height, width)


def split_between_ends(missing: int, rounding: str) -> tuple[int, int]:
    """Splits a number of missing pixels (negative for surplus pixels) between both ends of a side.

    `rounding`, one of `CROP_ROUNDINGS`, decides on which end an odd surplus pixel is removed.
    """
    if missing > 0:
        return missing // 2, missing - missing // 2
    start = round(-missing / 2) if rounding == "half_to_even" else -missing // 2
    return -start, missing + start


def pad_to(image: torch.Tensor, height: int, width: int, name: str) -> torch.Tensor:
    """Zero-pads an image (C, H, W) on the right and at the bottom; raises `ValueError` if it exceeds the new size."""
    missing = (height - image.shape[-2], width - image.shape[-1])
    if min(missing) < 0:
        raise ValueError(
            f"{name} has {image.shape[-2]} x {image.shape[-1]} pixels after resizing, more than pad_size="
            f"{(height, width)}. Increase pad_size, or limit size by 'longest_edge'."
        )
    return F.pad(image, (0, missing[1], 0, missing[0]))


def pad_batch(
    images: list[torch.Tensor], multiple: tuple[int, int], pad_size: tuple[int, int] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zero-pads images (C, H_i, W_i) on the right and at the bottom and stacks them into a batch.

    Args:
        images: Images with the same number of channels.
        multiple: Height and width of a patch.
        pad_size: Height and width of the batch, multiples of the patch size. The default is the smallest size that
            fits all images.

    Returns:
        The batch (B, C, H, W), and a mask (B, h, w) that is True for patches with at least one pixel of the image.
    """
    # The number of patches is rounded up, because a partially filled patch belongs to the image.
    patches = [(-(-image.shape[-2] // multiple[0]), -(-image.shape[-1] // multiple[1])) for image in images]
    rows, columns = max(counts[0] for counts in patches), max(counts[1] for counts in patches)
    if pad_size is not None:
        images = [pad_to(image, *pad_size, f"images[{index}]") for index, image in enumerate(images)]
        rows, columns = pad_size[0] // multiple[0], pad_size[1] // multiple[1]
    batch = images[0].new_zeros(len(images), images[0].shape[0], rows * multiple[0], columns * multiple[1])
    mask = torch.zeros(len(images), rows, columns, dtype=torch.bool, device=batch.device)
    for index, (image, (own_rows, own_columns)) in enumerate(zip(images, patches, strict=True)):
        batch[index, :, : image.shape[-2], : image.shape[-1]] = image
        mask[index, :own_rows, :own_columns] = True
    return batch, mask  # (B, C, H, W), (B, h, w)


def resize_with_pil(image: Tensor, height: int, width: int, resample: PILImageResampling) -> Tensor:
    """Uses PIL to resize a uint8 or float32 image (C, H, W) with any number of channels to (C, height, width)."""
    if image.shape[0] == 3 and image.dtype == torch.uint8:
        return torch.from_numpy(_resize_array(image.movedim(0, -1).numpy(), height, width, resample)).movedim(-1, 0)
    # Channels are resized one by one, because PIL premultiplies alpha and has no modes for many or float channels.
    channels = [_resize_array(channel.numpy(), height, width, resample) for channel in image]
    return torch.from_numpy(np.stack(channels))


def _resize_array(array: np.ndarray, height: int, width: int, resample: PILImageResampling) -> np.ndarray:
    return np.array(PIL.Image.fromarray(array).resize((width, height), resample))


def crop_regions(boxes: Tensor, size: tuple[int, int], padding: float) -> Tensor:
    """Returns crop regions (N, 4) float64: boxes scaled by `padding` and extended to the aspect ratio of `size`."""
    # Source: `box_to_center_and_scale` of https://github.com/ViTAE-Transformer/ViTPose.
    boxes, ratio = boxes.double(), size[1] / size[0]
    width, height = (boxes[:, 2:] - boxes[:, :2]).unbind(dim=1)  # (N,)
    half = torch.stack((width.maximum(height * ratio), height.maximum(width / ratio)), dim=1) * padding / 2  # (N, 2)
    center = (boxes[:, :2] + boxes[:, 2:]) / 2  # (N, 2)
    return torch.cat((center - half, center + half), dim=1)


def points_to_crops(points: Tensor, regions: Tensor, size: tuple[int, int]) -> Tensor:
    """Converts points (N, K, 2) from image pixels to pixels of crops or heatmaps of `size` (height, width)."""
    origin, scale = _origin_and_scale(regions, size)
    return ((points - origin) / scale).to(points.dtype)


def points_from_crops(points: Tensor, regions: Tensor, size: tuple[int, int]) -> Tensor:
    """Converts points (N, K, 2) from pixels of crops or heatmaps of `size` (height, width) to image pixels."""
    origin, scale = _origin_and_scale(regions, size)
    return (points * scale + origin).to(points.dtype)


def _origin_and_scale(regions: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Returns the top-left corners of regions and the size of a crop pixel in image pixels, (N, 1, 2) each."""
    steps = regions.new_tensor([size[1] - 1, size[0] - 1])
    return regions[:, None, :2], ((regions[:, 2:] - regions[:, :2]) / steps)[:, None]


def keypoints_to_crops(keypoints: Tensor, regions: Tensor, size: tuple[int, int]) -> Tensor:
    """Converts keypoints (N, K, 3) from image pixels to crop pixels; keypoints outside the crop are set to zero."""
    places = points_to_crops(keypoints[..., :2], regions.to(keypoints.device), size)
    return zero_keypoints_outside(torch.cat((places, keypoints[..., 2:]), dim=-1), size)


def zero_keypoints_outside(keypoints: Tensor, size: tuple[int, int]) -> Tensor:
    """Sets keypoints (..., 3) to zero if they are unlabeled or outside a crop of `size` (height, width)."""
    places, last = keypoints[..., :2], keypoints.new_tensor([size[1], size[0]]) - 0.5
    is_left = (keypoints[..., 2] > 0) & ((places >= -0.5) & (places <= last)).all(dim=-1)
    return torch.where(is_left[..., None], keypoints, 0)


def crop_region(image: Tensor, region: Tensor, size: tuple[int, int]) -> Tensor:
    """Crops a region (4,) of an image (C, H, W) and resizes it bilinearly; pixels outside the image are black."""
    left, top, right, bottom = region.tolist()
    columns, rows = (
        torch.linspace(*ends, dtype=torch.float64) for ends in ((left, right, size[1]), (top, bottom, size[0]))
    )
    return sample_pixels(image, *torch.meshgrid(columns, rows, indexing="xy"))


def sample_pixels(image: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Samples a uint8 or float32 image (C, H, W) bilinearly at positions x and y (h, w) in pixels.

    The dtype is preserved. Positions outside the image are black.
    """
    columns, across, has_column = _sampling_positions(x, image.shape[-1])
    rows, down, has_row = _sampling_positions(y, image.shape[-2])
    grid = torch.stack((across, down), dim=-1)[None].to(image.device)  # (1, h, w, 2)
    part = image[None, :, rows, columns].float()
    values = F.grid_sample(part, grid, padding_mode="border", align_corners=True)[0]  # (C, h, w)
    values = values * (has_row & has_column).to(image.device)
    return values if image.is_floating_point() else (values + 0.5).floor().to(image.dtype)


def _sampling_positions(places: Tensor, side: int) -> tuple[slice, Tensor, Tensor]:
    """Prepares sampling positions (h, w), in pixels along one axis of an image, for `grid_sample`.

    Returns the slice of pixels that sampling reads, the positions scaled to [-1, 1] across this slice, and a mask of
    the positions inside the image.
    """
    start, stop = (min(max(int(end), 0), side - 1) for end in (places.min().floor(), places.max().ceil()))
    relative = (places - start) / max(stop - start, 1) * 2 - 1
    is_inside = (places >= -EDGE_TOLERANCE) & (places <= side - 1 + EDGE_TOLERANCE)
    return slice(start, stop + 1), relative.float(), is_inside
