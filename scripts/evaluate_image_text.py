"""Scores a saved model that compares images with texts, on one process or several.

Prints and writes how well captions find their images among all, and images their captions, draws a few, and, where
labeled images are given, says how well their classes are told by their names.

Examples (all options of the Trainer's evaluation count, such as --use_cpu and --per_device_eval_batch_size):
    S=scripts/evaluate_image_text.py
    python $S --model_name_or_path outputs/pairs --dataset_name path/to/captions --zero_shot_dataset path/to/photos
    python $S --model_name_or_path openai/clip-vit-base-patch32 --dataset_name path/to/captions --split validation
    torchrun --nproc_per_node 2 $S --model_name_or_path outputs/pairs --dataset_name path/to/captions --use_cpu
"""

import sys

from hf_vit import training


def main(arguments: list[str]) -> None:
    """Scores."""
    training.evaluate(training.ImageTextEvaluation, arguments, __doc__, say=print)


if __name__ == "__main__":
    main(sys.argv[1:])
