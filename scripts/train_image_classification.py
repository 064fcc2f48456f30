"""Trains an image classifier, from scratch or from a saved or published one, and writes all that publishing needs.

The output folder then holds the model with its image processor and code, scores, curves, a confusion matrix and a
model card. Killed, it resumes from its last checkpoint and ends in the same weights.

Examples:
    python scripts/train_image_classification.py --dataset_name path/to/photos --output_dir outputs/photos
    python scripts/train_image_classification.py recipe.yaml --learning_rate 5e-4
    python scripts/train_image_classification.py recipe.yaml --teacher outputs/photos
    python scripts/train_image_classification.py recipe.yaml --resume_from_checkpoint last
    python scripts/train_image_classification.py recipe.yaml --streaming true --max_steps 9000
    torchrun --nproc_per_node 2 scripts/train_image_classification.py recipe.yaml --use_cpu
"""

import sys

from hf_vit import cli


def main(arguments: list[str]) -> None:
    """Trains, evaluates, saves and, on request, publishes."""
    cli.main(["train", "image-classification", *arguments], __doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
