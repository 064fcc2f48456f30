"""From examples of a dataset to a batch that a model takes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import BaseImageProcessor


@dataclass
class ImageClassificationCollator:
    """Turns examples with an image and a label into the batch that `HfViTForImageClassification` trains on.

    The image processor sees the whole batch at once, which is much faster than image by image, and is the one that
    `pipeline` uses on the saved model: both see the same pixels.

    Args:
        image_processor: Resizes and normalises; all images of a batch come out at one size. Tensors come from an
            augmentation that has brought them to the model's size, and are only normalised.
        image_column: Key of the image in an example, PIL or (C, H, W) uint8.
        label_column: Key of the class number in an example.
    """

    image_processor: BaseImageProcessor
    image_column: str = "image"
    label_column: str = "label"

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Makes a batch.

        Args:
            examples: B dictionaries.

        Returns:
            `pixel_values` (B, C, H, W) float32 and `labels` (B,) int64.

        Raises:
            ValueError: if an example lacks one of the two columns.
        """
        for column in (self.image_column, self.label_column):
            if column not in examples[0]:
                raise ValueError(
                    f"The examples have no column {column!r}, only {', '.join(sorted(examples[0]))}. Name the right "
                    "one with image_column= or label_column=; with the Trainer, also set remove_unused_columns=False."
                )
        images = [example[self.image_column] for example in examples]
        labels = [example[self.label_column] for example in examples]
        sized = {"do_resize": False, "do_center_crop": False} if isinstance(images[0], Tensor) else {}
        batch = self.image_processor(images=images, return_tensors="pt", **sized)
        return {**batch, "labels": torch.tensor(labels)}
