"""Turns published ViT checkpoints into ours, checked against the library they are from, and ours into theirs.

Examples:
    python scripts/convert_checkpoint.py facebook/dinov2-base outputs/dinov2-base
    python scripts/convert_checkpoint.py facebook/vit-mae-base outputs/mae-384 --config_overrides '{"image_size": 384}'
    python scripts/convert_checkpoint.py outputs/digits outputs/digits-vit --to vit
    python scripts/convert_checkpoint.py --list
"""

import sys

from hf_vit import cli


def main(arguments: list[str]) -> None:
    """Converts in one direction or the other."""
    cli.main(["convert", *arguments], __doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
