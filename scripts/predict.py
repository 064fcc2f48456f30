"""Names what is on images, with a saved model and nothing but transformers: `hf_vit` need not be installed.

Prints one JSON line per image and, on request, draws the images with their labels.

Examples:
    python scripts/predict.py outputs/digits photo.png folder_of_images
    python scripts/predict.py outputs/digits folder_of_images --picture labelled.png > predictions.jsonl
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont, ImageOps, UnidentifiedImageError
from transformers import pipeline


IMAGE_SUFFIXES = {
    ".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp"
}  # fmt: skip
TILE_SIZE, CAPTION_SIZE, FONT_SIZE = 128, 40, 14  # pixels
MAX_TILES = 100


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a saved model, or its name on the Hub; runs the code saved with it")
    parser.add_argument("inputs", nargs="+", type=Path, help="image files, and folders that are searched for them")
    parser.add_argument("--top_k", type=int, default=3, help="labels per image, the likeliest first (default: 3)")
    parser.add_argument("--batch_size", type=int, default=8, help="images per forward pass (default: 8)")
    parser.add_argument(
        "--picture", type=Path, help=f"draw the first {MAX_TILES} images with their labels to this file"
    )
    return parser


def find_images(inputs: list[Path]) -> list[Path]:
    """Lists the image files among `inputs` and, sorted, in the folders among them.

    Raises:
        ValueError: if an input does not exist, or a folder holds no image.
    """
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
    """Opens an image upright, as 8-bit colours on white: the pipeline would lose what is transparent or has 16 bits.

    Raises:
        ValueError: if the file is not an image.
    """
    try:
        with Image.open(file) as opened:
            image = ImageOps.exif_transpose(opened)
            if image.mode.startswith("I"):  # 16-bit grey, which PIL would cut off at 255
                image = image.convert("I").point(lambda value: value * (1 / 257) + 0.5).convert("L")
            if image.has_transparency_data:
                white = Image.new("RGBA", image.size, "white")
                image = Image.alpha_composite(white, image.convert("RGBA"))
            return image.convert("RGB")
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError(f"{file} cannot be read as an image: {error}") from error


def predict(model: str, files: list[Path], top_k: int = 3, batch_size: int = 8) -> Iterator[dict[str, Any]]:
    """Yields for each file its `file`, `label` and `score`, and the `top_k` likeliest labels with their scores."""
    classify = pipeline("image-classification", model=model, trust_remote_code=True)
    # A generator: only a batch of images is in memory at a time.
    images = (open_image(file) for file in files)
    for file, answers in zip(files, classify(images, top_k=top_k, batch_size=batch_size), strict=True):
        yield {"file": str(file), "label": answers[0]["label"], "score": answers[0]["score"], "top_k": answers}


def draw(predictions: list[dict[str, Any]]) -> Image.Image:
    """Returns one picture of all images in rows, each above its label, the label's score and the file's name."""
    columns = min(len(predictions), max(5, math.isqrt(len(predictions))))
    rows = math.ceil(len(predictions) / columns)
    margin = TILE_SIZE // 16
    cell = (TILE_SIZE + margin, TILE_SIZE + CAPTION_SIZE + margin)
    canvas = Image.new("RGB", (columns * cell[0] + margin, rows * cell[1] + margin), "white")
    pen = ImageDraw.Draw(canvas)
    font, small_font = ImageFont.load_default(FONT_SIZE), ImageFont.load_default(FONT_SIZE - 4)
    for index, prediction in enumerate(predictions):
        left, top = index % columns * cell[0] + margin, index // columns * cell[1] + margin
        image = open_image(Path(prediction["file"]))
        # Small images keep their pixels visible.
        method = Image.Resampling.NEAREST if max(image.size) < TILE_SIZE else Image.Resampling.LANCZOS
        tile = ImageOps.contain(image, (TILE_SIZE, TILE_SIZE), method)
        canvas.paste(tile, (left + (TILE_SIZE - tile.width) // 2, top + (TILE_SIZE - tile.height) // 2))
        caption = f"{prediction['label'][:12]} ({prediction['score']:.1%})"
        pen.text((left, top + TILE_SIZE + 3), caption, fill="black", font=font)
        pen.text((left, top + TILE_SIZE + 21), Path(prediction["file"]).name[-24:], fill="gray", font=small_font)
    return canvas


def main(arguments: list[str] | None = None) -> None:
    """Predicts, prints and draws."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    if args.top_k < 1 or args.batch_size < 1:
        parser.error(f"--top_k {args.top_k} and --batch_size {args.batch_size} must be at least 1.")
    if Path(args.model).is_dir() and not (Path(args.model) / "config.json").is_file():
        parser.error(f"The folder {args.model} holds no config.json, so no saved model. Train one first: make demo")
    try:
        predictions = []
        for prediction in predict(args.model, find_images(args.inputs), args.top_k, args.batch_size):
            print(json.dumps(prediction), flush=True)
            predictions.append(prediction)
    except ValueError as error:
        sys.exit(f"{parser.prog}: {error}")
    if args.picture is not None:
        args.picture.parent.mkdir(parents=True, exist_ok=True)
        draw(predictions[:MAX_TILES]).save(args.picture)


if __name__ == "__main__":
    main()
