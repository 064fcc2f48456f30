"""Trains keypoints, from scratch or from any saved or published ViT, and writes all that publishing needs.

The output folder then holds the model with its image processor and code, scores, curves, pictures of poses and a model
card. Killed, it resumes from its last checkpoint and ends in the same weights.

Examples:
    S=scripts/train_keypoint_detection.py
    python $S --dataset_name path/to/people --output_dir outputs/people --config_overrides '{"image_size": [256, 192]}'
    python $S --dataset_name path/to/faces.csv --output_dir outputs/faces --image_size 128 --whole_image
    python $S recipe.yaml --model_name_or_path facebook/dinov2-small --head simple
    python $S recipe.yaml --resume_from_checkpoint last
    torchrun --nproc_per_node 2 $S recipe.yaml --use_cpu
"""

import sys

from hf_vit import cli


def main(arguments: list[str]) -> None:
    """Trains, evaluates, saves and, on request, publishes."""
    cli.main(["train", "keypoint-detection", *arguments], __doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
