"""Trains a model, from scratch or from a saved or published one, and writes all that publishing needs.

Usage: hf-vit train TASK DATA [options]

Examples:
    hf-vit train image-classification photos
    hf-vit train image-classification photos --model facebook/dinov2-small --output_dir outputs/photos
    hf-vit train object-detection cells --recipe bccd --dry_run
    hf-vit train image-classification outputs/photos/recipe.yaml --resume_from_checkpoint last
    torchrun --nproc_per_node 2 -m hf_vit train depth-estimation rooms

DATA is a folder, a file, or a name on the Hub. TASK is one of:
"""

from collections.abc import Callable
from typing import Any

from ..training.run import run
from ..training.tasks import TASKS


def train(task: str, *, report: Callable[[str], None], **options: Any) -> None:
    """Trains, and exits with one line about what is wrong before that.

    Args:
        task: What to train.
        report: Prints a line.
        **options: Those of the task, by name.
    """
    run(TASKS[task], options, report, program=("train", task))
