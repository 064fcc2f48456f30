"""Keypoints of objects, and the lines between them."""

import csv
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from .boxes import Box, outline
from .colors import IGNORED, class_color
from .pictures import arrange, fit, text
from .task import Task


SMOOTH = 2  # times finer than the picture is what is drawn
RADIUS, WIDTH = 4, 2  # of points and lines, in pixels
FAINTEST = 0.4  # opacity of a keypoint of score 0


class KeypointDetection(Task):
    """Finds the keypoints of the one object that an image shows, or of each in a box.

    Args:
        model: As in `Task`.
        boxes: Of each image; where it has no entry, the whole image is the object.
        **options: As in `Task`.
    """

    pipeline = "keypoint-detection"

    def __init__(self, model: str, boxes: dict[Path, list[Box]], **options: Any) -> None:
        """Opens the model."""
        super().__init__(model, **options)
        config = self.run.model.config.to_dict()
        self.boxes, self.numbers = boxes, config["label2id"]
        self.skeleton = (config.get("keypoint_config") or {}).get("skeleton", ())

    def given(self, file: Path, image: Image.Image) -> dict[str, Any]:
        """Returns the image with its boxes."""
        return {"image": image, "boxes": self.boxes.get(file)}

    def describe(self, image: Image.Image, answer: Any) -> dict[str, Any]:
        """Returns keypoints, scores, labels and box of each object."""
        return {"poses": answer}

    def write(self, image: Image.Image, answer: Any, stem: Path) -> list[Path]:
        """Writes a table with a keypoint a row."""
        file = stem.with_name(f"{stem.name}_keypoints.csv")
        with file.open("w", encoding="utf-8", newline="") as stream:
            table = csv.writer(stream)
            table.writerow(["object", "label", "x", "y", "score"])
            for number, pose in enumerate(answer):
                rows = zip(pose["labels"], pose["keypoints"], pose["scores"], strict=True)
                table.writerows([number, label, *place, score] for label, place, score in rows)
        return [file]

    def draw(self, image: Image.Image, answer: Any, caption: str) -> Image.Image:
        """Returns the image with boxes, keypoints in a color each, the fainter the less sure, and the skeleton."""
        picture = fit(image)
        scale = picture.width / image.width
        for pose in answer:
            outline(picture, pose["box"], scale, IGNORED, 1)
        layer = Image.new("RGBA", (picture.width * SMOOTH, picture.height * SMOOTH))
        for pose in answer:
            self.draw_pose(layer, pose, scale * SMOOTH)
        drawn = Image.alpha_composite(picture.convert("RGBA"), layer.reduce(SMOOTH)).convert("RGB")
        return arrange([drawn, text(caption, "gray")], columns=1)

    def draw_pose(self, layer: Image.Image, pose: dict[str, Any], scale: float) -> None:
        """Draws the keypoints of an object into a layer that is `scale` times the size of the image."""
        pen = ImageDraw.Draw(layer)
        # a place is counted from the center of the first pixel
        places = {
            self.numbers[label]: ((x + 0.5) * scale, (y + 0.5) * scale)
            for label, (x, y) in zip(pose["labels"], pose["keypoints"], strict=True)
        }
        opacity = {
            number: round(255 * (FAINTEST + (1 - FAINTEST) * min(max(score, 0), 1)))
            for number, score in zip(places, pose["scores"], strict=True)
        }
        for start, end in self.skeleton:
            if start in places and end in places:
                faint, line = min(opacity[start], opacity[end]), (places[start], places[end])
                pen.line(line, (0, 0, 0, faint), 2 * WIDTH * SMOOTH)
                pen.line(line, (*class_color(end), faint), WIDTH * SMOOTH)
        for number, place in places.items():
            disc(pen, place, RADIUS + 1, (0, 0, 0, opacity[number]))
            disc(pen, place, RADIUS, (*class_color(number), opacity[number]))


def disc(pen: ImageDraw.ImageDraw, place: tuple[float, float], radius: int, color: tuple[int, ...]) -> None:
    """Draws a disc of a radius in pixels of the picture."""
    x, y, reach = *place, radius * SMOOTH
    pen.ellipse((x - reach, y - reach, x + reach, y + reach), color)
