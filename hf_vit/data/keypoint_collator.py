"""From examples of an object and its keypoints to a batch that a model for keypoints takes."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import BaseImageProcessor

from .collator_inputs import check_has
from .targets import target_of


@dataclass
class KeypointDetectionCollator:
    """Turns examples of one object each into the batch that `HfViTForKeypointDetection` takes.

    The image processor cuts the object out, its keypoints with it. It is the one that `pipeline` uses on the saved
    model: both see the same pixels.

    Args:
        image_processor: Cuts out and normalises. Tensors come from `keypoint_augmentation`, which has cut them out,
            and are only normalised.
        keeps_targets: Whether a batch also has the targets as they are in the examples, to be scored in the image.
    """

    image_processor: BaseImageProcessor
    keeps_targets: bool = False

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Makes a batch.

        Args:
            examples: B dictionaries with `image`, PIL or (C, H, W) uint8, `keypoints` (K, 3), x and y in its pixels
                and visibility, and beside PIL images `box` (4,), x1, y1, x2, y2.

        Returns:
            `pixel_values` (B, C, h, w) float32 and `labels` (B, K, 3) float32, in pixels of the crop. With
            `keeps_targets` also the lists `targets`, a dictionary each, and `files`.

        Raises:
            ValueError: if the examples have no keypoints, or PIL images no box.
        """
        check_has(examples[0], "keypoints")
        options: dict[str, Any] = {"do_resize": False, "do_center_crop": False, "do_affine_crop": False}
        if not isinstance(examples[0]["image"], Tensor):
            check_has(examples[0], "box")
            options = {"object_boxes": [example["box"][None] for example in examples]}
        images = [example["image"] for example in examples]
        keypoints = [example["keypoints"][None] for example in examples]  # one object an image
        made = self.image_processor(images=images, keypoints=keypoints, return_tensors="pt", **options)
        batch: dict[str, Any] = {name: made[name] for name in ("pixel_values", "labels")}
        if self.keeps_targets:
            batch["targets"] = [target_of(example) for example in examples]
            batch["files"] = [example["file"] for example in examples]
        return batch
