"""Image files: how they are found and opened, and what is written about them is called."""

from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageOps


IMAGE_SUFFIXES = {
    ".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp"
}  # fmt: skip


def find_images(inputs: list[Path]) -> list[Path]:
    """Lists the files among `inputs` and, sorted, the images in their folders; `ValueError` where there is none."""
    files: list[Path] = []
    for path in inputs:
        if not path.exists():
            raise ValueError(f"There is no file or folder {path}.")
        found = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES)
        if not found:
            raise ValueError(f"The folder {path} holds no image: no file ends in {', '.join(sorted(IMAGE_SUFFIXES))}.")
        files += found
    return files


def open_image(file: Path) -> Image.Image:
    """Opens an image upright, as 8-bit colors on white, as no pipeline does by itself; `ValueError` if it fails."""
    try:
        with Image.open(file) as opened:
            image = ImageOps.exif_transpose(opened)
        if image.mode[0] in "IF":
            image = to_8_bits(image)
        elif image.has_transparency_data:
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
        return image.convert("RGB")
    except Exception as error:  # decoders fail in many ways
        raise ValueError(f"{file} cannot be read as an image: {error}") from error


def to_8_bits(image: Image.Image) -> Image.Image:
    """Scales 16-bit gray, and floats in 0..255 or 0..1, which PIL would cut off; other values are a `ValueError`."""
    kind, limit, image = ("f", 255, image) if image.mode == "F" else ("i", 65535, image.convert("I"))
    values = array(kind, image.tobytes())
    if not all(0 <= value <= limit for value in values):  # also true of NaN
        raise ValueError(f"it has mode {image.mode!r} and values outside 0..{limit}. Scale them to that range.")
    scale = 255 if kind == "f" and max(values) <= 1 else 255 / limit
    return image.point(lambda value: value * scale + 0.5).convert("L")


def name_outputs(files: Sequence[Path]) -> list[str]:
    """Returns a name for what is written about each file: its own without the suffix, numbered where it is taken."""
    counts: Counter[str] = Counter()
    taken: set[str] = set()
    names = []
    for file in files:
        name = file.stem
        while name in taken:
            counts[file.stem] += 1
            name = f"{file.stem}-{counts[file.stem] + 1}"
        taken.add(name)
        names.append(name)
    return names
