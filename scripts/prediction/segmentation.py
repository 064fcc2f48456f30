"""Masks: of classes, or of things one by one."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageChops, ImageFilter

from .colors import IGNORED, class_color
from .pictures import arrange, fit, label, legend, text
from .task import Task


NONE = 255  # in masks: where nothing was found
OPACITY = 0.65
OVERLAP_THRESHOLD = 0.8  # as in the scores of a training: of a segment, at least so much of the mask is its own

Part = dict[str, Any]  # of an image: "label", "score" and "mask", which is black and white


class SemanticSegmentation(Task):
    """Finds the class of every pixel.

    Args:
        model: As in `Task`.
        threshold: Least score of a segment; classes have none.
        subtask: "panoptic", "instance" or "semantic"; by default what the image processor prefers.
    """

    pipeline = "image-segmentation"

    def __init__(self, model: str, threshold: float, subtask: str | None) -> None:
        """Opens the model."""
        chosen = {} if subtask is None else {"subtask": subtask}
        super().__init__(model, threshold=threshold, overlap_mask_area_threshold=OVERLAP_THRESHOLD, **chosen)
        self.label2id: dict[str, int] = self.run.model.config.label2id

    def answer(self, images: Iterable[Image.Image]) -> Iterator[list[Part]]:
        """Yields the parts of each image, without those that others cover."""
        for parts in super().answer(images):
            yield [part for part in parts if part["mask"].getbbox()]

    def describe(self, image: Image.Image, answer: list[Part]) -> dict[str, Any]:
        """Returns score and share of the pixels of each class, the largest first."""
        pixels = image.width * image.height
        classes = [
            {"label": part["label"], "score": part["score"], "share": round(area(part) / pixels, 6), "id": number}
            for number, part in self.numbered(answer)
        ]
        return {"classes": sorted(classes, key=lambda found: -found["share"])}

    def numbered(self, answer: list[Part]) -> list[tuple[int, Part]]:
        """Returns each part with its number in masks, that of its class."""
        return [(self.label2id[part["label"]], part) for part in answer]

    def write(self, image: Image.Image, answer: list[Part], stem: Path) -> list[Path]:
        """Writes a PNG that holds the number of each pixel, and shows it in color."""
        values = np.full((image.height, image.width), NONE, dtype=np.uint8)
        palette = [IGNORED] * (NONE + 1)
        for number, part in self.numbered(answer):
            if number >= NONE:
                raise ValueError(f"A mask holds numbers up to {NONE - 1}, but {part['label']!r} has {number}.")
            values[np.asarray(part["mask"]) > 0] = number
            palette[number] = class_color(self.label2id[part["label"]])
        mask = Image.fromarray(values)
        mask.putpalette([level for color in palette for level in color])
        file = stem.with_name(f"{stem.name}_mask.png")
        mask.save(file)
        return [file]

    def draw(self, image: Image.Image, answer: list[Part], caption: str) -> Image.Image:
        """Returns the image, and what was found over it in colors that a legend explains."""
        picture = fit(image)
        pictures = arrange([picture, self.overlay(picture, answer)], columns=2)
        colors = {part["label"]: class_color(self.label2id[part["label"]]) for part in answer}
        return arrange([pictures, legend(colors, pictures.width), text(caption, "gray")], columns=1)

    def overlay(self, picture: Image.Image, answer: list[Part]) -> Image.Image:
        """Returns a picture under the colors of what was found."""
        result = picture.copy()
        for part in answer:
            color = Image.new("RGB", picture.size, class_color(self.label2id[part["label"]]))
            result.paste(Image.blend(picture, color, OPACITY), mask=resized(part, picture))
        return result


class PanopticSegmentation(SemanticSegmentation):
    """Finds segments: things one by one, and, if the model does, stuff."""

    def describe(self, image: Image.Image, answer: list[Part]) -> dict[str, Any]:
        """Returns label, score, area in pixels and box (left, top, right, bottom) of each segment."""
        segments = [
            {
                "label": part["label"],
                "score": part["score"],
                "area": area(part),
                "box": part["mask"].getbbox(),
                "id": number,
            }
            for number, part in self.numbered(answer)
        ]
        return {"segments": segments}

    def numbered(self, answer: list[Part]) -> list[tuple[int, Part]]:
        """Returns each part with its number in masks, that of the segment."""
        return list(enumerate(answer))

    def overlay(self, picture: Image.Image, answer: list[Part]) -> Image.Image:
        """Returns a picture under colors, each segment with a white outline and, where there is room, its label."""
        result = super().overlay(picture, answer)
        masks = [resized(part, picture) for part in answer]
        for mask in masks:
            result.paste("white", mask=ImageChops.subtract(mask, mask.filter(ImageFilter.MinFilter(3))))
        for mask, part in zip(masks, answer, strict=True):
            label(result, mask, f"{part['label']} {part['score']:.2f}")
        return result


def area(part: Part) -> int:
    """Returns the number of pixels of a part."""
    count: int = part["mask"].histogram()[255]
    return count


def resized(part: Part, picture: Image.Image) -> Image.Image:
    """Returns the mask of a part in the size of a picture."""
    mask: Image.Image = part["mask"].resize(picture.size, Image.Resampling.NEAREST)
    return mask
