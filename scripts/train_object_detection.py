"""Trains object detection, from scratch or from any saved or published ViT, and writes all that publishing needs.

The output folder then holds the model with its image processor and code, scores, curves, pictures of boxes and a model
card. Killed, it resumes from its last checkpoint and ends in the same weights.

Examples:
    S=scripts/train_object_detection.py
    python $S --dataset_name path/to/cells --output_dir outputs/cells --image_size 320
    python $S recipe.yaml --model_name_or_path facebook/dinov2-small --decoder deformable --box_errors clip
    python $S recipe.yaml --resume_from_checkpoint last
    torchrun --nproc_per_node 2 $S recipe.yaml --use_cpu
"""

import sys

from hf_vit import cli


def main(arguments: list[str]) -> None:
    """Trains, evaluates, saves and, on request, publishes."""
    cli.main(["train", "object-detection", *arguments], __doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
