"""Test the collation of examples with objects and keypoints into model inputs."""

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from hf_vit import HfViTImageProcessor
from hf_vit.data import AugmentedDataset
from hf_vit.data.augmentation.joint import DetectionAugmentation, KeypointAugmentation
from hf_vit.data.collators import KeypointDetectionCollator, ObjectDetectionCollator, multi_scale_sizes

from .errors import expect_error


def picture(width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(width).integers(0, 256, (30, width, 3), dtype=np.uint8))


def objects(width: int, *numbers: int) -> dict[str, Any]:
    """Return an example with an image of 30 x `width` pixels and one object per class number, the last one a crowd."""
    boxes = torch.tensor([[4.0 * number, 3.0, 4 * number + 8, 18] for number in numbers]).reshape(-1, 4)
    crowds = torch.tensor([number == numbers[-1] for number in numbers], dtype=torch.bool)
    target = {"boxes": boxes, "class_labels": torch.tensor(numbers, dtype=torch.int64), "is_crowd": crowds}
    return {"image": picture(width), "file": f"{width}.jpg", **target, "areas": torch.full((len(numbers),), 120.0)}


PROCESSOR = HfViTImageProcessor(size={"height": 16, "width": 24})
DETECTION = [objects(40, 0, 3, 5), objects(24)]
SIZES = [(16, 24), (24, 32), (32, 48), (48, 64)]


def augmented(count: int, seed: int = 0) -> AugmentedDataset:
    return AugmentedDataset([DETECTION[0]] * count, DetectionAugmentation((32, 40)), seed, column=None)


def check_normalized(labels: dict[str, Tensor], boxes: Tensor, height: int, width: int) -> None:
    shares = boxes / torch.tensor([width, height, width, height])
    expected = torch.cat(((shares[:, :2] + shares[:, 2:]) / 2, shares[:, 2:] - shares[:, :2]), dim=1)
    assert torch.allclose(labels["boxes"], expected, atol=1e-6)
    assert labels["boxes"].dtype == torch.float32


def test_images_are_processed_and_crowds_are_evaluated_but_not_learned() -> None:
    batch = ObjectDetectionCollator(PROCESSOR, sizes=SIZES, keeps_targets=True)(DETECTION)
    images = [example["image"] for example in DETECTION]
    assert torch.equal(batch["pixel_values"], PROCESSOR(images, return_tensors="pt").pixel_values)
    assert [labels["class_labels"].tolist() for labels in batch["labels"]] == [[0, 3], []]
    check_normalized(batch["labels"][0], DETECTION[0]["boxes"][:2], 30, 40)
    assert batch["labels"][1]["boxes"].shape == (0, 4)
    assert batch["files"] == ["40.jpg", "24.jpg"]
    for target, example in zip(batch["targets"], DETECTION, strict=True):
        assert target == {name: example[name] for name in ("boxes", "class_labels", "is_crowd", "areas")}
    assert not {"targets", "files"} & ObjectDetectionCollator(PROCESSOR)(DETECTION).keys()


def test_augmented_images_are_only_normalized_and_others_padded() -> None:
    dataset = augmented(2)
    batch = ObjectDetectionCollator(PROCESSOR)([dataset[0], dataset[1]])
    restored = (batch["pixel_values"] * 127.5 + 127.5).round().to(torch.uint8)
    for index in range(2):
        assert torch.equal(restored[index], dataset[index]["image"])
        assert torch.equal(batch["labels"][index]["class_labels"], dataset[index]["class_labels"])
        check_normalized(batch["labels"][index], dataset[index]["boxes"], 32, 40)
    # Images of different sizes are padded. Boxes are normalized by the size of their image without padding.
    padding = HfViTImageProcessor(do_resize=False, do_pad=True, ensure_multiple_of=2)
    batch = ObjectDetectionCollator(padding)([objects(24, 0, 1), objects(40, 0, 1)])
    assert batch["pixel_values"].shape == (2, 3, 30, 40)
    assert batch["patch_attention_mask"].shape == (2, 15, 20)
    check_normalized(batch["labels"][0], objects(24, 0, 1)["boxes"][:1], 30, 24)


def test_every_batch_has_one_of_the_sizes_with_any_number_of_workers() -> None:
    dataset, found = augmented(64), set()
    for start in range(0, 64, 2):
        examples = [dataset[start], dataset[start + 1]]
        batch = ObjectDetectionCollator(PROCESSOR, sizes=SIZES)(examples)
        plain = ObjectDetectionCollator(PROCESSOR)(examples)
        found.add(tuple(batch["pixel_values"].shape[-2:]))
        for labels, expected in zip(batch["labels"], plain["labels"], strict=True):
            assert torch.allclose(labels["boxes"], expected["boxes"])
            assert torch.equal(labels["class_labels"], expected["class_labels"])
    assert found == set(SIZES)

    def sizes(workers: int) -> list[torch.Size]:
        torch.manual_seed(workers)
        collator = ObjectDetectionCollator(PROCESSOR, sizes=SIZES)
        loader = DataLoader(augmented(10), batch_size=2, collate_fn=collator, num_workers=workers)
        return [batch["pixel_values"].shape for batch in loader]

    assert sizes(0) == sizes(2)
    assert multi_scale_sizes((64, 96), (16, 32)) == [(48, 64), (64, 96), (80, 128)]
    assert multi_scale_sizes((640, 640), (64, 64), 0.9, 1.1) == [(576, 576), (640, 640), (704, 704)]
    expect_error(r"There is no multiple of 64 between .* times the height 32", multi_scale_sizes, (32, 32), (64, 64))


KEYPOINTS = torch.tensor([[8.0, 9.0, 2.0], [20.0, 15.0, 1.0], [0.0, 0.0, 0.0]])
POSES = [
    {
        "image": picture(width), "file": f"{width}.jpg", "keypoints": KEYPOINTS,
        "box": torch.tensor([4.0, 2.0, 24.0, 20.0]), "area": torch.tensor(360.0), "image_id": width
    }
    for width in (40, 32)
]  # fmt: skip
CROPPING = HfViTImageProcessor(size={"height": 32, "width": 24}, do_affine_crop=True)


def test_objects_are_cut_out_as_by_an_augmentation_that_changes_nothing() -> None:
    batch = KeypointDetectionCollator(CROPPING, keeps_targets=True)(POSES)
    assert batch.keys() == {"pixel_values", "labels", "targets", "files"}
    off = dict.fromkeys(("max_rotation", "max_shift", "horizontal_flip", "photometric"), 0.0)
    still = KeypointAugmentation((32, 24), scale_range=(1.0, 1.0), **off)
    learned = KeypointDetectionCollator(CROPPING)([still(example) for example in POSES])
    assert learned.keys() == {"pixel_values", "labels"}
    # Augmented pixels are rounded to uint8, so they differ by rounding errors.
    assert (learned["pixel_values"] - batch["pixel_values"]).abs().max() < 1.01 / 127.5
    assert torch.allclose(learned["labels"], batch["labels"], atol=1e-4)
    assert batch["labels"].shape == (2, 3, 3)
    assert batch["files"] == ["40.jpg", "32.jpg"]
    for target, example in zip(batch["targets"], POSES, strict=True):
        assert target == {name: example[name] for name in ("keypoints", "box", "area", "image_id")}
    # The collator does not crop augmented examples again; it only normalizes them.
    transform = KeypointAugmentation((32, 24))
    examples = [transform(example) for example in POSES]
    batch = KeypointDetectionCollator(CROPPING)(examples)
    restored = (batch["pixel_values"] * 127.5 + 127.5).round().to(torch.uint8)
    assert torch.equal(restored, torch.stack([example["image"] for example in examples]))
    assert torch.equal(batch["labels"], torch.stack([example["keypoints"] for example in examples]))


def test_examples_without_their_target_are_refused() -> None:
    bare = {"image": picture(40), "file": "40.jpg"}
    expect_error("have no boxes, class_labels, only file, image", ObjectDetectionCollator(PROCESSOR), [bare])
    expect_error("have no keypoints, only file, image", KeypointDetectionCollator(CROPPING), [bare])
    expect_error("have no box, only", KeypointDetectionCollator(CROPPING), [{**bare, "keypoints": KEYPOINTS}])
    tensors = {**DETECTION[1], "image": torch.zeros(3, 8, 8, dtype=torch.uint8)}
    expect_error("have no batch_draw", ObjectDetectionCollator(PROCESSOR, sizes=SIZES), [tensors])
