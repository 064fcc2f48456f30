"""Boxes: how they are read from a file, named in answers, and drawn."""

import json
from pathlib import Path

from PIL import Image, ImageDraw

from .pictures import LINE, font, width_of


Box = dict[str, float]  # "xmin", "ymin", "xmax" and "ymax" in pixels
Color = tuple[int, int, int]

LINE_OF_OBJECTS = '{"file": ..., "objects": [{"box": {"xmin", "ymin", "xmax", "ymax"}}, ...]}'
SIDES = ("xmin", "ymin", "xmax", "ymax")
BRIGHT = 140  # luma of colors on which black is read more easily than white


def read_box_file(file: Path, files: list[Path]) -> dict[Path, list[Box]]:
    """Returns the boxes of each image from the lines that this script prints for objects.

    Args:
        file: A JSON line for each image, see `LINE_OF_OBJECTS`.
        files: The images.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is another one, or says nothing of an image.
    """
    boxes = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            entry = json.loads(line)
            boxes[Path(entry["file"])] = [{side: found["box"][side] for side in SIDES} for found in entry["objects"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"Line {number} of {file} is not {LINE_OF_OBJECTS}, as this script prints it for a model of object "
                f"detection: {error!r}."
            ) from error
    missing = [str(image) for image in files if image not in boxes]
    if missing:
        raise ValueError(f"{file} says nothing of {missing[0]}, as of {len(missing)} of {len(files)} images.")
    return boxes


def outline(picture: Image.Image, box: Box, scale: float, color: Color, width: int) -> None:
    """Draws a box, given in pixels of the image of which the picture is `scale` times the size."""
    ImageDraw.Draw(picture).rectangle([scale * box[side] for side in SIDES], outline=color, width=width)


def tag(picture: Image.Image, box: Box, scale: float, color: Color, line: str) -> None:
    """Writes a line on a colored ground above a box, or inside of it at the upper end of the picture."""
    width, height = width_of(line) + 6, LINE - 2
    left = min(max(0, round(scale * box["xmin"])), max(0, picture.width - width))
    top = round(scale * box["ymin"]) - height
    top = top if top >= 0 else max(0, min(top + height, picture.height - height))
    picture.paste(color, (left, top, left + width, top + height))
    luma = 0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2]
    ImageDraw.Draw(picture).text((left + 3, top + 1), line, "black" if luma > BRIGHT else "white", font())
