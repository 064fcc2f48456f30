"""Augmented views of whole batches: the effect of each random number."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_vit.data.augmentation.views import NUM_DRAWN, MultiCrop, ViewColors, blur_matrix, make_views


NUMBERS = ("area", "ratio", "top", "left", "flip", "blur", "sigma", "jitter", "brightness", "contrast", "saturation")
NUMBERS += ("hue", "gray", "solarize")
# Parameters that change nothing except the crop; augmentations with a probability below 1 are off
PLAIN = {"area": 0.5, "ratio": 0.5, "top": 0.0, "left": 0.0, **dict.fromkeys(NUMBERS[4:], 0.5)}
NO_COLORS = dict.fromkeys(("color_jitter", "grayscale", "blur", "solarize"), 0.0)


def view(
    images: Tensor, size: int, scale: float = 1.0, flip: float = 0.0, colors: Any = None, **drawn: float
) -> Tensor:
    numbers = torch.tensor([{**PLAIN, **drawn}[name] for name in NUMBERS]).expand(len(images), -1)
    changes = ViewColors(**{**NO_COLORS, **(colors or {})})
    return make_views(images, numbers, (size, size), (scale, scale), flip, changes)


@pytest.fixture
def images() -> Tensor:
    return torch.rand(2, 3, 16, 16)


@pytest.mark.parametrize("size", [8, 16, 24])
def test_a_whole_image_is_resized_as_torch_does(images: Tensor, size: int) -> None:
    expected = F.interpolate(images, (size, size), mode="bilinear", antialias=True)
    torch.testing.assert_close(view(images, size), expected, atol=1e-5, rtol=0)


def test_a_crop_lies_where_its_numbers_say(images: Tensor) -> None:
    corner = view(images, 8, scale=0.25, top=1.0, left=0.5)
    torch.testing.assert_close(corner, images[:, :, 8:, 4:12], atol=1e-5, rtol=0)


def test_a_mirror_image(images: Tensor) -> None:
    torch.testing.assert_close(view(images, 16, flip=1.0), images.flip(-1), atol=1e-5, rtol=0)


def test_colors_turn_in_a_circle(images: Tensor) -> None:
    third = 0.5 + 1 / 3  # hue goes from -0.5 to 0.5
    colors = {"color_jitter": 1.0, "hue": 0.5, "brightness": 0.0, "contrast": 0.0, "saturation": 0.0}
    turned = view(images, 16, colors=colors, hue=third)
    torch.testing.assert_close(turned, images.roll(1, dims=1), atol=1e-5, rtol=0)


def test_colors_that_go_leave_the_mean(images: Tensor) -> None:
    gray = view(images, 16, colors={"grayscale": 1.0})
    torch.testing.assert_close(gray, images.mean(dim=1, keepdim=True).expand_as(images), atol=1e-5, rtol=0)


def test_brightness_and_contrast_are_factors(images: Tensor) -> None:
    dark = view(images, 16, colors={"color_jitter": 1.0, "brightness": 0.4}, brightness=0.0)
    torch.testing.assert_close(dark, images * 0.6, atol=1e-5, rtol=0)
    flat = view(images, 16, colors={"color_jitter": 1.0, "contrast": 1.0}, contrast=0.0)
    torch.testing.assert_close(flat, images.mean(dim=(1, 2, 3), keepdim=True).expand_as(images), atol=1e-5, rtol=0)


def test_bright_colors_are_inverted(images: Tensor) -> None:
    solar = view(images, 16, colors={"solarize": 1.0})
    torch.testing.assert_close(solar, torch.where(images > 0.5, 1 - images, images), atol=1e-5, rtol=0)


def test_a_blur_is_gaussian() -> None:
    row = blur_matrix(torch.tensor([2.0, 0.0]), 41)
    torch.testing.assert_close(row.sum(dim=-1), torch.ones(2, 41))
    offsets = torch.arange(41) - 20.0
    assert float((row[0, 20] * offsets**2).sum()) == pytest.approx(4, rel=0.01)
    torch.testing.assert_close(row[1], torch.eye(41))


def test_a_view_depends_on_its_image_and_numbers_alone() -> None:
    images, drawn = torch.randn(3, 3, 16, 16), torch.rand(3, 5 * NUM_DRAWN)
    crops = MultiCrop((16, 16), (8, 8), 2, 3, (0.3, 1), (0.1, 0.4), 0.5, ViewColors(), (0.5,) * 3, (0.2,) * 3)
    views = crops(images, drawn)
    assert views["pixel_values"].shape == (3, 2, 3, 16, 16)
    assert views["local_pixel_values"].shape == (3, 3, 3, 8, 8)
    alone = crops(images[1:2], drawn[1:2])
    for name, values in views.items():
        torch.testing.assert_close(alone[name], values[1:2], atol=1e-4, rtol=0)
    shown = views["pixel_values"] * 0.2 + 0.5
    assert float(shown.min()) > -1e-4
    assert float(shown.max()) < 1 + 1e-4


def test_gray_images_have_views_too() -> None:
    crops = MultiCrop((8, 8), (4, 4), 1, 1, (0.3, 1), (0.1, 0.4), 0.5, ViewColors(), (0.5,), (0.5,))
    assert crops(torch.randn(2, 1, 8, 8), torch.rand(2, crops.num_drawn))["pixel_values"].shape == (2, 1, 1, 8, 8)


@pytest.mark.parametrize("change", [{"blur": 1.5}, {"hue": 0.6}])
def test_colors_out_of_range_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(change.values())))):
        ViewColors(**change)
