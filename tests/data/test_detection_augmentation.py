"""Test the joint augmentation of training images and boxes."""

from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from hf_vit.data.augmentation.joint import DetectionAugmentation


SIZE = (96, 128)
OFF: dict[str, Any] = {"scale_range": (1.0, 1.0), "horizontal_flip": 0.0, "photometric": 0.0}
CHANGES: list[dict[str, Any]] = [
    {}, {"keep_aspect_ratio": True}, {"scale_range": (0.5, 2.0)},
    {"scale_range": (1.5, 3.0), "keep_aspect_ratio": True}, {"horizontal_flip": 1.0}, {"iou_crop": 1.0},
    {"scale_range": (0.5, 2.0), "iou_crop": 0.7, "horizontal_flip": 0.5, "keep_aspect_ratio": True}
]  # fmt: skip
BOXES = torch.tensor([[20.0, 30.0, 90.0, 110.0], [130.0, 60.0, 230.0, 100.0]])


def paint() -> Tensor:
    """Return an image with a red and a green object. Each object has a blue mark at its center."""
    image = torch.zeros(3, 180, 240, dtype=torch.uint8)
    for channel, (x1, y1, x2, y2) in enumerate(BOXES.int().tolist()):
        image[channel, y1:y2, x1:x2] = 255
        x, y = (x1 + x2) // 2, (y1 + y2) // 2
        image[2, y - 6 : y + 6, x - 6 : x + 6] = 255
    return image


EXAMPLE = {"image": paint(), "file": "a.jpg", "boxes": BOXES, "class_labels": torch.tensor([0, 1])}


def draws(count: int = 30, example: dict[str, Any] = EXAMPLE, **options: Any) -> list[dict[str, Any]]:
    """Return `count` random augmentations of an example. Only the given options are enabled."""
    transform = DetectionAugmentation(SIZE, **{**OFF, **options})
    torch.manual_seed(0)
    return [transform(example) for _ in range(count)]


def box_around(mask: Tensor) -> Tensor:
    rows, columns = mask.any(dim=1).nonzero(), mask.any(dim=0).nonzero()
    return torch.cat([columns.min()[None], rows.min()[None], columns.max()[None] + 1, rows.max()[None] + 1])


@pytest.mark.parametrize("options", CHANGES)
def test_boxes_stay_around_their_objects_as_long_as_their_center_is_seen(options: dict[str, Any]) -> None:
    found = draws(**options)
    assert sum(len(example["boxes"]) for example in found) > 10
    for example in found:
        image, boxes, numbers = example["image"], example["boxes"], example["class_labels"]
        assert (image.shape, image.dtype) == ((3, *SIZE), torch.uint8)
        assert (boxes.dtype, numbers.dtype, example["file"]) == (torch.float32, torch.int64, "a.jpg")
        for box, number in zip(boxes, numbers.tolist(), strict=True):
            assert (box - box_around(image[number] > 160)).abs().max() <= 1.5
        for number in (0, 1):
            is_seen = (image[2] > 160) & (image[number] > 160)
            if number in numbers:
                assert is_seen.any()
            elif is_seen.any():  # the image border cuts off part of the object
                x1, y1, x2, y2 = box_around(is_seen).tolist()
                assert min(x1, y1, SIZE[1] - x2, SIZE[0] - y2) == 0


def test_objects_are_cut_away_one_by_one_and_those_without_a_pixel_and_crowds_are_dropped() -> None:
    found = {tuple(example["class_labels"].tolist()) for example in draws(60, scale_range=(1.2, 3.0))}
    assert found == {(), (0,), (1,), (0, 1)}
    empty = {**EXAMPLE, "boxes": BOXES[:0], "class_labels": torch.zeros(0, dtype=torch.int64)}
    for example in draws(3, empty, iou_crop=1.0, horizontal_flip=1.0):
        assert example["boxes"].shape == (0, 4)
        assert example["class_labels"].shape == (0,)
    thin = torch.tensor([[20.0, 30.0, 20.0, 110.0], [20.0, 30.0, 21.5, 110.0], [20.0, 30.0, 23.0, 110.0]])
    example = {**EXAMPLE, "boxes": thin, "class_labels": torch.arange(3)}
    # The image width is resized from 240 to 128 pixels.
    assert [list(made["class_labels"]) for made in draws(1, example)] == [[2]]
    assert [list(made["class_labels"]) for made in draws(1, example, scale_range=(0.5, 0.5))] == [[]]
    crowd = {**EXAMPLE, "is_crowd": torch.tensor([True, False]), "areas": torch.tensor([5600.0, 4000.0])}
    [example] = draws(1, crowd)
    assert example["class_labels"].tolist() == [1]
    assert not {"is_crowd", "areas"} & example.keys()  # areas are removed, because augmentation changes them


def test_images_of_any_size_are_taken() -> None:
    objects = {"boxes": torch.tensor([[0.0, 0.0, 1.0, 1.0]]), "class_labels": torch.tensor([3])}
    for side in (1, 3, 50):
        example = {"image": Image.new("RGB", (side, side)), **objects}
        assert draws(1, example, photometric=1.0, iou_crop=1.0)[0]["image"].shape == (3, *SIZE)


def test_scales_are_logarithmic_and_at_scale_one_an_image_is_squeezed_or_keeps_its_proportions() -> None:
    [squeezed] = draws(1)
    assert torch.allclose(squeezed["boxes"], BOXES * torch.tensor([128 / 240, 96 / 180]).repeat(2))
    [kept] = draws(1, {**EXAMPLE, "image": EXAMPLE["image"][..., :120]}, keep_aspect_ratio=True)
    sides = kept["boxes"][0, 2:] - kept["boxes"][0, :2]
    assert torch.allclose(sides, torch.tensor([70.0, 80.0]) * 96 / 120, rtol=0.02)
    one = {**EXAMPLE, "boxes": BOXES[:1], "class_labels": torch.tensor([0])}
    boxes = torch.stack([example["boxes"][0] for example in draws(80, one, scale_range=(0.5, 1.0))])
    found = (boxes[:, 3] - boxes[:, 1]) / (80 * 96 / 180)
    assert 0.49 < found.min() < 0.55
    assert 0.95 < found.max() < 1.01
    assert 25 < (found < 0.5**0.5).sum() < 55


def test_half_of_the_examples_are_mirrored() -> None:
    found = draws(60, horizontal_flip=0.5)
    mirrored = [bool(example["boxes"][0, 0] > example["boxes"][1, 0]) for example in found]
    assert 18 < sum(mirrored) < 42
    flipped = found[mirrored.index(True)]["boxes"]
    plain = found[mirrored.index(False)]["boxes"]
    assert torch.equal(flipped, torch.stack([128 - plain[:, 2], plain[:, 1], 128 - plain[:, 0], plain[:, 3]], dim=1))


def test_crops_around_objects_enlarge_them_and_leave_one() -> None:
    [plain] = draws(1)
    found = draws(40, iou_crop=1.0)
    changed = [example for example in found if not torch.equal(example["image"], plain["image"])]
    assert 15 < len(changed) < 40  # some random crops keep the whole image
    assert all(len(example["boxes"]) > 0 for example in found)
    areas = torch.cat([(box[:, 2] - box[:, 0]) * (box[:, 3] - box[:, 1]) for box in (e["boxes"] for e in changed)])
    assert areas.mean() > 2 * (70 * 80 * 128 * 96 / (240 * 180))
