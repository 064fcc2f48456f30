"""Scores a saved model for keypoints on images of objects, on one process or several.

Prints the scores and writes them, those of each keypoint, and a picture of a few objects.

Examples (all options of the Trainer's evaluation count, such as --use_cpu and --per_device_eval_batch_size):
    S=scripts/evaluate_keypoint_detection.py
    python $S --model_name_or_path outputs/people --dataset_name path/to/people --flip_test false
    python $S --model_name_or_path outputs/people --dataset_name path/to/people --normalize_by left_shoulder,right_hip
    torchrun --nproc_per_node 2 $S --model_name_or_path outputs/people --dataset_name path/to/people --use_cpu
"""

import sys

from hf_vit import training


def main(arguments: list[str]) -> None:
    """Scores."""
    training.evaluate(training.KeypointEvaluation, arguments, __doc__, say=print)


if __name__ == "__main__":
    main(sys.argv[1:])
