"""Texts of model cards that tasks provide."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


# Generic names of dataset folders
PARTS_OF_DATA = {"train", "training", "val", "validation", "test", "images", "data"}


@dataclass(frozen=True)
class Usage:
    """Example code for a model card, which applies a model to `image.png`.

    Args:
        name: Name of the variable that holds the transformers pipeline.
        stock: Code that calls the transformers pipeline.
        own: Code without pipeline. Uses `model`, `image_processor`, `image` and the `outputs` of the model.
        processor: Variable name of the image processor, or "processor" if it also processes texts.
        inputs: Inputs of the processor.
    """

    name: str
    stock: str
    own: str
    processor: str = "image_processor"
    inputs: str = "images=image"

    @property
    def processor_class(self) -> str:
        """Class name of the transformers processor for the example code."""
        return {"image_processor": "HfViTImageProcessor", "processor": "HfViTProcessor"}[self.processor]


def describe_weights(weights: Mapping[str, float]) -> str:
    """Return the nonzero weights of the terms of a loss as one line of text."""
    return ", ".join(f"{name} x {weight:g}" for name, weight in weights.items() if weight)


def describe_values(values: Mapping[str, Any]) -> str:
    """Return the values of options as one line of text."""
    return ", ".join(f"{name} {value}" for name, value in values.items())


def public_name(source: str) -> str:
    """Return the public name of a dataset: its name on the Hub, or the name of its file or folder without the path.

    Generic names such as `train/images` are prefixed with the parent folder, unless the parent is the home folder or
    the working directory, whose names are private.
    """
    if not Path(source).exists():
        return source
    place = Path(source).resolve()
    private = {above for folder in (Path.home(), Path.cwd()) for above in (folder, *folder.parents)}
    above = place
    while above.name.lower() in PARTS_OF_DATA and above.parent not in private:
        above = above.parent
    return place.relative_to(above.parent).as_posix()
