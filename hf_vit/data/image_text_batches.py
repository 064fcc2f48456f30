"""Images with captions: what is drawn for an image in training, and how batches are made."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..processing_hf_vit import HfViTProcessor
from .augmentation import image_classification_augmentation
from .collator_inputs import check_has
from .targets import target_of


def image_text_augmentation(
    size: tuple[int, int], num_channels: int = 3, min_crop_scale: float = 0.5, horizontal_flip: float = 0.5
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Returns the augmentation of training images, which also draws one of the captions of each.

    Args:
        size: Height and width of the result in pixels.
        num_channels: Number of channels C of the result.
        min_crop_scale: Least share of the image's area that the random resized crop keeps, in (0, 1].
        horizontal_flip: Probability of a mirror image, in [0, 1].

    Returns:
        A function from an example with `image` and `captions` to `image` (C, height, width) uint8 and `caption`.

    Raises:
        ImportError: if torchvision is not installed.
        ValueError: if a value is out of range.
    """
    transform = image_classification_augmentation(
        size, num_channels, min_crop_scale, horizontal_flip, auto_augment="none", random_erasing=0.0
    )

    def augment(example: dict[str, Any]) -> dict[str, Any]:
        captions = example["captions"]
        return {"image": transform(example["image"]), "caption": captions[int(torch.randint(len(captions), ()))]}

    return augment


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
