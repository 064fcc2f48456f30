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

import sys

from hf_vit import cli


def main(arguments: list[str]) -> None:
    """Predicts and prints."""
    cli.main(["predict", *arguments], __doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
