"""Names what is on images, with a saved model and nothing but transformers: `hf_vit` need not be installed.

Prints one JSON line per image. Files that cannot be read are named on stderr, and end the script with exit code 1.

Example:
    python scripts/predict.py outputs/digits photo.png folder_of_images --picture labelled.png > predictions.jsonl
"""

import argparse
import json
import math
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont, ImageOps
from transformers import pipeline


IMAGE_SUFFIXES = {
    ".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp"
}  # fmt: skip
TILE_SIZE, CAPTION_SIZE, MARGIN, FONT_SIZE = 128, 40, 8, 14  # pixels
MAX_TILES = 100


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
    """Opens an image upright, as 8-bit colours on white, as no pipeline does by itself; `ValueError` if it fails."""
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
    """Scales 16-bit grey, and floats in 0..255 or 0..1, which PIL would cut off; other values are a `ValueError`."""
    kind, limit, image = ("f", 255, image) if image.mode == "F" else ("i", 65535, image.convert("I"))
    values = array(kind, image.tobytes())
    if not all(0 <= value <= limit for value in values):  # also true of NaN
        raise ValueError(f"it has mode {image.mode!r} and values outside 0..{limit}. Scale them to that range.")
    scale = 255 if kind == "f" and max(values) <= 1 else 255 / limit
    return image.point(lambda value: value * scale + 0.5).convert("L")


def predict(model: str, files: list[Path], top_k: int = 3, batch_size: int = 8) -> Iterator[dict[str, Any]]:
    """Yields `file`, `label`, `score` and the `top_k` likeliest labels of each image; names bad files on stderr."""
    classify = pipeline("image-classification", model=model, trust_remote_code=True)
    opened: list[Path] = []

    def read() -> Iterator[Image.Image]:  # only a batch of images is in memory at a time
        for file in files:
            try:
                image = open_image(file)
            except ValueError as error:
                print(error, file=sys.stderr)
            else:
                opened.append(file)
                yield image

    for index, answers in enumerate(classify(read(), top_k=top_k, batch_size=batch_size)):
        yield {"file": str(opened[index]), **answers[0], "top_k": answers}


def draw(predictions: list[dict[str, Any]]) -> Image.Image:
    """Returns a picture of all images in rows, each above label, score and file name; small ones keep their pixels."""
    columns = min(len(predictions), max(5, math.isqrt(len(predictions))))
    rows, width, height = math.ceil(len(predictions) / columns), TILE_SIZE + MARGIN, TILE_SIZE + CAPTION_SIZE + MARGIN
    canvas = Image.new("RGB", (columns * width + MARGIN, rows * height + MARGIN), "white")
    pen = ImageDraw.Draw(canvas)
    font, small_font = ImageFont.load_default(FONT_SIZE), ImageFont.load_default(FONT_SIZE - 4)
    for index, prediction in enumerate(predictions):
        left, top = index % columns * width + MARGIN, index // columns * height + MARGIN
        image = open_image(Path(prediction["file"]))
        method = Image.Resampling.NEAREST if max(image.size) < TILE_SIZE else Image.Resampling.LANCZOS
        canvas.paste(ImageOps.pad(image, (TILE_SIZE, TILE_SIZE), method, "white"), (left, top))
        pen.text((left, top + TILE_SIZE + 3), f"{prediction['label'][:12]} ({prediction['score']:.1%})", "black", font)
        pen.text((left, top + TILE_SIZE + 21), Path(prediction["file"]).name[-24:], "gray", small_font)
    return canvas


def main(arguments: list[str] | None = None) -> None:
    """Predicts, prints and draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a saved model, or its name on the Hub; runs the code saved with it")
    parser.add_argument("inputs", nargs="+", type=Path, help="image files, and folders that are searched for them")
    parser.add_argument("--top_k", type=int, default=3, help="labels per image, the likeliest first (default: 3)")
    parser.add_argument("--batch_size", type=int, default=8, help="images per forward pass (default: 8)")
    parser.add_argument("--picture", type=Path, help=f"draw the first {MAX_TILES} images, labelled, to this file")
    args = parser.parse_args(arguments)
    if args.top_k < 1 or args.batch_size < 1:
        parser.error(f"--top_k {args.top_k} and --batch_size {args.batch_size} must be at least 1.")
    if Path(args.model).is_dir() and not (Path(args.model) / "config.json").is_file():
        parser.error(f"The folder {args.model} holds no config.json, so no saved model. Train one first: make demo")
    try:
        files, predictions = find_images(args.inputs), []
        for prediction in predict(args.model, files, args.top_k, args.batch_size):
            print(json.dumps(prediction), flush=True)
            predictions.append(prediction)
    except ValueError as error:
        sys.exit(f"{parser.prog}: {error}")
    if args.picture is not None and predictions:
        args.picture.parent.mkdir(parents=True, exist_ok=True)
        draw(predictions[:MAX_TILES]).save(args.picture)
    if left_out := len(files) - len(predictions):
        sys.exit(f"{parser.prog}: {left_out} of {len(files)} files cannot be read as images.")


if __name__ == "__main__":
    main()
