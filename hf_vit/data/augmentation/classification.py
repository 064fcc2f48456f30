"""Augmentation for image classification, based on `torchvision.transforms.v2`."""

from collections.abc import Callable
from functools import partial
from typing import Any

from PIL.Image import Image
from torch import Tensor

from ...extras import check_packages
from .operations import GRAY, check_colors, check_probabilities, read_uint8


AUTO_AUGMENTS = ("none", "trivialaugment", "randaugment", "affine", "3augment")
LARGEST_MAGNITUDE = 30
LARGEST_BLUR = 9  # maximum size of the blur kernel in pixels


def small_affine() -> Callable[[Any], Any]:
    """Return a slight random rotation, shift, zoom and shear, which imitates differences in handwriting."""
    from torchvision.transforms import v2  # imported here because torchvision is optional

    return v2.RandomAffine(
        degrees=8, translate=(0.06, 0.06), scale=(0.9, 1.1), shear=5, interpolation=v2.InterpolationMode.BILINEAR
    )


def three_augment(size: tuple[int, int], num_channels: int) -> Callable[[Any], Any]:
    """Return a transform that applies either grayscale, solarization or Gaussian blur, with equal probability.

    This is 3-Augment of DeiT III, https://arxiv.org/abs/2204.07118.

    Args:
        size: Height and width of images in pixels.
        num_channels: Number of channels of images, 1 or 3.
    """
    from torchvision.transforms import v2  # imported here because torchvision is optional

    # The kernel size must be odd, and small enough for the reflection padding of the blur.
    kernel = min(LARGEST_BLUR, 2 * min(size) - 1)
    changes = [v2.Grayscale(num_channels), v2.RandomSolarize(128, p=1.0), v2.GaussianBlur(kernel, (0.1, 2.0))]
    return v2.RandomChoice(changes)


def image_classification_augmentation(
    size: tuple[int, int],
    num_channels: int = 3,
    min_crop_scale: float = 0.35,
    horizontal_flip: float = 0.5,
    auto_augment: str = "trivialaugment",
    random_erasing: float = 0.25,
    *,
    crop_padding: int = 0,
    randaugment_num_ops: int = 2,
    randaugment_magnitude: int = 9,
    color_jitter: float = 0.0,
) -> Callable[[Image], Tensor]:
    """Return a function that augments and resizes training images for image classification.

    Args:
        size: Height and width of the output in pixels.
        num_channels: Number of channels C of the output. The image processor uses the same color conversion.
        min_crop_scale: Minimum fraction of the image area that the random resized crop keeps, in (0, 1]
            (https://arxiv.org/abs/1409.4842). 1 resizes the whole image.
        horizontal_flip: Probability of a horizontal flip, in [0, 1].
        auto_augment: "trivialaugment" (https://arxiv.org/abs/2103.10158), "randaugment"
            (https://arxiv.org/abs/1909.13719), "affine" (see `small_affine`), "3augment" (see `three_augment`) or
            "none".
        random_erasing: Probability of graying out a random rectangle, in [0, 1] (https://arxiv.org/abs/1708.04896).
        crop_padding: Pixels of reflection padding, added after resizing and before a random crop of `size`. With
            `min_crop_scale=1`, this is the simple random crop of DeiT III, except that the aspect ratio may change.
        randaugment_num_ops: Number of operations of "randaugment".
        randaugment_magnitude: Strength of each operation of "randaugment", from 0 to 30.
        color_jitter: Maximum change of brightness, contrast and saturation, applied after `auto_augment`, in [0, 1].

    Returns:
        A function from an image of any size and mode to a (C, height, width) uint8 tensor.

    Raises:
        ImportError: if torchvision is not installed.
        ValueError: if a value is out of range, or if color augmentation is enabled and C is neither 1 nor 3.
    """
    if not 0 < min_crop_scale <= 1:
        raise ValueError(f"min_crop_scale={min_crop_scale} must lie in (0, 1]; 1 uses the whole image.")
    check_probabilities(horizontal_flip=horizontal_flip, random_erasing=random_erasing)
    _check_options(size, num_channels, auto_augment, crop_padding, color_jitter)
    check_packages("Augmentation", "torchvision")
    from torchvision.transforms import v2  # imported here because torchvision is optional

    steps: list[Callable[[Any], Any]] = [partial(read_uint8, num_channels=num_channels)]
    is_cropped = min_crop_scale < 1
    steps.append(
        v2.RandomResizedCrop(size, scale=(min_crop_scale, 1.0), antialias=True) if is_cropped else v2.Resize(size)
    )
    if crop_padding:
        steps.append(v2.RandomCrop(size, padding=crop_padding, padding_mode="reflect"))
    if horizontal_flip:
        steps.append(v2.RandomHorizontalFlip(horizontal_flip))
    steps += _auto_augment(auto_augment, size, num_channels, randaugment_num_ops, randaugment_magnitude)
    if color_jitter:
        steps.append(v2.ColorJitter(color_jitter, color_jitter, color_jitter))
    if random_erasing:
        steps.append(v2.RandomErasing(random_erasing, value=GRAY))
    return v2.Compose(steps)


def cropped_example_augmentation(
    draw: Callable[[dict[str, Any]], dict[str, Any]],
    size: tuple[int, int],
    num_channels: int,
    min_crop_scale: float,
    horizontal_flip: float,
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return an augmentation that crops and flips the image of an example and adds random values to the example.

    Args:
        draw: Function from an example to a dictionary of random values, such as the seed of a mask.
        size: Height and width of the output in pixels.
        num_channels: Number of channels C of the output.
        min_crop_scale: Minimum fraction of the image area that the random resized crop keeps, in (0, 1].
        horizontal_flip: Probability of a horizontal flip, in [0, 1].

    Returns:
        A function from an example with `image` to a dictionary of `image` (C, height, width) uint8 and the output of
        `draw`.

    Raises:
        ImportError: if torchvision is not installed.
        ValueError: if a value is out of range.
    """
    transform = image_classification_augmentation(
        size, num_channels, min_crop_scale, horizontal_flip, auto_augment="none", random_erasing=0.0
    )
    return partial(_augment_example, transform, draw)


def _augment_example(
    transform: Callable[[Image], Tensor], draw: Callable[[dict[str, Any]], dict[str, Any]], example: dict[str, Any]
) -> dict[str, Any]:
    return {"image": transform(example["image"]), **draw(example)}


def _auto_augment(
    name: str, size: tuple[int, int], num_channels: int, num_ops: int, magnitude: int
) -> list[Callable[[Any], Any]]:
    from torchvision.transforms import v2  # imported here because torchvision is optional

    if name == "none":
        return []
    if name == "trivialaugment":
        return [v2.TrivialAugmentWide(interpolation=v2.InterpolationMode.BILINEAR)]
    if name != "randaugment":
        return [small_affine() if name == "affine" else three_augment(size, num_channels)]
    if num_ops < 1:
        raise ValueError(f"randaugment_num_ops={num_ops} must be at least 1. Or set auto_augment to none.")
    if not 0 <= magnitude <= LARGEST_MAGNITUDE:
        raise ValueError(f"randaugment_magnitude={magnitude} must lie between 0 and {LARGEST_MAGNITUDE}.")
    return [v2.RandAugment(num_ops, magnitude, interpolation=v2.InterpolationMode.BILINEAR)]


def _check_options(
    size: tuple[int, int], num_channels: int, auto_augment: str, crop_padding: int, color_jitter: float
) -> None:
    if not 0 <= crop_padding < min(size):
        raise ValueError(
            f"crop_padding={crop_padding} must lie between 0 and {min(size) - 1}; 0 disables it. Reflection padding "
            f"must be smaller than the image of {size} pixels."
        )
    if not 0 <= color_jitter <= 1:
        raise ValueError(f"color_jitter={color_jitter} must lie in [0, 1]; 0 disables it.")
    check_colors(num_channels, color_jitter=color_jitter)
    if auto_augment not in AUTO_AUGMENTS:
        raise ValueError(f"auto_augment={auto_augment!r} is unknown. Choose one of {', '.join(AUTO_AUGMENTS)}.")
    if auto_augment not in ("none", "affine") and num_channels not in (1, 3):
        raise ValueError(
            f"auto_augment={auto_augment!r} changes colors, which requires 1 or 3 channels, not "
            f"num_channels={num_channels}. Set auto_augment to none or affine."
        )
