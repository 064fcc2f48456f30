"""Scores a saved model for depth on images with depth maps, on one process or several.

Prints the scores and writes them with a picture of a few images.

Examples (all options of the Trainer's evaluation count, such as --use_cpu and --per_device_eval_batch_size):
    S=scripts/evaluate_depth_estimation.py
    python $S --model_name_or_path outputs/rooms --dataset_name path/to/rooms
    python $S --model_name_or_path outputs/rooms --dataset_name path/to/rooms --eval_crop eigen --max_eval_depth 10
    torchrun --nproc_per_node 2 $S --model_name_or_path outputs/rooms --dataset_name path/to/rooms --use_cpu
"""

import sys

from hf_vit import training


def main(arguments: list[str]) -> None:
    """Scores."""
    training.evaluate(training.DepthEvaluation, arguments, __doc__, say=print)


if __name__ == "__main__":
    main(sys.argv[1:])
