"""Conditions of a training run, which its checkpoints hold and which decide whether it may resume."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import TrainingArguments
from transformers.utils import logging

from ..data.fingerprint import digest_files, fingerprint
from ..options.library import options_of
from .checkpoints import read_conditions, read_state
from .tasks.base import Task


logger = logging.get_logger(__name__)
MOST_SHOWN = 60  # letters of a value
TRAINED_ON = ("train", "validation")  # the latter chooses the best model, and when to stop


def describe_arguments(task: Task) -> dict[str, Any]:
    """Return the options that a resumed run must share, given or by default, and the global batch size, as in JSON."""
    args = task.args
    values: dict[str, Any] = {}
    for part in (vars(task)[name] for name in task.fields()):
        given = part.to_dict() if isinstance(part, TrainingArguments) else asdict(part)
        values |= {name: given[name] for name, known in options_of(type(part)).items() if known["resume"] != "free"}
    values["images of a step"] = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    content: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return content


def describe_data(task: Task) -> dict[str, Any]:
    """Return fingerprints of the images that a training run reads, and of their targets."""
    found = {
        f"{kind} of {split}": value
        for split in TRAINED_ON
        if split in task.loaded.splits
        for kind, value in fingerprint(task.loaded.splits[split]).items()
    }
    if task.loaded.stream is not None:
        found["files of the stream"] = digest_files(
            [source for source in task.options.sources if Path(source).exists()]
        )
    return found


def find_changes(task: Task, values: Mapping[str, Any], checkpoint: str | Path) -> list[str]:
    """Compare conditions with those of a checkpoint, as far as both have them.

    Args:
        task: The task as it is to resume.
        values: Conditions now: options, or facts about the data.
        checkpoint: The checkpoint.

    Returns:
        The differences.

    Raises:
        ValueError: if something differs that is not accepted, or that the saved optimizer depends on.
    """
    begun, is_accepted = read_conditions(checkpoint).get("values", {}), task.args.resume_with_changes
    if not begun and not is_accepted:
        raise ValueError(
            f"{checkpoint} has no conditions.json, which holds the options and data of its training run. If they are "
            "still the same, resume with --resume_with_changes true."
        )
    changed = {name: value for name, value in values.items() if name in begun and begun[name] != value}
    differences = [
        f"{name}: {format_value(begun[name])} then, {format_value(value)} now" for name, value in changed.items()
    ]
    advice = f"or start another training elsewhere, from its weights with --model_name_or_path {checkpoint}"
    if differences and not is_accepted:
        raise ValueError(
            f"The training of {checkpoint} was started with other conditions ({'; '.join(differences)}). Resume it as "
            f"it was started, accept the changes with --resume_with_changes true, {advice}."
        )
    options = options_of(*task.argument_types())
    if fixed := sorted(name for name in changed if name in options and options[name]["resume"] == "fixed"):
        raise ValueError(
            f"The optimizer of {checkpoint} is of a training with other conditions ({'; '.join(differences)}), and "
            f"does not fit another {' or '.join(fixed)}. Resume without that change, {advice}."
        )
    return differences


def format_value(value: Any) -> str:
    """Return a value for a message, which is not to be long."""
    text = str(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


def find_conditions(task: Task, values: Mapping[str, Any], checkpoint: str | None) -> dict[str, Any]:
    """Return the conditions for checkpoints, with all changes since the start of the run; raise as `find_changes`.

    Args:
        task: The task, whose data are loaded.
        values: What `describe_arguments` has returned.
        checkpoint: The checkpoint to resume from, if any.
    """
    values = {**values, **describe_data(task)}
    if checkpoint is None:
        return {"values": values, "changes": []}
    changes = list(read_conditions(checkpoint).get("changes", []))
    if differences := "; ".join(find_changes(task, values, checkpoint)):
        logger.warning(f"The training of {checkpoint} resumes with changes: {differences}.")
        changes.append(f"from step {read_state(checkpoint)['global_step']} on: {differences}")
    return {"values": values, "changes": changes}
