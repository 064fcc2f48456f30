"""Evaluates a saved model on data of its task, on one process or several, and writes scores and pictures.

Usage: hf-vit evaluate MODEL DATA [options]

The configuration of the model tells its task, and with it the options: hf-vit evaluate MODEL --help.

Examples:
    hf-vit evaluate outputs/photos photos
    hf-vit evaluate outputs/photos photos --split validation --output_dir outputs/scores
    torchrun --nproc_per_node 2 -m hf_vit evaluate outputs/cells cells
"""

from collections.abc import Callable, Sequence

from ..flags.parser import name_words
from ..training.run import evaluate


def main(arguments: Sequence[str], description: str | None, report: Callable[[str], None]) -> None:
    """Evaluates, and exits with one line about what is wrong before that.

    Args:
        arguments: The command line without the program's name: model, data, options.
        description: Beginning of `--help`.
        report: Prints a line.
    """
    evaluate(name_words(arguments, ["model_name_or_path", "dataset_name"]), description, report)
