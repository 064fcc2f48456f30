r"""Evaluates a saved model on data of its task, on one process or several.

Prints the scores and writes them, those of each class or keypoint where there are some, and a picture of a few images;
for classifiers the confusion matrix and the prediction for every image, for models of images and texts how well
captions find their images. The configuration of the model tells its task, and with it the options: --help lists them
beside --model_name_or_path.

Examples (all options of the Trainer's evaluation count, such as --use_cpu and --per_device_eval_batch_size):
    S=scripts/evaluate_model.py
    python $S --model_name_or_path outputs/photos --dataset_name path/to/photos --split validation
    python $S --model_name_or_path outputs/streets --dataset_name path/to/streets --eval_window_size 512 --eval_flip
    python $S --model_name_or_path outputs/pets --dataset_name path/to/pets --thing_classes "cat,dog"
    python $S --model_name_or_path outputs/rooms --dataset_name path/to/rooms --eval_crop eigen --max_eval_depth 10
    python $S --model_name_or_path outputs/people --dataset_name path/to/people --normalize_by left_shoulder,right_hip
    python $S --model_name_or_path outputs/pairs --dataset_name path/to/captions --zero_shot_dataset path/to/photos
    python $S --model_name_or_path outputs/photos --help
    torchrun --nproc_per_node 2 $S --model_name_or_path outputs/cells --dataset_name path/to/cells --use_cpu
"""

import sys

from hf_vit import cli


def main(arguments: list[str]) -> None:
    """Evaluates."""
    cli.main(["evaluate", *arguments], __doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
