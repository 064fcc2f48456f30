r"""Trains an encoder on images without labels, by what is behind a mask, and writes all that publishing needs.

The output folder then holds the model with its image processor and code, scores, curves, pictures of reconstructions
and a model card. Every task starts from it: give it to a training script as --model_name_or_path. Killed, it resumes
from its last checkpoint and ends in the same weights.

Examples:
    S=scripts/pretrain_masked_image_modeling.py
    python $S --dataset_name path/to/photos --output_dir outputs/encoder --preset small --num_train_epochs 400
    python $S --dataset_name path/to/photos,path/to/more --output_dir outputs/encoder --objective simmim
    python $S --dataset_name user/images --output_dir outputs/encoder --streaming true --max_steps 100000 \
        --save_strategy steps --save_steps 1000 --eval_strategy steps --eval_steps 1000
    python $S recipe.yaml --resume_from_checkpoint last
    torchrun --nproc_per_node 2 $S recipe.yaml --use_cpu
"""

import sys

from hf_vit import cli


def main(arguments: list[str]) -> None:
    """Trains, evaluates, saves and, on request, publishes."""
    cli.main(["train", "masked-image-modeling", *arguments], __doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
