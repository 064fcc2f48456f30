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
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from ..inference.predict import predict_files


@wraps(predict_files)
def predict(model: str, *, report: Callable[[str], None], **options: Any) -> None:
    """Predicts and prints a line for each image; raises `ValueError` if files cannot be read as images."""
    if Path(model).is_dir() and not (Path(model) / "config.json").is_file():
        raise ValueError(f"The folder {model} holds no config.json, so no saved model. Train one first: hf-vit train")
    errors = total = 0
    for line in predict_files(model, **options):
        total += 1
        if "error" in line:
            errors += 1
            sys.stderr.write(f"{line['error']}\n")
        else:
            report(json.dumps(line, allow_nan=False))
    if errors:
        raise ValueError(f"{errors} of {total} files cannot be read as images.")
