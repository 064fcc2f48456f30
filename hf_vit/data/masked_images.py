"""Images that are learned from by masks: what a row says, what is drawn for an image, and how batches are made."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import BaseImageProcessor

from ..configuration_tasks_hf_vit import HfViTMaskedImageModelingConfig
from ..task_mim import draw_mask
from .collator_inputs import check_has
from .pretraining_sources import CLASS, NO_CLASS


def masked_image_target(row: dict[str, Any]) -> dict[str, Any]:
    """Reads what a `TargetDataset` shall know of an image beside its pixels.

    Returns:
        `mask_seed`, from the number of the image in its data set, so that its mask is always the same; and
        `class_number`, None where it is not known.
    """
    number = row.get(CLASS, NO_CLASS)
    return {"mask_seed": row["number"], CLASS: None if number == NO_CLASS else number}


def draw_mask_seed(example: dict[str, Any]) -> dict[str, Any]:
    """Returns the `mask_seed` that an example learns from this time, at random."""
    return {"mask_seed": int(torch.randint(2**62, ()))}


@dataclass
class MaskedImageModelingCollator:
    """Turns images and the seeds of their masks into the batch that `HfViTForMaskedImageModeling` trains on.

    The mask of an image depends on its seed alone, and not on what else is in the batch or on the process.

    Args:
        image_processor: Resizes and normalises; all images of a batch come out at one size. Tensors come from an
            augmentation that has brought them to the model's size, and are only normalised.
        patch_size: Height and width of a patch in pixels.
        options: How much is masked, and how.
        keeps_targets: Whether a batch also has what is known of the images, to be scored.
    """

    image_processor: BaseImageProcessor
    patch_size: tuple[int, int]
    options: HfViTMaskedImageModelingConfig
    keeps_targets: bool = False

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Makes a batch.

        Args:
            examples: B dictionaries with `image`, PIL or (C, H, W) uint8, and `mask_seed`.

        Returns:
            `pixel_values` (B, C, H, W) float32 and `noise` (B, N), by which the model masks as many patches of each
            image without a look at its mask, or, for other masks than random ones, `bool_masked_pos` (B, N) bool. With
            `keeps_targets` also the lists `targets`, class numbers or None, and `files`.

        Raises:
            ValueError: if an example has no seed.
        """
        check_has(examples[0], "mask_seed")
        images = [example["image"] for example in examples]
        sized = {"do_resize": False, "do_center_crop": False} if isinstance(images[0], Tensor) else {}
        batch = dict(self.image_processor(images=images, return_tensors="pt", **sized))
        height, width = batch["pixel_values"].shape[-2:]
        grid = height // self.patch_size[0], width // self.patch_size[1]
        generators = [torch.Generator().manual_seed(example["mask_seed"]) for example in examples]
        if self.options.mask_type == "random":
            batch["noise"] = torch.stack([torch.rand(grid[0] * grid[1], generator=drawn) for drawn in generators])
        else:
            masks = [draw_mask(1, grid, self.options, generator=drawn) for drawn in generators]
            batch["bool_masked_pos"] = torch.cat(masks)
        if self.keeps_targets:
            batch["targets"] = [example[CLASS] for example in examples]
            batch["files"] = [example["file"] for example in examples]
        return batch
