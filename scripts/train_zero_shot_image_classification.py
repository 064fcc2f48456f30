r"""Trains images beside texts (CLIP, SigLIP), and writes all that publishing needs.

The output folder then holds the model with its processor, tokenizer and code, scores, curves, pictures of what is
found and a model card; it opens in the pipeline "zero-shot-image-classification". Killed, it resumes from its last
checkpoint and ends in the same weights.

Examples:
    S=scripts/train_zero_shot_image_classification.py
    python $S --dataset_name path/to/captions --output_dir outputs/pairs --preset small --image_size 112
    python $S --dataset_name path/to/captions --output_dir outputs/pairs --model_name_or_path facebook/dinov2-small \
        --freeze_vision --loss softmax
    python $S recipe.yaml --model_name_or_path facebook/dinov2-base --text_model_name_or_path FacebookAI/roberta-base
    python $S recipe.yaml --zero_shot_dataset path/to/photos --prompt_templates "a photo of a {}." "a drawing of a {}."
    python $S recipe.yaml --resume_from_checkpoint last
    torchrun --nproc_per_node 2 $S recipe.yaml --use_cpu
"""

import sys

from hf_vit import cli


def main(arguments: list[str]) -> None:
    """Trains, evaluates, saves and, on request, publishes."""
    cli.main(["train", "zero-shot-image-classification", *arguments], __doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
