r"""Trains an encoder on images without labels, by views of one image that are to say the same (LeJEPA).

The output folder then holds the model with its image processor and code, scores, curves, pictures of views and a model
card. Every task starts from it: give it to a training script as --model_name_or_path. Killed, it resumes from its last
checkpoint and ends in the same weights.

Examples:
    S=scripts/pretrain_joint_embedding.py
    python $S --dataset_name path/to/photos --output_dir outputs/encoder --minutes 60
    python $S --dataset_name path/to/photos,path/to/more --output_dir outputs/encoder --num_local_views 6
    python $S recipe.yaml --resume_from_checkpoint last
    torchrun --nproc_per_node 2 $S recipe.yaml --use_cpu
"""

import sys

from hf_vit import cli


def main(arguments: list[str]) -> None:
    """Trains, evaluates, saves and, on request, publishes."""
    cli.main(["train", "joint-embedding", *arguments], __doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
