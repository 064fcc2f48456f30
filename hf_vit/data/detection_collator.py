"""From examples of an image and its boxes to a batch that a model for object detection takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import BaseImageProcessor

from .collator_inputs import check_has
from .targets import target_of, without_crowds


@dataclass
class ObjectDetectionCollator:
    """Turns examples with an image and its objects into the batch that `HfViTForObjectDetection` takes.

    The image processor gives image and boxes the same geometry. It is the one that `pipeline` uses on the saved model:
    both see the same pixels.

    Args:
        image_processor: Resizes and normalises. Tensors come from `detection_augmentation`, which has brought them to
            the model's size, and are only normalised.
        sizes: Heights and widths in pixels, of which one is drawn for every batch of tensors, which is resized to it;
            see `multi_scale_sizes`. The draw is that of the batch's first example, so that a training that is taken up
            again, with any number of workers, sees what it would have seen.
        keeps_targets: Whether a batch also has the targets as they are in the examples, to be scored at full size.
    """

    image_processor: BaseImageProcessor
    sizes: Sequence[tuple[int, int]] | None = None
    keeps_targets: bool = False

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Makes a batch.

        Args:
            examples: B dictionaries with `image`, PIL or (C, H, W) uint8, `boxes` (N, 4), x1, y1, x2, y2 in its
                pixels, `class_labels` (N,) and maybe `is_crowd` (N,) and `areas` (N,).

        Returns:
            `pixel_values` (B, C, h, w) float32 and `labels`, for each image `class_labels` (N,) int64 and `boxes`
            (N, 4) float32, centre, width and height as shares of the image. If the processor pads, also
            `patch_attention_mask`. With `keeps_targets` also the lists `targets`, a dictionary each, and `files`.
            Crowds are in `targets` alone.

        Raises:
            ValueError: if the examples have no boxes, or with `sizes` are tensors that are not augmented.
        """
        check_has(examples[0], "boxes", "class_labels")
        learned = [without_crowds(example) for example in examples]
        batch = {
            **self.image_processor(
                images=[example["image"] for example in learned],
                boxes=[example["boxes"] for example in learned],
                class_labels=[example["class_labels"] for example in learned],
                return_tensors="pt",
                **(self._tensor_options(examples[0]) if isinstance(examples[0]["image"], Tensor) else {}),
            )
        }
        if self.keeps_targets:
            batch["targets"] = [target_of(example) for example in examples]
            batch["files"] = [example["file"] for example in examples]
        return batch

    def _tensor_options(self, first: dict[str, Any]) -> dict[str, Any]:
        if self.sizes is None:
            return {"do_resize": False, "do_center_crop": False}
        check_has(first, "batch_draw")
        height, width = self.sizes[int(first["batch_draw"] * len(self.sizes))]
        size = {"height": height, "width": width}
        return {"do_resize": True, "size": size, "keep_aspect_ratio": False, "do_center_crop": False}
