"""Publishes a saved model on the Hugging Face Hub: weights, code, image processor and card, in one commit.

The model, for whatever task, then opens anywhere, as here one that classifies:
pipeline("image-classification", "user/name", trust_remote_code=True).

Examples:
    python scripts/push_to_hub.py outputs/digits user/digits-vit --dry_run
    python scripts/push_to_hub.py outputs/digits user/digits-vit --private
"""

import sys

from hf_vit import cli


def main(arguments: list[str]) -> None:
    """Checks, lists and uploads."""
    cli.main(["push", *arguments], __doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
