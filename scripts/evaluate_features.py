"""Scores features that extract_features.py has written, by the classes of their images, in three ways.

k-NN is the class of 20 training images, weighted as in DINO; the linear probe a logistic regression on standardized
features, whose regularization is chosen on a tenth of the training images; mAP the mean average precision of looking
for images of the same class, among the training images and among the evaluated ones.

Examples:
    python scripts/evaluate_features.py outputs/features
    python scripts/evaluate_features.py outputs/train-features outputs/test-features --output_dir outputs/scores
"""

import sys
from collections.abc import Sequence
from functools import partial

from hf_vit.commands import features


def main(arguments: Sequence[str]) -> None:
    """Evaluates features by the arguments of the command line."""
    features.evaluate(arguments, __doc__, report=partial(print, flush=True))


if __name__ == "__main__":
    main(sys.argv[1:])
