"""Scores features that extract_features.py has written, by the classes of their images, in three ways.

k-NN is the class of 20 training images, weighted as in DINO; the linear probe a logistic regression on standardized
features, whose regularization is chosen on a tenth of the training images; mAP the mean average precision of looking
for images of the same class, among the training images and among the evaluated ones.

Examples:
    python scripts/evaluate_features.py outputs/features
    python scripts/evaluate_features.py outputs/train-features outputs/test-features --output_dir outputs/scores
"""

import argparse
import sys
from pathlib import Path

from hf_vit.features import open_train_and_test, report
from hf_vit.training.checks import check_output, check_packages
from hf_vit.training.saving.output_folder import free_folder


def main(arguments: list[str]) -> None:
    """Evaluates features by the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path, help="folder of features to learn from, the split train of it")
    parser.add_argument("test", type=Path, nargs="?", help="folder of those to score; by default the same one")
    parser.add_argument(
        "--output_dir",
        type=Path,
        help="where to write evaluation.json (default: beside the features; of two folders, a new one in the second)",
    )
    args = parser.parse_args(arguments)
    try:
        check_packages("sklearn")
        folders, output_dir = [args.train], args.output_dir or args.train
        if args.test is not None:
            folders.append(args.test)
            output_dir = args.output_dir or free_folder(args.test / f"evaluation-beside-{args.train.resolve().name}")
        check_output(output_dir)
        report(*open_train_and_test(folders), output_dir, print)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"{parser.prog}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
