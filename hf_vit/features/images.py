"""Images that are read on access, in their own size. Shapes: C channels, H W pixels."""

from io import BytesIO
from typing import NamedTuple

import torch
from datasets import Dataset, Image
from torch import Tensor
from transformers import BaseImageProcessor

from ..data.encoded import encoded_bytes
from ..data.pretraining_sources import CLASS, NO_CLASS
from ..image_inputs_hf_vit import decode_image


class ReadImage(NamedTuple):
    """An image, or what is wrong with it.

    Args:
        file: Its name.
        label: Name of its class, if that is known.
        pixels: (C, H, W) uint8 or float32; None where it cannot be read.
        fault: Why it cannot.
    """

    file: str
    label: str | None
    pixels: Tensor | None
    fault: str = ""


class ImageReader(torch.utils.data.Dataset[ReadImage]):
    """Images of a split of `load_unlabelled_images`."""

    def __init__(self, rows: Dataset, processor: BaseImageProcessor) -> None:
        """Wraps rows.

        Args:
            rows: The columns `image`, `file` and maybe `class_number`.
            processor: Says how many channels an image has.
        """
        self.rows = rows.cast_column("image", Image(decode=False))
        self.processor = processor
        self.names = rows.features[CLASS].names if CLASS in rows.features else None

    def __len__(self) -> int:
        """Returns the number of images."""
        return len(self.rows)

    def __getitem__(self, index: int) -> ReadImage:
        """Reads an image."""
        row = self.rows[index]
        number = row.get(CLASS, NO_CLASS)
        label = None if self.names is None or number == NO_CLASS else self.names[number]
        try:
            image = decode_image(BytesIO(encoded_bytes(row["image"], "image")), "it")
            return ReadImage(row["file"], label, self.processor.process_image(image))
        except (OSError, TypeError, ValueError) as error:
            return ReadImage(row["file"], label, None, str(error))
