"""Scores a saved image classifier on a labeled dataset, on one process or several.

Prints the scores and writes them with the confusion matrix, its picture and the answer for every image.

Examples (all options of the Trainer's evaluation count, such as --use_cpu and --per_device_eval_batch_size):
    S=scripts/evaluate_image_classification.py
    python $S --model_name_or_path outputs/photos --dataset_name path/to/photos
    python $S --model_name_or_path user/name --dataset_name path/to/photos --split validation
    torchrun --nproc_per_node 2 $S --model_name_or_path outputs/photos --dataset_name path/to/photos --use_cpu
"""

import sys

from hf_vit import training


def main(arguments: list[str]) -> None:
    """Scores."""
    training.evaluate(training.ImageClassificationEvaluation, arguments, __doc__, say=print)


if __name__ == "__main__":
    main(sys.argv[1:])
