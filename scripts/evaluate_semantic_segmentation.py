"""Scores a saved model for semantic segmentation on images with masks, on one process or several.

Prints the scores and writes them with the scores of each class and a picture of a few images.

Examples (all options of the Trainer's evaluation count, such as --use_cpu and --per_device_eval_batch_size):
    S=scripts/evaluate_semantic_segmentation.py
    python $S --model_name_or_path outputs/streets --dataset_name path/to/streets
    python $S --model_name_or_path outputs/streets --dataset_name path/to/streets --eval_flip --eval_window_size 512
    torchrun --nproc_per_node 2 $S --model_name_or_path outputs/streets --dataset_name path/to/streets --use_cpu
"""

import sys

from hf_vit import training


def main(arguments: list[str]) -> None:
    """Scores."""
    training.evaluate(training.SemanticEvaluation, arguments, __doc__, say=print)


if __name__ == "__main__":
    main(sys.argv[1:])
