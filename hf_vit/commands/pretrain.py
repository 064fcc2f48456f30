"""Pretrains on your images without their labels, and measures with the labels what that is worth.

Three fifths of the time go to pretraining. The rest goes to two trainings with labels, one from scratch before it and
one from the pretrained encoder after it, whose scores are compared. Without labels it ends with the encoder.

Examples:
    hf-vit pretrain photos --minutes 60
    hf-vit pretrain photos more_photos --labels labeled_photos --task semantic-segmentation
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from ..flags.parser import OneLineParser, exit_in_one_line
from ..pretraining import METHODS, pretrain
from ..training.tasks import TASKS


def make_parser(description: str | None) -> OneLineParser:
    """Returns the parser of the command line."""
    labeled = [dashed for name in TASKS if (dashed := name.replace("_", "-")) not in METHODS]
    parser = OneLineParser(description, "pretrain")
    parser.add_argument("data", nargs="+", help="folders, files, or names on the Hub")
    parser.add_argument("--labels", help="folder, file, or name on the Hub of images with labels (default: data)")
    parser.add_argument("--task", choices=labeled, help="what to train with labels (default: image-classification)")
    parser.add_argument("--method", choices=METHODS, default="joint-embedding", help="default: joint-embedding")
    parser.add_argument("--minutes", type=float, default=60.0, help="time for all of it (default: 60)")
    parser.add_argument("--output_dir", type=Path, help="new folder (default: one below outputs)")
    parser.add_argument("--resume", action="store_true", help="go on with what has begun in output_dir")
    parser.add_argument("--seed", type=int, default=42, help="of all three trainings (default: 42)")
    return parser


def main(arguments: Sequence[str], description: str | None, report: Callable[[str], None]) -> None:
    """Pretrains and compares, and exits with one line about what is wrong.

    Args:
        arguments: The command line without the program's name.
        description: Beginning of `--help`.
        report: Prints a line.
    """
    with exit_in_one_line(FloatingPointError, ImportError, OSError, ValueError):
        args = vars(make_parser(description).parse_args(arguments))
        pretrain(args.pop("data"), args.pop("labels"), report=report, **args)
