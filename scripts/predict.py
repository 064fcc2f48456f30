"""Says what is on images, with a saved model and nothing but transformers: `hf_vit` need not be installed.

Labels of images, classes and segments of their pixels, depth, objects, or keypoints: whatever the model was trained
for. Prints one JSON line per image. Files that cannot be read are named on stderr, and end the script with exit code
1.

Examples:
    python scripts/predict.py outputs/digits photo.png folder_of_images --picture labeled.png > predictions.jsonl
    python scripts/predict.py outputs/streets folder_of_images --output_dir outputs/masks
    python scripts/predict.py outputs/pets photo.png --subtask instance --threshold 0.8 --picture pets.png
    python scripts/predict.py outputs/rooms folder_of_images --output_dir outputs/depths
    python scripts/predict.py outputs/animals folder_of_images --picture animals.png > animals.jsonl
    python scripts/predict.py outputs/poses folder_of_images --boxes animals.jsonl --picture poses.png
"""

import argparse
import json
import math
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps
from prediction.inputs import find_images, name_outputs, open_image
from prediction.models import open_model
from prediction.pictures import MARGIN, arrange
from prediction.task import Task


MAX_TILES = 100  # of --picture


def predict(task: Task, files: list[Path]) -> Iterator[tuple[int, Image.Image, Any]]:
    """Yields the place, the image and the answer of each file that can be read; names the others on stderr."""
    opened: deque[tuple[int, Image.Image]] = deque()

    def read() -> Iterator[Any]:  # only a batch of images is in memory at a time
        for index, file in enumerate(files):
            try:
                image = open_image(file)
            except ValueError as error:
                print(error, file=sys.stderr)
            else:
                opened.append((index, image))
                yield task.given(file, image)

    for answer in task.answer(read()):
        yield *opened.popleft(), answer


def save(picture: Image.Image, file: Path) -> None:
    """Writes a picture with a margin around it."""
    ImageOps.expand(picture, MARGIN, "white").save(file)


def run(args: argparse.Namespace) -> int:
    """Predicts, prints, writes and draws; returns the number of files that cannot be read."""
    files, tiles, count = find_images(args.inputs), [], 0
    task, names = open_model(args, files), name_outputs(files)
    for folder in filter(None, [args.output_dir, args.picture and args.picture.parent]):
        folder.mkdir(parents=True, exist_ok=True)
    for index, image, answer in predict(task, files):
        line = {"file": str(files[index]), **task.describe(image, answer)}
        if args.output_dir is not None:
            written = task.write(image, answer, args.output_dir / names[index])
            written.append(args.output_dir / f"{names[index]}_picture.png")
            save(task.draw(image, answer, files[index].name), written[-1])
            line["written"] = [str(file) for file in written]
        if args.picture is not None and count < MAX_TILES:
            tiles.append(task.draw(image, answer, files[index].name))
        print(json.dumps(line), flush=True)
        count += 1
    if tiles:
        columns = task.columns or max(5, math.isqrt(len(tiles)))
        save(arrange(tiles, min(len(tiles), columns)), args.picture)
    return len(files) - count


def main(arguments: list[str] | None = None) -> None:
    """Predicts as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a saved model, or its name on the Hub; runs the code saved with it")
    parser.add_argument("inputs", nargs="+", type=Path, help="image files, and folders that are searched for them")
    parser.add_argument("--output_dir", type=Path, help="write what is found, and a picture, of each image there")
    parser.add_argument("--picture", type=Path, help=f"draw the first {MAX_TILES} images with answers to this file")
    parser.add_argument("--top_k", type=int, default=3, help="labels per image, the likeliest first (default: 3)")
    parser.add_argument(
        "--batch_size", type=int, default=8, help="images to be named, or objects with keypoints, per pass"
    )
    parser.add_argument("--threshold", type=float, help="least score of a segment or object (0.5) or keypoint (none)")
    parser.add_argument("--boxes", type=Path, help="what this script printed of objects: where keypoints are")
    parser.add_argument("--subtask", choices=["panoptic", "instance", "semantic"], help="what to segment")
    args = parser.parse_args(arguments)
    if args.top_k < 1 or args.batch_size < 1:
        parser.error(f"--top_k {args.top_k} and --batch_size {args.batch_size} must be at least 1.")
    if Path(args.model).is_dir() and not (Path(args.model) / "config.json").is_file():
        parser.error(f"The folder {args.model} holds no config.json, so no saved model. Train one first: make demo")
    try:
        left_out = run(args)
    except (ValueError, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")
    if left_out:
        sys.exit(f"{parser.prog}: {left_out} of {len(find_images(args.inputs))} files cannot be read as images.")


if __name__ == "__main__":
    main()
