"""Test the effect of each option on augmented views of whole batches."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_vit.data.augmentation.views import NUM_DRAWN, MultiCrop, ViewColors, blur_matrix, make_views

from .errors import expect_error


NUMBERS = ("area", "ratio", "top", "left", "flip", "blur", "sigma", "jitter", "brightness", "contrast", "saturation")
NUMBERS += ("hue", "gray", "solarize")
# Options that disable all optional augmentations.
PLAIN = {"area": 0.5, "ratio": 0.5, "top": 0.0, "left": 0.0, **dict.fromkeys(NUMBERS[4:], 0.5)}
NO_COLORS = dict.fromkeys(("color_jitter", "grayscale", "blur", "solarize"), 0.0)


def view(images: Tensor, size: int, scale: float = 1.0, flip: float = 0.0, colors: Any = None, **drawn: float) -> Any:
    numbers = torch.tensor([{**PLAIN, **drawn}[name] for name in NUMBERS]).expand(len(images), -1)
    changes = ViewColors(**{**NO_COLORS, **(colors or {})})
    return make_views(images, numbers, (size, size), (scale, scale), flip, changes)


THIRD = 0.5 + 1 / 3  # position of a hue shift of +1/3 in the range from -0.5 to 0.5
HUE = {"color_jitter": 1.0, "hue": 0.5, "brightness": 0.0, "contrast": 0.0, "saturation": 0.0}
FLAT = {"color_jitter": 1.0, "contrast": 1.0}
# Name of an augmentation -> size and options of a view, and a function that returns the expected views of images.
EFFECTS: dict[str, tuple[int, dict[str, Any], Callable[[Tensor], Tensor]]] = {
    "smaller": (8, {}, partial(F.interpolate, size=(8, 8), mode="bilinear", antialias=True)),
    "as large": (16, {}, lambda images: images),
    "larger": (24, {}, partial(F.interpolate, size=(24, 24), mode="bilinear", antialias=True)),
    "cropped": (8, {"scale": 0.25, "top": 1.0, "left": 0.5}, lambda images: images[:, :, 8:, 4:12]),
    "mirrored": (16, {"flip": 1.0}, lambda images: images.flip(-1)),
    "hue": (16, {"colors": HUE, "hue": THIRD}, lambda images: images.roll(1, dims=1)),
    "gray": (16, {"colors": {"grayscale": 1.0}}, lambda images: images.mean(dim=1, keepdim=True)),
    "dark": (16, {"colors": {"color_jitter": 1.0, "brightness": 0.4}, "brightness": 0.0}, lambda images: images * 0.6),
    "flat": (16, {"colors": FLAT, "contrast": 0.0}, lambda images: images.mean(dim=(1, 2, 3), keepdim=True)),
    "solarized": (16, {"colors": {"solarize": 1.0}}, lambda images: torch.where(images > 0.5, 1 - images, images)),
}


@pytest.mark.parametrize(("size", "options", "expect"), EFFECTS.values(), ids=EFFECTS)
def test_each_option_has_its_effect(size: int, options: dict[str, Any], expect: Callable[[Tensor], Tensor]) -> None:
    images = torch.rand(2, 3, 16, 16)
    found = view(images, size, **options)
    torch.testing.assert_close(found, expect(images).expand_as(found), atol=1e-5, rtol=0)


def test_a_blur_is_gaussian_and_options_have_a_range() -> None:
    row = blur_matrix(torch.tensor([2.0, 0.0]), 41)
    torch.testing.assert_close(row.sum(dim=-1), torch.ones(2, 41))
    offsets = torch.arange(41) - 20.0
    assert float((row[0, 20] * offsets**2).sum()) == pytest.approx(4, rel=0.01)
    torch.testing.assert_close(row[1], torch.eye(41))
    for change in ({"blur": 1.5}, {"hue": 0.6}):
        expect_error(str(*change.values()), ViewColors, **change)


def test_a_view_depends_on_its_image_and_numbers_alone_and_may_be_gray() -> None:
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
    crops = MultiCrop((8, 8), (4, 4), 1, 1, (0.3, 1), (0.1, 0.4), 0.5, ViewColors(), (0.5,), (0.5,))
    assert crops(torch.randn(2, 1, 8, 8), torch.rand(2, crops.num_drawn))["pixel_values"].shape == (2, 1, 1, 8, 8)
