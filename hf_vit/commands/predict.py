"""Predicts labels, segments, depth, objects or keypoints of images, whatever a saved model was trained for.

Prints one JSON line per image. Files that cannot be read are named on stderr, and end the script with exit code 1.

Examples:
    hf-vit predict outputs/digits photo.png folder_of_images --picture labeled.png > predictions.jsonl
    hf-vit predict outputs/streets folder_of_images --output_dir outputs/masks
    hf-vit predict outputs/pets photo.png --subtask instance --threshold 0.8 --picture pets.png
    hf-vit predict outputs/rooms folder_of_images --output_dir outputs/depths
    hf-vit predict outputs/animals folder_of_images --picture animals.png > animals.jsonl
    hf-vit predict outputs/poses folder_of_images --boxes animals.jsonl --picture poses.png
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ..flags.parser import OneLineParser, exit_in_one_line
from ..inference.predict import MAX_TILES, predict_files


def make_parser(description: str | None) -> OneLineParser:
    """Returns the parser of the command line."""
    parser = OneLineParser(description, "predict")
    parser.add_argument("model", help="folder of a saved model, or its name on the Hub")
    parser.add_argument(
        "inputs", nargs="+", type=Path, help="image files, folders of them, or parquet files, tar files and tables"
    )
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
    parser.add_argument("--boxes", type=Path, help="what was printed of objects: where keypoints are")
    parser.add_argument("--subtask", choices=["panoptic", "instance", "semantic"], help="what to segment")
    parser.add_argument(
        "--optimize", action="store_true", help="make the model fast on this machine first: for many images"
    )
    parser.add_argument(
        "--trust_remote_code", action="store_true", help="let code run that the model brings, if it is not ours"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace files of an earlier run")
    return parser


def main(arguments: Sequence[str], description: str | None, report: Callable[[str], None]) -> None:
    """Predicts, and exits with one line about what is wrong.

    Args:
        arguments: The command line without the program's name.
        description: Beginning of `--help`.
        report: Prints a line.
    """
    parser, errors, total = make_parser(description), 0, 0
    with exit_in_one_line(ImportError, OSError, ValueError):
        args = parser.parse_args(arguments)
        if args.top_k < 1 or args.batch_size < 1:
            raise ValueError(f"--top_k {args.top_k} and --batch_size {args.batch_size} must be at least 1.")
        for name in ("threshold", "nms_threshold"):
            if vars(args)[name] is not None and not 0 <= vars(args)[name] <= 1:
                raise ValueError(f"--{name} {vars(args)[name]} must lie in [0, 1].")
        if Path(args.model).is_dir() and not (Path(args.model) / "config.json").is_file():
            raise ValueError(
                f"The folder {args.model} holds no config.json, so no saved model. Train one first: hf-vit train"
            )
        for line in predict_files(**vars(args)):
            total += 1
            if "error" in line:
                errors += 1
                sys.stderr.write(f"{line['error']}\n")
            else:
                report(json.dumps(line, allow_nan=False))
        if errors:
            raise ValueError(f"{errors} of {total} files cannot be read as images.")
