"""The random changes that training images go through, from `torchvision.transforms.v2`."""

from collections.abc import Callable
from functools import partial
from typing import Any

from PIL.Image import Image
from torch import Tensor

from .augmentation_inputs import GREY, check_probabilities, read_uint8


AUTO_AUGMENTS = ("none", "trivialaugment", "randaugment", "affine")


def small_affine() -> Callable[[Any], Any]:
    """Returns a slight random rotation, shift, zoom and shear on black: what a digit looks like in another hand."""
    from torchvision.transforms import v2  # here, as all else in the package does without torchvision

    return v2.RandomAffine(
        degrees=8, translate=(0.06, 0.06), scale=(0.9, 1.1), shear=5, interpolation=v2.InterpolationMode.BILINEAR
    )


def image_classification_augmentation(
    size: tuple[int, int],
    num_channels: int = 3,
    min_crop_scale: float = 0.35,
    horizontal_flip: float = 0.5,
    auto_augment: str = "trivialaugment",
    random_erasing: float = 0.25,
) -> Callable[[Image], Tensor]:
    """Returns the augmentation of training images for classification, which also brings them to one size.

    Args:
        size: Height and width of the result in pixels.
        num_channels: Number of channels C of the result; colours are converted as the image processor does.
        min_crop_scale: Least share of the image's area that the random resized crop keeps, in (0, 1]
            (https://arxiv.org/abs/1409.4842). 1 resizes the whole image.
        horizontal_flip: Probability of a mirror image, in [0, 1].
        auto_augment: "trivialaugment" (https://arxiv.org/abs/2103.10158), "randaugment"
            (https://arxiv.org/abs/1909.13719, two operations of magnitude 9), "affine" (see `small_affine`) or "none".
        random_erasing: Probability that a rectangle becomes grey, in [0, 1] (https://arxiv.org/abs/1708.04896).

    Returns:
        A function from an image of any size and mode to (C, height, width) uint8.

    Raises:
        ImportError: if torchvision is not installed.
        ValueError: if a value is out of range, or `auto_augment` changes colours and C is neither 1 nor 3.
    """
    if not 0 < min_crop_scale <= 1:
        raise ValueError(f"min_crop_scale={min_crop_scale} must lie in (0, 1]; 1 takes the whole image.")
    check_probabilities(horizontal_flip=horizontal_flip, random_erasing=random_erasing)
    _check_auto_augment(auto_augment, num_channels)
    try:
        from torchvision.transforms import v2  # here, as all else in the package does without torchvision
    except ImportError as error:
        raise ImportError('Augmentation needs torchvision. Install it: pip install "hf-vit[train]".') from error

    is_cropped = min_crop_scale < 1
    steps: list[Callable[[Any], Any]] = [
        partial(read_uint8, num_channels=num_channels),
        v2.RandomResizedCrop(size, scale=(min_crop_scale, 1.0), antialias=True) if is_cropped else v2.Resize(size),
    ]
    if horizontal_flip:
        steps.append(v2.RandomHorizontalFlip(horizontal_flip))
    if auto_augment == "trivialaugment":
        steps.append(v2.TrivialAugmentWide(interpolation=v2.InterpolationMode.BILINEAR))
    elif auto_augment == "randaugment":
        steps.append(v2.RandAugment(interpolation=v2.InterpolationMode.BILINEAR))
    elif auto_augment == "affine":
        steps.append(small_affine())
    if random_erasing:
        steps.append(v2.RandomErasing(random_erasing, value=GREY))
    return v2.Compose(steps)


def _check_auto_augment(auto_augment: str, num_channels: int) -> None:
    if auto_augment not in AUTO_AUGMENTS:
        raise ValueError(f"auto_augment={auto_augment!r} is unknown. Choose one of {', '.join(AUTO_AUGMENTS)}.")
    if auto_augment not in ("none", "affine") and num_channels not in (1, 3):
        raise ValueError(
            f"auto_augment={auto_augment!r} changes colours, which images of num_channels={num_channels} have not: it "
            "takes 1 or 3. Set auto_augment to none or affine."
        )
