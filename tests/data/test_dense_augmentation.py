"""Test the joint augmentation of training images and their dense targets."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from hf_vit import HfViTConfig, HfViTImageProcessor
from hf_vit.data.augmentation.joint import DenseAugmentation
from hf_vit.training import whole_image_processor


HEIGHT, WIDTH = 180, 240
OFF: dict[str, Any] = {
    "scale_range": (1.0, 1.0), "max_class_share": 1.0, "horizontal_flip": 0.0, "max_rotation": 0.0, "photometric": 0.0
}  # fmt: skip
CHANGES: list[dict[str, Any]] = [
    {}, {"scale_range": (0.5, 2.0)}, {"scale_range": (0.5, 2.0), "keep_aspect_ratio": False},
    {"horizontal_flip": 1.0}, {"max_rotation": 40.0}, {"max_class_share": 0.5},
    {"scale_range": (0.5, 2.0), "horizontal_flip": 0.5, "max_rotation": 20.0}
]  # fmt: skip
# The red channel is the column and the green channel is the row, so each pixel encodes its origin.
ROWS, COLUMNS = torch.meshgrid(torch.arange(HEIGHT), torch.arange(WIDTH), indexing="ij")
PLACES = Image.fromarray(torch.stack([COLUMNS, ROWS, 0 * ROWS], dim=-1).to(torch.uint8).numpy())


def draws(target: dict[str, Tensor], count: int = 20, size: tuple[int, int] = (96, 128), **options: Any) -> list[dict]:
    """Return `count` random augmentations of an example. Only the given options are enabled."""
    transform = DenseAugmentation(size, **{**OFF, **options})
    torch.manual_seed(0)
    return [transform({"image": PLACES, "file": "a.jpg", **target}) for _ in range(count)]


@pytest.mark.parametrize("options", CHANGES)
@pytest.mark.parametrize(("places", "channel"), [(COLUMNS, 0), (ROWS, 1)])
def test_labels_stay_with_their_pixels(options: dict[str, Any], places: Tensor, channel: int) -> None:
    for example in draws({"segmentation_map": places}, **options):
        image, labels = example["image"], example["segmentation_map"]
        assert (image.shape, image.dtype) == ((3, 96, 128), torch.uint8)
        assert (labels.shape, labels.dtype) == ((96, 128), torch.int64)
        is_inside = labels != 255
        assert is_inside.float().mean() > 0.2
        distance = (image[channel].long() - labels)[is_inside].abs()
        # At the smallest scale, adjacent pixels differ by up to 2. Rotation blends the image border with the padding.
        enough = 0.96 if "max_rotation" in options else 0.999
        assert (distance <= 2).float().mean() > enough
        assert ((image == 128).all(dim=0) | is_inside).float().mean() > enough
        assert example["file"] == "a.jpg"


@pytest.mark.parametrize("options", CHANGES)
def test_masks_and_depth_move_as_labels_do(options: dict[str, Any]) -> None:
    places = 1 + ROWS // 8
    masks = torch.stack([places == 3, places == 9, (places >= 9) & (places < 16)])
    # Accept crops with a single class, because drawing another crop would change all later random numbers.
    options = {**options, "max_class_share": 1.0}
    labels = draws({"segmentation_map": places}, **options)
    depths = draws({"depth_map": places.float()}, **options)
    several = draws({"masks": masks, "class_labels": torch.tensor([5, 6, 7])}, **options)
    for by_class, by_depth, by_mask in zip(labels, depths, several, strict=True):
        numbers, depth = by_class["segmentation_map"], by_depth["depth_map"]
        assert torch.equal(by_class["image"], by_depth["image"])
        assert depth.dtype == torch.float32
        assert torch.equal(depth == 0, numbers == 255)
        ratios = numbers[depth > 0] / depth[depth > 0]
        assert torch.allclose(ratios, ratios[0].expand_as(ratios))
        expected = {5: numbers == 3, 6: numbers == 9, 7: (numbers >= 9) & (numbers < 16)}
        assert by_mask["class_labels"].tolist() == [number for number, mask in expected.items() if mask.any()]
        for number, mask in zip(by_mask["class_labels"].tolist(), by_mask["masks"], strict=True):
            assert mask.dtype == torch.bool
            assert torch.equal(mask, expected[number])


def test_masks_out_of_sight_and_crowds_are_dropped() -> None:
    masks = torch.zeros(2, HEIGHT, WIDTH, dtype=torch.bool)
    masks[1, :5, :5] = True
    found = draws({"masks": masks, "class_labels": torch.tensor([1, 2])}, scale_range=(2.0, 2.0))
    assert {tuple(example["class_labels"].tolist()) for example in found} == {(), (2,)}
    [empty] = draws({"masks": masks[:0], "class_labels": torch.tensor([])}, count=1, max_rotation=9.0)
    assert empty["masks"].shape == (0, 96, 128)
    # Crowd annotations are not used for training.
    masks = torch.stack([COLUMNS < 120, COLUMNS >= 120])
    target = {"masks": masks, "class_labels": torch.tensor([1, 2]), "is_crowd": torch.tensor([True, False])}
    [example] = draws(target, count=1)
    assert example["class_labels"].tolist() == [2]
    assert len(example["masks"]) == 1
    assert "is_crowd" not in example


def test_without_any_change_the_image_just_covers_the_result() -> None:
    [example] = draws({"segmentation_map": COLUMNS}, count=1, size=(90, 120))
    expected = np.asarray(PLACES.resize((120, 90), Image.Resampling.BILINEAR), dtype=int)
    assert np.abs(example["image"].movedim(0, -1).numpy().astype(int) - expected).max() <= 1
    [square] = draws({"segmentation_map": COLUMNS}, count=1, size=(90, 90))
    assert square["image"][1].max() >= 178  # the whole height of the image is visible
    assert int(square["segmentation_map"].max() - square["segmentation_map"].min()) in (178, 179)
    [squeezed] = draws({"segmentation_map": COLUMNS}, count=1, size=(90, 90), keep_aspect_ratio=False)
    # The whole width of the image is visible.
    assert squeezed["segmentation_map"].max() - squeezed["segmentation_map"].min() > 236


@pytest.mark.parametrize("keep_aspect_ratio", [True, False])
@pytest.mark.parametrize("size", [(64, 160), (160, 64), (96, 96)])
@pytest.mark.parametrize("shape", [(90, 150), (150, 90)])
def test_at_scale_one_images_are_as_large_as_in_evaluations(shape, size, keep_aspect_ratio):
    config = HfViTConfig(image_size=size, patch_size=2)
    processor = whole_image_processor(HfViTImageProcessor(), config, keep_aspect_ratio)
    rows, columns = torch.meshgrid(*map(torch.arange, shape), indexing="ij")
    transform = DenseAugmentation(size, **{**OFF, "keep_aspect_ratio": keep_aspect_ratio})
    image = torch.zeros(3, *shape, dtype=torch.uint8)
    evaluated = processor(image, return_tensors="pt")["pixel_values"].shape[-2:]
    for places, side in ((rows, 0), (columns, 1)):
        labels = transform({"image": image, "segmentation_map": places})["segmentation_map"]
        inside = labels[labels < 255]
        # Width or height of the area that a pixel of the augmented image covers in the original image, in pixels
        seen = (inside.max() - inside.min() + 1) / min(evaluated[side], size[side])
        assert seen == pytest.approx(shape[side] / evaluated[side], rel=0.04)


def test_scales_places_and_mirror_images_are_drawn() -> None:
    depth = 8 * torch.ones(HEIGHT, WIDTH)
    found = [example["depth_map"] for example in draws({"depth_map": depth}, count=60, scale_range=(0.5, 2.0))]
    values = torch.stack([example.max() for example in found])
    assert 4 <= values.min() < 5
    assert 14 < values.max() <= 16
    assert 20 < (values > 8).sum() < 40  # upscaling and downscaling are equally likely
    shares = torch.stack([(example > 0).float().mean() for example in found])
    assert torch.allclose(shares, (8 / values).clamp(max=1) ** 2, atol=0.03)
    # The positions of crops and padding vary, and half of the examples are mirrored.
    larger = draws({"segmentation_map": COLUMNS}, scale_range=(2.0, 2.0))
    assert len({int(example["image"][0, 0, 0]) for example in larger}) > 10
    smaller = draws({"segmentation_map": COLUMNS}, scale_range=(0.5, 0.5))
    assert len({int((example["segmentation_map"] != 255).int().argmax()) for example in smaller}) > 10
    found = draws({"segmentation_map": COLUMNS}, count=60, horizontal_flip=0.5)
    mirrored = sum(bool(example["segmentation_map"][0, 0] > example["segmentation_map"][0, -1]) for example in found)
    assert 18 < mirrored < 42


def test_crops_of_one_class_are_drawn_anew() -> None:
    labels = (COLUMNS > 200).long()

    def shares(limit: float) -> list[float]:
        found = draws({"segmentation_map": labels}, count=60, scale_range=(3.0, 3.0), max_class_share=limit)
        return [float((example["segmentation_map"] == 0).float().mean()) for example in found]

    assert sum(share > 0.75 for share in shares(1.0)) > 30
    assert sum(share > 0.75 for share in shares(0.75)) < sum(share > 0.75 for share in shares(1.0)) / 2
    # A crop with a single class or no class is accepted if the image has no better crop.
    for number in (0, 255):
        [example] = draws({"segmentation_map": torch.full_like(labels, number)}, count=1, max_class_share=0.5)
        assert (example["segmentation_map"] == number).all()
