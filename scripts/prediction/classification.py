"""Labels of images."""

from typing import Any

from PIL import Image, ImageDraw, ImageOps

from .pictures import font
from .task import Task


TILE_SIZE, CAPTION_SIZE = 128, 40  # pixels


class Classification(Task):
    """Names images by their likeliest labels."""

    pipeline = "image-classification"
    columns = None

    def describe(self, image: Image.Image, answer: Any) -> dict[str, Any]:
        """Returns the likeliest label, its score, and the runners-up."""
        return {**answer[0], "top_k": answer}

    def draw(self, image: Image.Image, answer: Any, caption: str) -> Image.Image:
        """Returns the image above label, score and caption; small ones keep their pixels."""
        method = Image.Resampling.NEAREST if max(image.size) < TILE_SIZE else Image.Resampling.LANCZOS
        tile = Image.new("RGB", (TILE_SIZE, TILE_SIZE + CAPTION_SIZE), "white")
        tile.paste(ImageOps.pad(image, (TILE_SIZE, TILE_SIZE), method, "white"))
        pen = ImageDraw.Draw(tile)
        pen.text((0, TILE_SIZE + 3), f"{answer[0]['label'][:12]} ({answer[0]['score']:.1%})", "black", font(14))
        pen.text((0, TILE_SIZE + 21), caption[-24:], "gray", font(10))
        return tile
