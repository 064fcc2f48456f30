"""Predicts labels, segments, depth, objects or keypoints of images, whatever a saved model was trained for.

Prints one JSON line per image. Files that cannot be read are named on stderr, and end the script with exit code 1.

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
import sys
from pathlib import Path

from hf_vit.predict import MAX_TILES, predict_files


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a saved model, or its name on the Hub")
    parser.add_argument("inputs", nargs="+", type=Path, help="image files, and folders that are searched for them")
    parser.add_argument("--output_dir", type=Path, help="write what is found, and a picture, of each image there")
    parser.add_argument("--picture", type=Path, help=f"draw the first {MAX_TILES} images and predictions to this file")
    parser.add_argument("--top_k", type=int, default=3, help="labels per image, the likeliest first (default: 3)")
    parser.add_argument(
        "--batch_size", type=int, default=8, help="images to be classified, or objects with keypoints, per pass"
    )
    parser.add_argument(
        "--threshold",
        type=float,
        help="least score of a segment, object or keypoint (default: that which the training has chosen by validation "
        "images, else 0.5 for segments and objects and none for keypoints)",
    )
    parser.add_argument("--nms_threshold", type=float, help="leave out objects that overlap a surer one by this IoU")
    parser.add_argument("--boxes", type=Path, help="what this script printed of objects: where keypoints are")
    parser.add_argument("--subtask", choices=["panoptic", "instance", "semantic"], help="what to segment")
    parser.add_argument(
        "--trust_remote_code", action="store_true", help="let code run that the model brings, if it is not ours"
    )
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Predicts and prints."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    if args.top_k < 1 or args.batch_size < 1:
        parser.error(f"--top_k {args.top_k} and --batch_size {args.batch_size} must be at least 1.")
    for name in ("threshold", "nms_threshold"):
        if vars(args)[name] is not None and not 0 <= vars(args)[name] <= 1:
            parser.error(f"--{name} {vars(args)[name]} must lie in [0, 1].")
    if Path(args.model).is_dir() and not (Path(args.model) / "config.json").is_file():
        parser.error(f"The folder {args.model} holds no config.json, so no saved model. Train one first: make demo")
    errors = total = 0
    try:
        for line in predict_files(**vars(args)):
            total += 1
            if "error" in line:
                errors += 1
                print(line["error"], file=sys.stderr)
            else:
                print(json.dumps(line), flush=True)
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"{parser.prog}: {error}")
    if errors:
        sys.exit(f"{parser.prog}: {errors} of {total} files cannot be read as images.")


if __name__ == "__main__":
    main()
