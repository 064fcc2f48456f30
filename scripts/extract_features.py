r"""Writes the features of images to parquet files, for search, clustering or a linear model.

A killed run resumes with the same command, and ends in the same files; so do several processes together.

Examples:
    python scripts/extract_features.py --model_name_or_path outputs/encoder --dataset_name path/to/photos \
        --features cls mean --output_dir outputs/features
    torchrun --nproc_per_node 2 scripts/extract_features.py --model_name_or_path facebook/dinov2-base \
        --dataset_name user/images --features patches --dtype float16 --output_dir outputs/patches
"""

import sys

from hf_vit import cli


def main(arguments: list[str]) -> None:
    """Extracts features by the arguments of the command line."""
    cli.main(["features", "extract", *arguments], __doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
