"""What all kinds of models have in common here."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from PIL import Image
from transformers import pipeline


class Task(ABC):
    """What models of one kind say about images: in words, in files and as a picture.

    Args:
        model: Folder of a saved model, or its name on the Hub. The code saved with it runs.
        **options: What the pipeline takes with each image.
    """

    pipeline: ClassVar[str]
    columns: ClassVar[int | None] = 1  # of a picture of many images; None makes as many as there are rows

    def __init__(self, model: str, **options: Any) -> None:
        """Opens the model."""
        self.run = pipeline(self.pipeline, model=model, trust_remote_code=True)
        self.options = options

    def given(self, file: Path, image: Image.Image) -> Any:
        """Returns what the pipeline is given of an image."""
        return image

    def answer(self, images: Iterable[Any]) -> Iterator[Any]:
        """Yields what the pipeline says about each image, given as `given` says."""
        yield from self.run(iter(images), **self.options)

    @abstractmethod
    def describe(self, image: Image.Image, answer: Any) -> dict[str, Any]:
        """Returns an answer as JSON has it."""

    def write(self, image: Image.Image, answer: Any, stem: Path) -> list[Path]:
        """Writes an answer about every pixel to files whose names begin with `stem`, and returns their paths."""
        return []

    @abstractmethod
    def draw(self, image: Image.Image, answer: Any, caption: str) -> Image.Image:
        """Returns a picture of an image and what is said about it."""
