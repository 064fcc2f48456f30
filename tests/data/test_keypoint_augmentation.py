"""Test the joint augmentation of object crops and keypoints."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_vit import HfViTImageProcessor
from hf_vit.data.augmentation.joint import KeypointAugmentation


SIZE = (128, 96)
OFF: dict[str, Any] = {
    "scale_range": (1.0, 1.0), "max_rotation": 0.0, "max_shift": 0.0, "horizontal_flip": 0.0, "photometric": 0.0
}  # fmt: skip
CHANGES: list[dict[str, Any]] = [
    {}, {"scale_range": (0.5, 2.0)}, {"max_rotation": 180.0}, {"max_shift": 0.5}, {"box_padding": 0.7},
    {"scale_range": (0.65, 1.35), "max_rotation": 40.0, "max_shift": 0.2}
]  # fmt: skip
BOX = torch.tensor([60.0, 30.0, 180.0, 150.0])
# The left, right, middle and unlabeled keypoint, each as (x, y, visibility)
KEYPOINTS = torch.tensor([[80.0, 50.5, 2.0], [160.25, 60.0, 1.0], [120.0, 130.0, 2.0], [0.0, 0.0, 0.0]])
PAIRS = ((0, 1),)


def paint() -> Tensor:
    """Return an image with a red, a green and a blue spot at the first, second and third keypoint."""
    rows, columns = torch.meshgrid(torch.arange(180.0), torch.arange(240.0), indexing="ij")
    blots = [(-((columns - x) ** 2 + (rows - y) ** 2) / 18).exp() for x, y, _ in KEYPOINTS[:3].tolist()]
    return (255 * torch.stack(blots)).round().to(torch.uint8)


TARGET = {"keypoints": KEYPOINTS, "box": BOX, "area": torch.tensor(14400.0), "image_id": 7}
EXAMPLE = {"image": paint(), "file": "a.jpg", **TARGET}


def draws(count: int = 30, example: dict[str, Any] = EXAMPLE, **options: Any) -> list[dict[str, Any]]:
    """Return `count` random augmentations of an example. Only the given options are enabled."""
    transform = KeypointAugmentation(SIZE, flip_pairs=PAIRS, **{**OFF, **options})
    torch.manual_seed(0)
    return [transform(example) for _ in range(count)]


def center(blot: Tensor) -> Tensor:
    """Return the mean position (x, y) of the bright pixels in an image channel (h, w)."""
    rows, columns = torch.meshgrid(*(torch.arange(float(length)) for length in blot.shape), indexing="ij")
    return torch.stack(((columns * blot).sum(), (rows * blot).sum())) / blot.sum()


@pytest.mark.parametrize("flip", [0.0, 1.0])
@pytest.mark.parametrize("options", CHANGES)
def test_keypoints_stay_on_their_pixels_and_mirror_images_swap_pairs(options: dict[str, Any], flip: float) -> None:
    checked = 0
    for example in draws(horizontal_flip=flip, **options):
        image, keypoints = example["image"], example["keypoints"]
        assert (image.shape, image.dtype) == ((3, *SIZE), torch.uint8)
        assert (keypoints.shape, keypoints.dtype) == ((4, 3), torch.float32)
        assert not keypoints[3].any()
        for channel, number in enumerate((1, 0, 2) if flip else (0, 1, 2)):
            x, y, visibility = keypoints[number].tolist()
            if visibility == 0:
                assert keypoints[number].tolist() == [0, 0, 0]
                assert image[channel, 2:-2, 2:-2].max() < 250  # the center of the spot is outside the crop
                continue
            assert visibility == KEYPOINTS[channel, 2]
            assert image[channel, round(y), round(x)] > 200
            if min(x, y, SIZE[1] - x, SIZE[0] - y) > 16:  # the whole spot is inside the crop
                assert (center(image[channel].float()) - torch.tensor([x, y])).abs().max() < 0.25
                checked += 1
    assert checked > 10


def test_a_crop_without_any_change_is_that_of_the_image_processor() -> None:
    height, width = SIZE
    raw = {"do_affine_crop": True, "do_rescale": False, "do_normalize": False}
    processor = HfViTImageProcessor(size={"height": height, "width": width}, **raw)
    # The first box surrounds the object. The second box surrounds the whole image.
    for box in (BOX, torch.tensor([0.0, 0.0, 240.0, 180.0])):
        for image in (EXAMPLE["image"], torch.full((3, 180, 240), 200, dtype=torch.uint8)):
            [example] = draws(1, {**EXAMPLE, "image": image, "box": box})
            expected = processor(image, object_boxes=[box[None]], keypoints=[KEYPOINTS[None]], return_tensors="pt")
            # Pixels may differ by one gray level, because of rounding.
            assert (example["image"] - expected["pixel_values"][0]).abs().max() <= 1
            assert torch.allclose(example["keypoints"], expected["labels"][0], atol=1e-4)
    # The original box and area are removed after augmentation. Examples without labeled keypoints are accepted.
    [example] = draws(1)
    assert example.keys() == {"image", "keypoints", "file", "image_id"}
    [example] = draws(1, {**EXAMPLE, "keypoints": torch.zeros(4, 3)}, horizontal_flip=1.0)
    assert not example["keypoints"].any()


def similarities(**options: Any) -> Tensor:
    """Return the scale, rotation in degrees and shift (x, y) in pixels of 60 random augmentations."""
    [plain, *found] = [example["keypoints"][:2, :2].double() for example in draws(1) + draws(60, **options)]
    points = torch.stack(found)  # shape (60, 2, 2)
    (x, y), (old_x, old_y) = (points[:, 1] - points[:, 0]).unbind(dim=1), plain[1] - plain[0]
    scales = torch.hypot(x, y) / torch.hypot(old_x, old_y)
    angles = torch.rad2deg(torch.atan2(y, x) - torch.atan2(old_y, old_x))
    return torch.cat((torch.stack((scales, angles), dim=1), points.mean(dim=1) - plain.mean(dim=0)), dim=1)


def test_scale_rotation_shift_and_mirror_images_are_drawn_from_their_ranges() -> None:
    scales = similarities(scale_range=(0.5, 1.0))[:, 0]
    assert 0.499 < scales.min() < 0.55
    assert 0.95 < scales.max() < 1.001
    assert 18 < (scales < 0.5**0.5).sum() < 42
    angles = similarities(max_rotation=30.0)[:, 1]
    assert -30.1 < angles.min() < -25
    assert 25 < angles.max() < 30.1
    shifts = similarities(max_shift=0.1)[:, 2:]
    for side, length in enumerate((96, 128)):
        assert -0.1 * length - 0.01 < shifts[:, side].min() < -0.08 * length
        assert 0.08 * length < shifts[:, side].max() < 0.1 * length + 0.01
    [plain] = draws(1)
    found = [torch.equal(example["image"], plain["image"].flip(-1)) for example in draws(60, horizontal_flip=0.5)]
    assert 18 < sum(found) < 42
