"""Test the properties that the joint augmentations of images with masks, boxes and keypoints share."""

import pickle
from typing import Any

import pytest
import torch
from PIL import Image

from hf_vit.data import AugmentedDataset
from hf_vit.data.augmentation.joint import DenseAugmentation, DetectionAugmentation, KeypointAugmentation

from .errors import expect_error


SIZE = (96, 128)
ROWS, COLUMNS = torch.meshgrid(torch.arange(180), torch.arange(240), indexing="ij")
IMAGE = torch.stack([COLUMNS, ROWS, 0 * ROWS]).to(torch.uint8)
BOXES = torch.tensor([[20.0, 30.0, 90.0, 110.0], [130.0, 60.0, 230.0, 100.0]])
KEYPOINTS = torch.tensor([[80.0, 50.5, 2.0], [160.25, 60.0, 1.0], [120.0, 130.0, 2.0], [0.0, 0.0, 0.0]])
OFF: dict[str, Any] = {"scale_range": (1.0, 1.0), "horizontal_flip": 0.0}
# Maps each augmentation class to an example target and the options that disable all augmentations.
KINDS: dict[Any, tuple[dict[str, Any], dict[str, Any]]] = {
    DenseAugmentation: ({"segmentation_map": COLUMNS}, {"max_class_share": 1.0, "max_rotation": 0.0}),
    DetectionAugmentation: ({"boxes": BOXES, "class_labels": torch.tensor([0, 1])}, {}),
    KeypointAugmentation: (
        {"keypoints": KEYPOINTS, "box": torch.tensor([60.0, 30.0, 180.0, 150.0]), "area": torch.tensor(14400.0)},
        {"max_rotation": 0.0, "max_shift": 0.0},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_colors_change_on_the_image_alone(kind: Any) -> None:
    target, off = KINDS[kind]
    name = next(iter(target))
    torch.manual_seed(0)
    plain = kind(SIZE, **OFF, **off, photometric=0.0)({"image": IMAGE, **target})
    changing = kind(SIZE, **OFF, **off, photometric=0.5)
    found = [changing({"image": IMAGE, **target}) for _ in range(60)]
    assert 15 < sum(bool((example["image"] != plain["image"]).any()) for example in found) < 45
    assert all(torch.equal(example[name], plain[name]) for example in found)


@pytest.mark.parametrize("kind", KINDS)
def test_an_augmented_example_is_a_function_of_seed_epoch_and_index(kind: Any) -> None:
    example = {"image": IMAGE, **KINDS[kind][0]}
    options = {"iou_crop": 0.5} if kind is DetectionAugmentation else {}
    dataset = AugmentedDataset([example] * 2, pickle.loads(pickle.dumps(kind(SIZE, **options))), seed=3, column=None)
    first = dataset[0]
    torch.rand(7)
    again, other = dataset[0], dataset[1]
    dataset.set_epoch(1)
    later = dataset[0]
    for key in {"image", "segmentation_map", "keypoints", "batch_draw"} & first.keys():
        values = [torch.as_tensor(made[key]) for made in (first, again, other, later)]
        assert [torch.equal(values[0], value) for value in values[1:]] == [True, False, False]
    if kind is DetectionAugmentation:
        assert torch.equal(first["boxes"], again["boxes"])


@pytest.mark.parametrize("kind", KINDS)
def test_images_of_any_mode_and_number_of_channels_are_taken(kind: Any) -> None:
    target, off = KINDS[kind]
    rotation = {} if kind is DetectionAugmentation else {"max_rotation": 5}
    for mode, num_channels in (("L", 3), ("RGBA", 1), ("I;16", 3)):
        transform = kind((32, 40), num_channels=num_channels, photometric=1.0, **{**OFF, **off, **rotation})
        image = transform({"image": Image.new(mode, (240, 180)), **target})["image"]
        assert image.shape == (num_channels, 32, 40)


def test_mistakes_are_explained() -> None:
    for kinds, options, message in (
        (KINDS, {"scale_range": (2.0, 0.5)}, r"=\(2.0, 0.5\) must be two positive numbers, the smaller one first"),
        (KINDS, {"horizontal_flip": 2}, "horizontal_flip=2 is a probability"),
        (KINDS, {"num_channels": 4, "photometric": 0.5}, "=0.5 requires 1 or 3 channels, not num_channels=4"),
        ([DenseAugmentation], {"max_class_share": 0}, r"max_class_share=0 must lie in \(0, 1\]"),
        ([DenseAugmentation], {"max_rotation": -1}, "max_rotation=-1 must lie between 0 and 180 degrees"),
        ([DetectionAugmentation], {"iou_crop": -1}, "iou_crop=-1 is a probability"),
        ([KeypointAugmentation], {"box_padding": 0}, "box_padding=0 must be positive; 1 crops exactly to the box"),
        ([KeypointAugmentation], {"max_rotation": 200}, "max_rotation=200 must lie between 0 and 180 degrees"),
        ([KeypointAugmentation], {"max_shift": 1.5}, r"max_shift=1.5 must lie in \[0, 1\)"),
    ):
        for kind in kinds:
            expect_error(message, kind, (8, 8), **options)
