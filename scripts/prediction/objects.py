"""Objects: a box, a name and a score each."""

import csv
from pathlib import Path
from typing import Any

from PIL import Image

from .boxes import SIDES, outline, tag
from .colors import class_color
from .pictures import arrange, fit, text
from .task import Task


WIDTH = 2  # of lines, in pixels


class ObjectDetection(Task):
    """Finds objects."""

    pipeline = "object-detection"

    def describe(self, image: Image.Image, answer: Any) -> dict[str, Any]:
        """Returns score, label and box of each object, the surest first."""
        return {"objects": answer}

    def write(self, image: Image.Image, answer: Any, stem: Path) -> list[Path]:
        """Writes a table with an object a row."""
        file = stem.with_name(f"{stem.name}_objects.csv")
        with file.open("w", encoding="utf-8", newline="") as stream:
            table = csv.writer(stream)
            table.writerow(["label", "score", *SIDES])
            table.writerows([found["label"], found["score"], *found["box"].values()] for found in answer)
        return [file]

    def draw(self, image: Image.Image, answer: Any, caption: str) -> Image.Image:
        """Returns the image with the boxes in the colors of their classes, the surest over the others."""
        picture = fit(image)
        scale, numbers = picture.width / image.width, self.run.model.config.label2id
        for found in reversed(answer):
            color = class_color(numbers[found["label"]])
            outline(picture, found["box"], scale, color, WIDTH)
            tag(picture, found["box"], scale, color, f"{found['label']} {found['score']:.2f}")
        return arrange([picture, text(caption, "gray")], columns=1)
