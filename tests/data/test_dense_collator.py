"""Test the collation of examples with dense targets into model inputs."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hf_vit import HfViTImageProcessor
from hf_vit.data.augmentation.joint import DenseAugmentation
from hf_vit.data.collators import DensePredictionCollator


WIDTHS = (40, 24)


def examples(**targets: Any) -> list[dict[str, Any]]:
    """Return two examples of height 30 and different widths."""
    made = []
    for width in WIDTHS:
        image = Image.fromarray(np.random.default_rng(width).integers(0, 256, (30, width, 3), dtype=np.uint8))
        target = {name: make(width) for name, make in targets.items()}
        made.append({"image": image, "file": f"{width}.jpg", **target})
    return made


def columns(width: int) -> torch.Tensor:
    return torch.arange(width).expand(30, width) // 8


def masks(width: int) -> torch.Tensor:
    return torch.stack([columns(width) == number for number in range(width // 8)])


SEMANTIC = examples(segmentation_map=columns)
UNIVERSAL = examples(masks=masks, class_labels=lambda width: torch.arange(width // 8))
DEPTH = examples(depth_map=lambda width: columns(width) / 4)
KINDS = pytest.mark.parametrize("kind", [SEMANTIC, UNIVERSAL, DEPTH], ids=["semantic", "universal", "depth"])
PROCESSOR = HfViTImageProcessor(size={"height": 16, "width": 16})


def test_targets_are_kept_at_full_size_and_crowds_are_evaluated_but_not_learned() -> None:
    crowds = [{**example, "is_crowd": torch.arange(len(example["masks"])) == 0} for example in UNIVERSAL]
    batch = DensePredictionCollator(PROCESSOR, keeps_targets=True)(crowds)
    for number, example in enumerate(crowds):
        assert torch.equal(batch["class_labels"][number], example["class_labels"][1:])
        assert len(batch["mask_labels"][number]) == len(example["masks"]) - 1
        target = {name: example[name] for name in ("masks", "class_labels", "is_crowd")}
        assert batch["targets"][number].keys() == target.keys()
        assert all(torch.equal(batch["targets"][number][name], target[name]) for name in target)
    collator = DensePredictionCollator(PROCESSOR, keeps_targets=True)
    batch = collator(SEMANTIC)
    assert batch["files"] == ["40.jpg", "24.jpg"]
    assert [target.shape for target in batch["targets"]] == [(30, 40), (30, 24)]
    assert collator(DEPTH)["targets"][1] is DEPTH[1]["depth_map"]
    universal = collator(UNIVERSAL)["targets"][0]
    assert universal.keys() == {"masks", "class_labels"}
    assert universal["masks"] is UNIVERSAL[0]["masks"]


@KINDS
def test_batches_equal_the_output_of_the_processor(kind: list[dict[str, Any]]) -> None:
    batch = DensePredictionCollator(PROCESSOR)(kind)
    assert torch.equal(
        batch["pixel_values"], PROCESSOR([example["image"] for example in kind], return_tensors="pt").pixel_values
    )
    assert not {"targets", "files"} & batch.keys()
    for number, width in enumerate(WIDTHS):
        # Expected target values, sampled at the centers of the resized pixels
        places = ((2 * torch.arange(16) + 1) * width // 32).expand(16, 16) // 8
        if kind is UNIVERSAL:
            assert batch["mask_labels"][number].dtype == torch.float32
            assert batch["class_labels"][number].tolist() == list(range(width // 8))
            assert torch.equal(batch["mask_labels"][number].argmax(dim=0), places)
        elif kind is SEMANTIC:
            assert torch.equal(batch["labels"][number], places)
        else:
            assert torch.equal(batch["labels"][number], places / 4)


@KINDS
def test_augmented_examples_are_only_normalized(kind: list[dict[str, Any]]) -> None:
    augmented = [DenseAugmentation((24, 32))(example) for example in kind]
    batch = DensePredictionCollator(PROCESSOR)(augmented)
    assert batch["pixel_values"].shape == (2, 3, 24, 32)
    restored = batch["pixel_values"] * 127.5 + 127.5
    assert torch.equal(restored.round().to(torch.uint8), torch.stack([example["image"] for example in augmented]))
    # Maps keys of the batch to the corresponding keys of the examples.
    names = {"mask_labels": "masks", "class_labels": "class_labels"}
    names = names if kind is UNIVERSAL else {"labels": "segmentation_map" if kind is SEMANTIC else "depth_map"}
    for number, example in enumerate(augmented):
        for name, own in names.items():
            assert torch.equal(batch[name][number], example[own].to(batch[name][number].dtype))


def test_images_of_several_sizes_are_padded_and_class_numbers_are_not_reduced_twice() -> None:
    padded = HfViTImageProcessor(do_resize=False, do_pad=True, ensure_multiple_of=8)
    batch = DensePredictionCollator(padded)(SEMANTIC)
    assert batch["pixel_values"].shape == (2, 3, 32, 40)
    assert batch["patch_attention_mask"].shape == (2, 4, 5)
    assert (batch["labels"][1, :, 24:] == 255).all()
    assert torch.equal(batch["labels"][1, :30, :24], columns(24))
    processor = HfViTImageProcessor(size={"height": 16, "width": 16}, do_reduce_labels=True)
    expected = DensePredictionCollator(PROCESSOR)(SEMANTIC)["labels"]
    assert torch.equal(DensePredictionCollator(processor)(SEMANTIC)["labels"], expected)
    with pytest.raises(ValueError, match="have no segmentation_map, masks, depth_map, only file, image"):
        DensePredictionCollator(PROCESSOR)(examples())
