"""From examples of an image and its target to a batch that a model for dense prediction takes."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import BaseImageProcessor

from .targets import target_of, without_crowds


# What the image processor calls the targets of examples.
PROCESSOR_ARGUMENTS = {
    "segmentation_map": {"segmentation_maps": "segmentation_map"},
    "masks": {"mask_labels": "masks", "class_labels": "class_labels"},
    "depth_map": {"depth_maps": "depth_map"},
}


@dataclass
class DensePredictionCollator:
    """Turns examples with an image and its target into a batch for segmentation or depth.

    The image processor gives image and target the same geometry. It is the one that `pipeline` uses on the saved
    model: both see the same pixels.

    Args:
        image_processor: Resizes and normalises; all images of a batch come out at one size. Tensors come from an
            augmentation that has brought them to the model's size, and are only normalised.
        keeps_targets: Whether a batch also has the targets as they are in the examples, to be scored at full size.
    """

    image_processor: BaseImageProcessor
    keeps_targets: bool = False

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Makes a batch.

        Args:
            examples: B dictionaries with `image`, PIL or (C, H, W) uint8, and `segmentation_map` (H, W), `masks`
                (M, H, W) with `class_labels` (M,) and maybe `is_crowd` (M,), or `depth_map` (H, W).

        Returns:
            `pixel_values` (B, C, h, w) float32 and the target: `labels` (B, h, w), int64 classes or float32 depth, or
            lists of `mask_labels` (M, h, w) float32 and `class_labels` (M,). If the processor pads, also
            `patch_attention_mask`. With `keeps_targets` also the lists `targets`, a tensor each or a dictionary of
            masks and their classes, and `files`. Crowds are in `targets` alone.

        Raises:
            ValueError: if the examples have no target.
        """
        names = _target_names(examples[0])
        images = [example["image"] for example in examples]
        learned = [without_crowds(example) for example in examples]
        targets = {argument: [example[name] for example in learned] for argument, name in names.items()}
        # The examples count classes from 0, whatever the files do.
        options = {"do_reduce_labels": False} if "segmentation_maps" in targets else {}
        if isinstance(images[0], Tensor):
            options |= {"do_resize": False, "do_center_crop": False}
        batch = {**self.image_processor(images=images, **targets, return_tensors="pt", **options)}
        if self.keeps_targets:
            batch["targets"] = [target_of(example) for example in examples]
            batch["files"] = [example["file"] for example in examples]
        return batch


def _target_names(example: dict[str, Any]) -> dict[str, str]:
    """Returns the keys of an example's target by the argument of the image processor that takes them."""
    names = next((names for key, names in PROCESSOR_ARGUMENTS.items() if key in example), None)
    if names is None:
        raise ValueError(
            f"The examples have no target {', '.join(PROCESSOR_ARGUMENTS)}, only {', '.join(sorted(example))}. With "
            "the Trainer, set remove_unused_columns=False."
        )
    return names
