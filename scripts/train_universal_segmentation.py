"""Trains semantic, instance and panoptic segmentation by one model, from scratch or from any saved or published ViT.

The output folder then holds the model with its image processor and code, scores, those of each class, curves, pictures
of predictions and a model card. Killed, it resumes from its last checkpoint and ends in the same weights.

Examples:
    S=scripts/train_universal_segmentation.py
    python $S --dataset_name path/to/coco --annotations panoptic --output_dir outputs/coco
    python $S --dataset_name path/to/pets --thing_classes cat,dog --output_dir outputs/pets
    python $S recipe.yaml --resume_from_checkpoint last
    torchrun --nproc_per_node 2 $S recipe.yaml --use_cpu
"""

import sys

from hf_vit import cli


def main(arguments: list[str]) -> None:
    """Trains, evaluates, saves and, on request, publishes."""
    cli.main(["train", "universal-segmentation", *arguments], __doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
