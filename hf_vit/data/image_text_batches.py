"""Images with captions: what is drawn for an image in training, and how batches are made."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..processing_hf_vit import HfViTProcessor
from .collator_inputs import check_has
from .targets import target_of


def draw_caption(example: dict[str, Any]) -> dict[str, Any]:
    """Returns one of the `captions` of an example at random, as `caption`."""
    captions = example["captions"]
    return {"caption": captions[int(torch.randint(len(captions), ()))]}


@dataclass
class ImageTextCollator:
    """Turns images and captions into the batch that `HfViTForZeroShotImageClassification` takes.

    Args:
        processor: Resizes and normalises images, which come out at one size, and makes tokens of texts. Tensors come
            from an augmentation that has brought them to the model's size, and are only normalised.
        keeps_targets: Whether a batch has all captions of its images, to be scored, rather than one of each, to learn
            from.
    """

    processor: HfViTProcessor
    keeps_targets: bool = False

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Makes a batch.

        Args:
            examples: B dictionaries with `image`, PIL or (C, H, W) uint8, and `caption`, or, to be scored, `captions`.

        Returns:
            `pixel_values` (B, C, H, W) float32, what the tokenizer makes of the captions (`input_ids` and
            `attention_mask` (B, S), ...), and `return_loss`. With `keeps_targets`, tokens (T, S) of all captions,
            those of an image side by side, and the lists `targets`, with `captions`, and `files`.

        Raises:
            ValueError: if an example has no caption.
        """
        check_has(examples[0], "captions" if self.keeps_targets else "caption")
        images = [example["image"] for example in examples]
        sized = {"do_resize": False, "do_center_crop": False} if isinstance(images[0], Tensor) else {}
        batch = dict(self.processor.image_processor(images=images, return_tensors="pt", **sized))
        if not self.keeps_targets:
            captions = [example["caption"] for example in examples]
            return {**batch, **self.processor(text=captions, return_tensors="pt"), "return_loss": True}
        captions = [caption for example in examples for caption in example["captions"]]
        batch.update(self.processor(text=captions, return_tensors="pt"))
        batch["targets"] = [target_of(example) for example in examples]
        batch["files"] = [example["file"] for example in examples]
        return batch
