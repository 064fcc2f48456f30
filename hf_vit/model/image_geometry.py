"""Geometry of images: resizing, center crop, padding and its mask, and crops of single objects.

Coordinates in crops of objects are continuous, with the center of pixel i at i, as in ViTPose and COCO's keypoints. A
crop shows a region whose ends are the centers of its outermost pixels. So points go to the crop, to heatmaps of any
size and back without a bias ("UDP", https://arxiv.org/abs/1911.07524).

Shapes: B batch, N objects, K keypoints, C channels, H W pixels, h w patches or pixels of a crop.
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


# The forms that `size` can take
RESIZE_KEYS = (
    ("height", "width"),
    ("shortest_edge",),
    ("longest_edge",),
    ("shortest_edge", "longest_edge"),
    ("max_height", "max_width"),
)
EXACT_KEYS = RESIZE_KEYS[:1]
# Where a crop starts that leaves an odd number of pixels over: transformers rounds down, torchvision and with it timm
# rounds to the even number, as Python does.
CROP_ROUNDINGS = ("down", "half_to_even")
# How sides become multiples of a number of pixels
MULTIPLE_ROUNDINGS = ("nearest", "down")
# About 5800 x 5800, 400 MB of float32 RGB: beyond every ViT, and within what a slip in `size` may cost
MAX_OUTPUT_PIXELS = 2**25
EDGE_TOLERANCE = 1e-3  # pixels, above the rounding of coordinates


def to_size_dict(
    size: Any, name: str, forms: tuple[tuple[str, ...], ...] = RESIZE_KEYS, default_to_square: bool = True
) -> SizeDict | None:
    """Returns a size as the library's `SizeDict`, in pixels; `ValueError` for keys not in `forms` or no positive int.

    A size is an int, of a square, or of the shortest edge without `default_to_square`; `(height, width)`; a
    dictionary; or `None`, which stays `None`.
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
        raise ValueError(f"{name}={size!r} must hold positive whole numbers of pixels.")
    return SizeDict(**keys)


def height_and_width(size: Any) -> tuple[int, int]:
    """Returns the pair of numbers in an exact `SizeDict` or dictionary."""
    return size["height"], size["width"]


def resized_size(
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
    """Returns the height and width in pixels that an image is resized to, given the options of an image processor.

    `size` is exact, of which with `keep_aspect_ratio` only the side counts that scales the image less, or a bound. The
    result is the nearest multiple of `ensure_multiple_of`, or the one below ("down"), at least one. `ValueError` above
    `MAX_OUTPUT_PIXELS`, as thin images scaled by their shortest edge may be.
    """
    rows, columns = (1, 1) if ensure_multiple_of is None else to_pair(ensure_multiple_of)
    is_cut, size = multiple_rounding == "down", dict(size)
    scale = _scaled_least if keep_aspect_ratio else _scaled_to_cut if is_cut else _scaled_size
    scaled, times = scale(height, width, size), math.floor if is_cut else round
    new_height = max(1, times(scaled[0] / rows)) * rows
    new_width = max(1, times(scaled[1] / columns)) * columns
    if new_height * new_width > MAX_OUTPUT_PIXELS:
        raise ValueError(
            f"{name} with {height} x {width} pixels would become {new_height} x {new_width} under size={size}, more "
            f"than {MAX_OUTPUT_PIXELS} pixels. Bound the long side too, as in {{'shortest_edge': 224, 'longest_edge': "
            "1024}, or give {'height', 'width'}."
        )
    return new_height, new_width


def _scaled_least(height: int, width: int, size: dict[str, int]) -> tuple[float, float]:
    """Returns the size before rounding, in floats as transformers' DPT has it, whose rounding ours must meet."""
    by_height, by_width = size["height"] / height, size["width"] / width
    scale = by_width if abs(1 - by_width) < abs(1 - by_height) else by_height
    return scale * height, scale * width


def _scaled_to_cut(height: int, width: int, size: dict[str, int]) -> tuple[float, float]:
    """Returns the size before it is rounded down to multiples, as transformers' YOLOS computes it."""
    # Unlike DETR, YOLOS rescales an upright image that already has its size. 864 pixels may become 863, then 848.
    is_bounded = {*size} == {"shortest_edge", "longest_edge"} and width < height
    if is_bounded and height / width * size["shortest_edge"] > size["longest_edge"]:
        short = size["longest_edge"] * width / height
        return int(short * height / width), round(short)
    return _scaled_size(height, width, size)


def _scaled_size(height: int, width: int, size: dict[str, int]) -> tuple[int, int]:
    """Returns the size before rounding to multiples, equal to the result of transformers' image processors."""
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
    """Resizes an image (..., H, W) to (..., height, width) by the pixel under each center."""
    # Computed in whole numbers: torchvision and PIL round centers that fall between two pixels each in its own way.
    rows = (2 * torch.arange(height, device=image.device) + 1) * image.shape[-2] // (2 * height)
    columns = (2 * torch.arange(width, device=image.device) + 1) * image.shape[-1] // (2 * width)
    return image[..., rows[:, None], columns]


def center_crop(image: torch.Tensor, height: int, width: int, rounding: str = "down", fill: float = 0) -> torch.Tensor:
    """Cuts the center out of an image (..., H, W), or surrounds it by `fill` where it is smaller."""
    # `rounding`, one of `CROP_ROUNDINGS`, decides where the crop starts if an odd number of pixels is left over.
    left, right = split_between_ends(width - image.shape[-1], rounding)
    top, bottom = split_between_ends(height - image.shape[-2], rounding)
    return F.pad(image, (left, right, top, bottom), value=fill)  # (..., height, width)


def split_between_ends(missing: int, rounding: str) -> tuple[int, int]:
    """Splits missing (or, if negative, surplus) pixels between both ends, the odd one as `rounding` says."""
    if missing > 0:
        return missing // 2, missing - missing // 2
    start = round(-missing / 2) if rounding == "half_to_even" else -missing // 2
    return -start, missing + start


def pad_to(image: torch.Tensor, height: int, width: int, name: str) -> torch.Tensor:
    """Pads an image (C, H, W) on the right and at the bottom with zeros to a size; `ValueError` if it is larger."""
    missing = (height - image.shape[-2], width - image.shape[-1])
    if min(missing) < 0:
        raise ValueError(
            f"{name} has {image.shape[-2]} x {image.shape[-1]} pixels after resizing, which do not fit into pad_size="
            f"{(height, width)}. Enlarge pad_size, or bound size by 'longest_edge'."
        )
    return F.pad(image, (0, missing[1], 0, missing[0]))


def pad_batch(
    images: list[torch.Tensor], multiple: tuple[int, int], pad_size: tuple[int, int] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pads images (C, H_i, W_i) on the right and at the bottom with zeros to one size, as a batch (B, C, H, W)."""
    # A mask (B, h, w) is True at the patches, of `multiple` pixels, that hold pixels of the image. `pad_size` is whole
    # patches, by default the least that hold every image.
    # a patch that an image fills only in part is its own
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
    """Resizes an image (C, H, W), uint8 or float32, any number of channels, to (C, height, width)."""
    if image.shape[0] == 3 and image.dtype == torch.uint8:
        return torch.from_numpy(_resize_array(image.movedim(0, -1).numpy(), height, width, resample)).movedim(-1, 0)
    # channel by channel: PIL has no mode for most numbers of channels or for floats, and weighs colors by alpha
    channels = [_resize_array(channel.numpy(), height, width, resample) for channel in image]
    return torch.from_numpy(np.stack(channels))


def _resize_array(array: np.ndarray, height: int, width: int, resample: PILImageResampling) -> np.ndarray:
    return np.array(PIL.Image.fromarray(array).resize((width, height), resample))


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
