"""What the course of a training hangs on: arguments, batch and data, as checkpoints hold it, and what has changed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME

from ..data.fingerprint import file_list, fingerprint
from ..options.library import options_of
from ..options.resume import as_json, check_changes, compared_options
from .saving.checkpoints import read_conditions
from .tasks.base import Task


TRAINED_ON = ("train", "validation")  # the latter chooses the best model, and when to stop


def describe_arguments(task: Task) -> dict[str, Any]:
    """Returns all arguments of a training that its course hangs on, given or by default, and its global batch."""
    args = task.args
    batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    values = compared_options(vars(task)[name] for name in task.fields())
    return as_json({**values, "images of a step": batch})


def describe_data(task: Task) -> dict[str, Any]:
    """Returns what tells the images that a training reads, and their targets, from any others."""
    sources = task.options.sources
    found = {
        f"{kind} of {split}": value
        for split in TRAINED_ON
        if split in task.loaded.splits
        for kind, value in fingerprint(task.loaded.splits[split], sources).items()
    }
    if task.loaded.stream is not None:
        local = [source for source in sources if Path(source).exists()]
        found["files of the stream"] = file_list(local)
    return found


def find_changes(task: Task, values: Mapping[str, Any], checkpoint: str | Path) -> list[str]:
    """Returns how arguments or data differ from those of a checkpoint; raises as `check_changes`."""
    begun = read_conditions(checkpoint).get("values", {})
    options = options_of(*task.argument_types())
    return check_changes(checkpoint, begun, values, options, task.args.resume_with_changes)


def with_changes(values: Mapping[str, Any], checkpoint: str | Path | None, differences: list[str]) -> dict[str, Any]:
    """Returns the conditions of a training, as its checkpoints hold them, with all changes since it was started."""
    if checkpoint is None:
        return {"values": dict(values), "changes": []}
    changes = list(read_conditions(checkpoint).get("changes", []))
    if differences:
        state = json.loads((Path(checkpoint) / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        changes.append(f"from step {state['global_step']} on: {'; '.join(differences)}")
    return {"values": dict(values), "changes": changes}
