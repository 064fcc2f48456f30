"""Conditions of a training run, which its checkpoints hold and which decide whether it may resume."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from ..data.fingerprint import file_list, fingerprint
from ..options.library import options_of
from .checkpoints import read_conditions
from .tasks.base import Task


MOST_SHOWN = 60  # letters of a value


def compared_options(parts: Iterable[Any]) -> dict[str, Any]:
    """Return the options of some dataclasses that a resumed run must share, given or by default."""
    values: dict[str, Any] = {}
    for part in parts:
        given = part.to_dict() if isinstance(part, TrainingArguments) else asdict(part)
        values |= {name: given[name] for name, known in options_of(type(part)).items() if known["resume"] != "free"}
    return values


def as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as they come out of a JSON file."""
    content: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return content


def check_changes(
    checkpoint: str | Path,
    begun: Mapping[str, Any],
    values: Mapping[str, Any],
    options: Mapping[str, Mapping[str, Any]],
    is_accepted: bool,
) -> list[str]:
    """Compare conditions with those of a checkpoint, as far as both have them.

    Args:
        checkpoint: The checkpoint, for messages.
        begun: Conditions that its training run was started with.
        values: Conditions now: options, or facts about the data.
        options: Metadata of all options by name.
        is_accepted: Whether they may differ.

    Returns:
        The differences.

    Raises:
        ValueError: if something differs that is not accepted, or that the saved optimizer depends on.
    """
    if not begun and not is_accepted:
        raise ValueError(
            f"{checkpoint} has no conditions.json, which holds the options and data of its training run. If they are "
            "still the same, resume with --resume_with_changes true."
        )
    changed = {name: value for name, value in values.items() if name in begun and begun[name] != value}
    differences = [f"{name}: {shown(begun[name])} then, {shown(value)} now" for name, value in changed.items()]
    advice = f"or start another training elsewhere, from its weights with --model_name_or_path {checkpoint}"
    if differences and not is_accepted:
        raise ValueError(
            f"The training of {checkpoint} was started with other conditions ({'; '.join(differences)}). Resume it as "
            f"it was started, accept the changes with --resume_with_changes true, {advice}."
        )
    if fixed := sorted(name for name in changed if name in options and options[name]["resume"] == "fixed"):
        raise ValueError(
            f"The optimizer of {checkpoint} is of a training with other conditions ({'; '.join(differences)}), and "
            f"does not fit another {' or '.join(fixed)}. Resume without that change, {advice}."
        )
    return differences


def shown(value: Any) -> str:
    """Return a value for a message, which is not to be long."""
    text = str(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


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
