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

import textwrap
from collections.abc import Callable, Sequence

from ..flags.named_recipes import recipes_of
from ..flags.parser import exit_in_one_line, name_words, nearest
from ..training.run import run
from ..training.tasks import TASKS


RECIPE_SUFFIXES = (".yaml", ".yml")  # of a first word that is no data


def main(arguments: Sequence[str], description: str | None, report: Callable[[str], None]) -> None:
    """Trains, and exits with one line about what is wrong before that.

    Args:
        arguments: The command line without the program's name: the task, a recipe or the data, options.
        description: Beginning of `--help`, without the tasks.
        report: Prints a line.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        report(
            f"{(description or '').strip()}\n{textwrap.indent(tasks(), '    ')}\n\nhf-vit train TASK --help: options"
        )
        return
    with exit_in_one_line(ValueError):
        name = find_task(arguments[0])
    rest = list(arguments[1:])
    recipe = rest[:1] if rest and rest[0].endswith(RECIPE_SUFFIXES) else []
    words = [*recipe, *name_words(rest[len(recipe) :], ["dataset_name"])]
    run(TASKS[name], words, describe(name), report, program=("train", name.replace("_", "-")))


def tasks() -> str:
    """Returns the names of the tasks, a line each."""
    return "\n".join(sorted(name.replace("_", "-") for name in TASKS))


def find_task(text: str) -> str:
    """Returns the name of a task; raises `ValueError`, which names those that there are, if there is none."""
    name = text.replace("-", "_").lower()
    if name not in TASKS:
        known = tasks().split()
        raise ValueError(
            f"There is no task {text!r}.{nearest(name.replace('_', '-'), known)} The tasks are {', '.join(known)}: "
            "hf-vit train TASK DATA."
        )
    return name


def describe(task: str) -> str:
    """Returns what stands above the options of a task."""
    dashed = task.replace("_", "-")
    lines = [
        f"Trains {dashed.replace('-', ' ')}, from scratch or from another model.",
        "",
        f"Usage: hf-vit train {dashed} [recipe.yaml] DATA [options]",
    ]
    if recipes := recipes_of(task):
        named = f"--recipe takes a file, or {', '.join(recipes)}."
        lines += ["", *textwrap.wrap(named, 80, break_on_hyphens=False)]
    return "\n".join(lines)
