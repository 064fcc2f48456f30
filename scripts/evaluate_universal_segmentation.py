"""Scores a saved model for universal segmentation on images with masks of things and stuff, on one process or several.

Prints the scores and writes them with the scores of each class and a picture of a few images.

Examples (all options of the Trainer's evaluation count, such as --use_cpu and --per_device_eval_batch_size):
    S=scripts/evaluate_universal_segmentation.py
    python $S --model_name_or_path outputs/pets --dataset_name path/to/pets
    python $S --model_name_or_path outputs/pets --dataset_name path/to/pets --thing_classes "cat,dog"
    torchrun --nproc_per_node 2 $S --model_name_or_path outputs/pets --dataset_name path/to/pets --use_cpu
"""

import sys

from hf_vit import training


def main(arguments: list[str]) -> None:
    """Scores."""
    training.evaluate(training.UniversalEvaluation, arguments, __doc__, say=print)


if __name__ == "__main__":
    main(sys.argv[1:])
