"""Evaluates a saved model on data of its task, on one process or several, and writes scores and pictures.

Usage: hf-vit evaluate MODEL DATA [options]

The configuration of the model tells its task, and with it the options: hf-vit evaluate MODEL --help.

Examples:
    hf-vit evaluate outputs/photos photos
    hf-vit evaluate outputs/photos photos --split validation --output_dir outputs/scores
    torchrun --nproc_per_node 2 -m hf_vit evaluate outputs/cells cells
"""

from collections.abc import Callable
from typing import Any

from ..training.run import evaluate as run_evaluation


def evaluate(*, report: Callable[[str], None], **options: Any) -> None:
    """Evaluates, and exits with one line about what is wrong before that.

    Args:
        report: Prints a line.
        **options: Those of evaluations of the model's task, by name.
    """
    run_evaluation(options, report)
