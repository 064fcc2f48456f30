"""Writes the features of images to files, or scores them by the classes of the images.

Usage: hf-vit features {extract,evaluate} ...

Examples:
    hf-vit features extract facebook/dinov2-base photos --features cls mean --output_dir outputs/features
    hf-vit features evaluate outputs/features
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from ..extras import check_packages
from ..features import extract, open_train_and_test
from ..features import report as report_scores
from ..features.evaluation import FILE_NAME
from ..flags.parser import OneLineParser, exit_in_one_line, name_words
from ..outputs import check_outputs, check_writable, free_folder, record_outputs


EXTRACT = "Writes the features of images to parquet files.\n\nUsage: hf-vit features extract MODEL DATA [options]"
EVALUATE = "Scores features by the classes of their images: nearest neighbors, a linear probe, retrieval."


def main(arguments: Sequence[str], description: str | None, report: Callable[[str], None]) -> None:
    """Extracts or evaluates, and exits with one line about what is wrong.

    Args:
        arguments: The command line without the program's name: "extract" or "evaluate", and what belongs to it.
        description: What is printed without either.
        report: Prints a line.
    """
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        report((description or "").strip())
    elif name == "extract":
        words = name_words(arguments[1:], ["model_name_or_path", "dataset_name"])
        extract(words, EXTRACT, report)
    else:
        with exit_in_one_line(ValueError):
            if name != "evaluate":
                raise ValueError(f"There is no hf-vit features {name}. Choose extract or evaluate.")
        evaluate(arguments[1:], EVALUATE, report)


def evaluate(arguments: Sequence[str], description: str | None, report: Callable[[str], None]) -> None:
    """Evaluates features, and exits with one line about what is wrong.

    Args:
        arguments: The command line without the program's name.
        description: Beginning of `--help`.
        report: Prints a line.
    """
    parser = OneLineParser(description, "features evaluate")
    parser.add_argument("train", type=Path, help="folder of features to learn from, the split train of it")
    parser.add_argument("test", type=Path, nargs="?", help="folder of those to score; by default the same one")
    parser.add_argument(
        "--output_dir",
        type=Path,
        help="where to write evaluation.json (default: beside the features; of two folders, a new one in the second)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace evaluation.json of an earlier run")
    with exit_in_one_line(ValueError, OSError, ImportError):
        args = parser.parse_args(arguments)
        check_packages("The evaluation of features", "sklearn")
        folders, output_dir = [args.train], args.output_dir or args.train
        if args.test is not None:
            folders.append(args.test)
            output_dir = args.output_dir or free_folder(args.test / f"evaluation-beside-{args.train.resolve().name}")
        check_writable(output_dir)
        check_outputs([output_dir / FILE_NAME], overwrite=args.overwrite)
        report_scores(*open_train_and_test(folders), output_dir, report)
        record_outputs([output_dir / FILE_NAME])
