"""Random views of a batch of images for joint-embedding training: crops, color changes and blur.

Shapes: B images, C channels, H and W image size, h and w view size in pixels, K random numbers per view.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .operations import check_probabilities


NUM_DRAWN = 14  # Number K of random numbers per view.
MAX_RATIO = 4 / 3  # Maximum aspect ratio of a crop.
MIN_SIGMA, MAX_SIGMA = 0.1, 2.0  # Range of the blur's standard deviation in pixels, for 224x224 views.
BLUR_SIZE = 224


@dataclass(frozen=True)
class ViewColors:
    """Probabilities and strengths of the color augmentation of views, in the units of torchvision's ColorJitter.

    Args:
        color_jitter: Probability of changing brightness, contrast, saturation and hue.
        brightness: Maximum relative change of brightness.
        contrast: Maximum relative change of contrast.
        saturation: Maximum relative change of saturation.
        hue: Maximum change of hue as a fraction of the color circle, in [0, 0.5].
        grayscale: Probability of converting the view to grayscale.
        blur: Probability of a Gaussian blur.
        solarize: Probability of inverting values above 0.5.
    """

    color_jitter: float = 0.8
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    hue: float = 0.1
    grayscale: float = 0.2
    blur: float = 0.5
    solarize: float = 0.1

    def __post_init__(self) -> None:
        check_probabilities(**vars(self))
        if self.hue > 0.5:
            raise ValueError(f"hue={self.hue} must lie in [0, 0.5], as a fraction of the color circle.")


def make_views(
    images: Tensor,
    drawn: Tensor,
    size: tuple[int, int],
    crop_scale: tuple[float, float],
    horizontal_flip: float,
    colors: ViewColors,
) -> Tensor:
    """Return one view of each image: a random crop with a random horizontal flip, color changes and blur.

    Crop, flip, antialiased resizing and blur are linear and separable, so they are computed together by one matrix
    product from the left and one from the right. Brightness, contrast, saturation and hue are changed together by one
    affine map of the colors of a pixel.

    Args:
        images: Images (B, C, H, W) in [0, 1].
        drawn: Uniform random numbers (B, K) in [0, 1) that determine the views.
        size: Height and width of the views in pixels.
        crop_scale: Minimum and maximum area of the crop as a fraction of the image area, in (0, 1].
        horizontal_flip: Probability of a horizontal flip, in [0, 1].
        colors: Options of the color augmentation.

    Returns:
        Views (B, C, h, w) in [0, 1].
    """
    shape = images.shape[-2:]
    area, ratio, top, left, flip, *others = drawn.to(images).unbind(dim=1)  # (B,) each
    share = (crop_scale[0] + area * (crop_scale[1] - crop_scale[0])) * shape[0] * shape[1]
    ratio = MAX_RATIO ** (2 * ratio - 1)
    height = (share / ratio).sqrt().clamp_max(shape[0])
    width = (share * ratio).sqrt().clamp_max(shape[1])
    blurred, sigma, *colored = others
    scale = min(size) / BLUR_SIZE
    sigma = torch.where(blurred < colors.blur, scale * (MIN_SIGMA + sigma * (MAX_SIGMA - MIN_SIGMA)), 0.0)
    rows = blur_matrix(sigma, size[0]) @ resize_matrix(top * (shape[0] - height), height, shape[0], size[0])
    columns = blur_matrix(sigma, size[1]) @ resize_matrix(left * (shape[1] - width), width, shape[1], size[1])
    columns = torch.where((flip < horizontal_flip)[:, None, None], columns.flip(1), columns)
    views = rows[:, None] @ images @ columns.transpose(1, 2)[:, None]
    return change_colors(views, torch.stack(colored, dim=1), colors)


def resize_matrix(start: Tensor, length: Tensor, old: int, new: int) -> Tensor:
    """Return matrices (B, new, old) that crop `length` (B,) pixels from `start` (B,) and resize them to `new` pixels.

    Interpolation is bilinear and antialiased.
    """
    scale = length / new
    centers = start[:, None] + (torch.arange(new, device=start.device) + 0.5) * scale[:, None]  # (B, new)
    pixels = torch.arange(old, device=start.device) + 0.5
    reach = scale.clamp_min(1)[:, None, None]
    weights = (1 - (centers[..., None] - pixels).abs() / reach).clamp_min(0)
    return weights / weights.sum(dim=-1, keepdim=True)


def blur_matrix(sigma: Tensor, size: int) -> Tensor:
    """Return Gaussian blur matrices (B, size, size); the standard deviation `sigma` (B,) in pixels may be 0."""
    places = torch.arange(size, device=sigma.device, dtype=sigma.dtype)
    distance = (places[:, None] - places).square()
    weights = (-distance / (2 * sigma.clamp_min(1e-3).square())[:, None, None]).exp()
    return weights / weights.sum(dim=-1, keepdim=True)


def change_colors(views: Tensor, drawn: Tensor, colors: ViewColors) -> Tensor:
    """Change the colors of views (B, C, h, w) in [0, 1] as determined by random numbers (B, 7) in [0, 1)."""
    jitter, brightness, contrast, saturation, hue, gray, solarize = drawn.unbind(dim=1)
    is_changed = jitter < colors.color_jitter

    def factor(number: Tensor, largest: float) -> Tensor:
        return torch.where(is_changed, 1 + largest * (2 * number - 1), 1.0)

    brightness, contrast = factor(brightness, colors.brightness), factor(contrast, colors.contrast)
    if views.shape[1] == 3:
        angle = 2 * math.pi * (factor(hue, colors.hue) - 1)
        chroma = torch.where(gray < colors.grayscale, 0.0, factor(saturation, colors.saturation))
        turned = color_matrix(angle, chroma) @ views.flatten(2)
    else:
        turned = views.flatten(2)
    middle = turned.mean(dim=(1, 2))
    slope, offset = brightness * contrast, brightness * (1 - contrast) * middle
    changed = (turned * slope[:, None, None] + offset[:, None, None]).clamp(0, 1).view_as(views)
    is_solar = (solarize < colors.solarize)[:, None, None, None]
    return torch.where(is_solar & (changed > 0.5), 1 - changed, changed)


def color_matrix(angle: Tensor, chroma: Tensor) -> Tensor:
    """Return matrices (B, 3, 3) that rotate hue by `angle` (B,) in radians and scale saturation by `chroma` (B,)."""
    gray = angle.new_full((3, 3), 1 / 3)
    cross = angle.new_tensor([[0.0, -1, 1], [1, 0, -1], [-1, 1, 0]]) / math.sqrt(3)
    cosine, sine = (chroma * part for part in (angle.cos(), angle.sin()))
    return gray + cosine[:, None, None] * (torch.eye(3, device=angle.device) - gray) + sine[:, None, None] * cross


@dataclass(frozen=True)
class MultiCrop:
    """Multi-crop augmentation: global views show large parts of an image, smaller local views show small parts.

    See SwAV, https://arxiv.org/abs/2006.09882.

    Args:
        size: Height and width of global views in pixels.
        local_size: Height and width of local views in pixels.
        num_global: Number G of global views per image.
        num_local: Number L of local views per image.
        global_scale: Minimum and maximum area of a global view as a fraction of the image area.
        local_scale: Minimum and maximum area of a local view as a fraction of the image area.
        horizontal_flip: Probability of a horizontal flip.
        colors: Options of the color augmentation.
        mean: Mean of each channel that `pixel_values` are normalized with.
        std: Standard deviation of each channel that `pixel_values` are normalized with.
    """

    size: tuple[int, int]
    local_size: tuple[int, int]
    num_global: int
    num_local: int
    global_scale: tuple[float, float]
    local_scale: tuple[float, float]
    horizontal_flip: float
    colors: ViewColors
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def num_drawn(self) -> int:
        """Number of random numbers in [0, 1) that determine all views of one image."""
        return (self.num_global + self.num_local) * NUM_DRAWN

    def __call__(self, pixel_values: Tensor, drawn: Tensor) -> dict[str, Tensor]:
        """Create the views of normalized images (B, C, H, W) from random numbers (B, `num_drawn`) in [0, 1).

        The normalized views are `pixel_values` (B, G, C, h, w) and, if there are local views, `local_pixel_values`
        (B, L, C, h', w').
        """
        mean, std = (pixel_values.new_tensor(values)[:, None, None] for values in (self.mean, self.std))
        images = pixel_values * std + mean
        numbers = drawn.unflatten(1, (-1, NUM_DRAWN)).unbind(dim=1)
        make = partial(make_views, images, horizontal_flip=self.horizontal_flip, colors=self.colors)
        large = [make(part, self.size, self.global_scale) for part in numbers[: self.num_global]]
        small = [make(part, self.local_size, self.local_scale) for part in numbers[self.num_global :]]
        views = {"pixel_values": torch.stack(large, dim=1)}
        if small:
            views["local_pixel_values"] = torch.stack(small, dim=1)
        return {name: (values - mean) / std for name, values in views.items()}
