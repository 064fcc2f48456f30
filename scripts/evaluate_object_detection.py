"""Scores a saved model for object detection on images with boxes, on one process or several.

Prints the scores and writes them, those of each class, precision over recall, and a picture of a few images.

Examples (all options of the Trainer's evaluation count, such as --use_cpu and --per_device_eval_batch_size):
    S=scripts/evaluate_object_detection.py
    python $S --model_name_or_path outputs/cells --dataset_name path/to/cells
    torchrun --nproc_per_node 2 $S --model_name_or_path outputs/cells --dataset_name path/to/cells --use_cpu
"""

import sys

from hf_vit import training


def main(arguments: list[str]) -> None:
    """Scores."""
    training.evaluate(training.DetectionEvaluation, arguments, __doc__, say=print)


if __name__ == "__main__":
    main(sys.argv[1:])
