"""Trains monocular depth, from scratch or from any saved or published ViT, and writes all that publishing needs.

The output folder then holds the model with its image processor and code, scores, curves, pictures of predictions and a
model card. Killed, it resumes from its last checkpoint and ends in the same weights.

Examples:
    S=scripts/train_depth_estimation.py
    python $S --dataset_name path/to/rooms --output_dir outputs/rooms --eval_crop eigen
    python $S recipe.yaml --model_name_or_path facebook/dinov2-small --head linear
    python $S recipe.yaml --resume_from_checkpoint last
    torchrun --nproc_per_node 2 $S recipe.yaml --use_cpu
"""

import sys

from hf_vit import cli


def main(arguments: list[str]) -> None:
    """Trains, evaluates, saves and, on request, publishes."""
    cli.main(["train", "depth-estimation", *arguments], __doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
