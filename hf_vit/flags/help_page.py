"""Help pages: the options that matter on one page, and all of them by topic on another."""

import argparse
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields
from enum import Enum

from transformers import TrainingArguments


# The options that matter, by topic, to those who train, evaluate and extract features.
TRAINING = {
    "Data": ("dataset_name", "class_names", "thing_classes", "flip_pairs"),
    "Model": ("model_name_or_path", "preset", "image_size", "head", "decoder", "objective"),
    "Training": (
        *("minutes", "num_train_epochs", "max_steps", "learning_rate", "per_device_train_batch_size"),
        *("early_stopping_patience", "bf16", "seed"),
    ),
    "Output": ("output_dir", "resume_from_checkpoint", "dry_run"),
}
EVALUATION = {
    "What to evaluate": ("model_name_or_path", "task", "dataset_name", "split"),
    "How": (
        *("eval_window_size", "eval_scales", "eval_flip", "eval_crop", "eval_alignment", "min_eval_depth"),
        *("max_eval_depth", "flip_test", "pck_threshold", "normalize_by", "zero_shot_dataset", "prompt_templates"),
        *("per_device_eval_batch_size", "use_cpu"),
    ),
    "Output": ("output_dir", "overwrite"),
}
EXTRACTION = {
    "What to extract": ("model_name_or_path", "dataset_name", "features"),
    "How": ("dtype", "batch_size", "num_workers", "rows_per_shard", "skip_unreadable", "use_cpu"),
    "Output": ("output_dir",),
}
# What the library says at length
IN_SHORT = {
    "num_train_epochs": "How often to go through the training images.",
    "max_steps": "How many steps to train, whatever the epochs are.",
    "learning_rate": "Largest learning rate.",
    "per_device_train_batch_size": "Images of a step, on each process.",
    "per_device_eval_batch_size": "Images of an evaluation's batch, on each process.",
    "bf16": "Compute in bfloat16 where that is precise enough.",
    "use_cpu": "Leave GPUs alone.",
    "seed": "Of all that is random.",
    "output_dir": "Folder for all that is written; by default a new one in outputs/.",
}
# What is chosen by data and device where it is not given, so that the default on the long page is not what it becomes
CHOSEN = {"image_size", "num_train_epochs", "max_steps", "learning_rate", "per_device_train_batch_size", "bf16"}
OF_THE_LIBRARY = "Options of the library's Trainer (transformers.TrainingArguments), some with other defaults"
COLUMN, LEAST_WIDTH, MOST_WIDTH = 34, 80, 120  # where descriptions begin, and letters of a line
MOST_CHOICES = 40  # letters

Groups = dict[str, list[argparse.Action]]


def help_page(description: str, types: Sequence[type], actions: Sequence[argparse.Action], has_all: bool) -> str:
    """Returns what `--help` prints.

    Args:
        description: What stands above the options.
        types: The dataclasses of the options.
        actions: What the parser has made of them.
        has_all: Whether all options are on the page, rather than those that matter.
    """
    options: dict[str, argparse.Action] = {}
    for action in actions:
        options.setdefault(action.dest, action)  # before its opposite, --no_…
    del options["help"]
    groups = all_groups(types, options) if has_all else essential_groups(options)
    parts = [description.strip()]
    chosen = set() if has_all else CHOSEN
    for title, group in groups.items():
        if group:
            parts.append("\n".join([f"{title}:", *(row(action, action.dest in chosen) for action in group)]))
    if not has_all:
        parts.append(f"--help all lists all {len(options)} options. Those that are chosen follow data and device.")
    return "\n\n".join(parts) + "\n"


def essential_groups(options: dict[str, argparse.Action]) -> Groups:
    """Returns the options that matter, by topic."""
    table = EVALUATION if "split" in options else EXTRACTION if "features" in options else TRAINING
    return {title: [options[name] for name in names if name in options] for title, names in table.items()}


def all_groups(types: Sequence[type], options: dict[str, argparse.Action]) -> Groups:
    """Returns all options by the dataclasses that bring them, those of the library last."""
    groups: Groups = {}
    of_library = {option.name for option in fields(TrainingArguments)}
    for kind in (base for listed in types for base in reversed(listed.__mro__)):
        title = (kind.__doc__ or "").partition("\n")[0].rstrip(".")
        for name in vars(kind).get("__annotations__", {}):
            if name in options and name not in of_library:
                groups.setdefault(title, []).append(options.pop(name))
    return {**groups, OF_THE_LIBRARY: [options[name] for name in sorted(options)]}


def row(action: argparse.Action, is_chosen: bool) -> str:
    """Returns the lines on an option."""
    width = min(max(shutil.get_terminal_size().columns, LEAST_WIDTH), MOST_WIDTH)
    flag = f"  {' '.join([usual_name(action), *takes(action)])}"
    ending = ["(chosen)"] if is_chosen else default(action)
    text = textwrap.wrap(" ".join([describe(action), *ending]), width - COLUMN)
    lines = [" " * COLUMN + line for line in text]
    if len(flag) > COLUMN - 2 or not lines:
        return "\n".join([flag, *lines])
    return "\n".join([flag + lines[0][len(flag) :], *lines[1:]])


def describe(action: argparse.Action) -> str:
    """Returns what an option is for."""
    return IN_SHORT.get(action.dest) or (action.help or "") % vars(action)


def usual_name(action: argparse.Action) -> str:
    """Returns the name of an option, with another one that is not the same with other dashes."""
    first, *others = action.option_strings
    return ", ".join([first, *(name for name in others if name.replace("-", "_") != first.replace("-", "_"))])


def takes(action: argparse.Action) -> Iterator[str]:
    """Yields what an option takes, if that is more than true or false."""
    if action.nargs == "?":
        yield from ["false"] if action.default is True else []
        return
    name = "|".join(map(str, action.choices or ()))
    if not 0 < len(name) <= MOST_CHOICES:
        name = {int: "N", float: "X"}.get(action.type, "TEXT") if isinstance(action.type, type) else "TEXT"
    yield f"{name} ..." if action.nargs == "+" else name


def default(action: argparse.Action) -> Iterator[str]:
    """Yields the default of an option, if it has one."""
    value = action.default.value if isinstance(action.default, Enum) else action.default
    if value not in (None, "", [], False, -1):
        yield f"(default: {' '.join(map(str, value)) if isinstance(value, list) else value})"
