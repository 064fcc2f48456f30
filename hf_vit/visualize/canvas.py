"""Images that are large enough to draw on, and how thick lines and letters are on them."""

import numpy as np
from PIL import Image, ImageFont

from .figures import Picture, as_picture


MIN_SIDE = 480  # pixels: the longer side of a smaller image has no room for letters
LETTER_SHARE, LINE_SHARE = 1 / 30, 1 / 220  # of the longer side, so that they can be read however it is shown
BRIGHT = 140  # level of grey from which black can be read better than white
GREY = np.array([0.299, 0.587, 0.114])  # how bright red, green and blue are


def large_enough(image: Picture) -> tuple[Image.Image, float]:
    """Returns an image as an RGB image of at least `MIN_SIDE` pixels, and how much larger it has become."""
    picture = Image.fromarray(as_picture(image))
    scale = max(1.0, MIN_SIDE / max(picture.size))
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    return picture.resize(size, Image.Resampling.BICUBIC), scale


def line_width(picture: Image.Image) -> int:
    """Returns the width of lines in pixels."""
    return round(LINE_SHARE * max(picture.size))


def font_for(picture: Image.Image) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Returns PIL's own font, as large as the picture needs it."""
    return ImageFont.load_default(LETTER_SHARE * max(picture.size))


def readable_on(colour: np.ndarray) -> str:
    """Returns black or white, for letters on a colour (3,)."""
    return "black" if colour @ GREY > BRIGHT else "white"
