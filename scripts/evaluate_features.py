"""Scores features that extract_features.py has written, by the classes of their images, in three ways.

k-NN is the class of 20 training images, weighted as in DINO; the linear probe a logistic regression on standardized
features, whose regularization is chosen on a tenth of the training images; mAP the mean average precision of looking
for images of the same class, among the training images and among the evaluated ones.

Examples:
    python scripts/evaluate_features.py outputs/features
    python scripts/evaluate_features.py outputs/train-features outputs/test-features --output_dir outputs/scores
"""

import sys

from hf_vit import cli


def main(arguments: list[str]) -> None:
    """Evaluates features by the arguments of the command line."""
    cli.main(["features", "evaluate", *arguments], __doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
