"""What the course of a training hangs on: arguments, batch and data, as checkpoints hold it, and what has changed."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from ..data.fingerprint import file_list, fingerprint
from ..options.library import options_of
from .arguments import StreamArguments, split_sources
from .saving.checkpoints import CONDITIONS, read_conditions
from .tasks import TASKS
from .tasks.base import Task


TRAINED_ON = ("train", "validation")  # the latter chooses the best model, and when to stop
MOST_SHOWN = 60  # letters of a value


def describe_arguments(task: Task) -> dict[str, Any]:
    """Returns all arguments of a training that its course hangs on, given or by default, and its global batch."""
    values: dict[str, Any] = {}
    for part in (vars(task)[name] for name in task.fields()):
        given = part.to_dict() if isinstance(part, TrainingArguments) else asdict(part)
        values |= {name: given[name] for name, known in options_of(type(part)).items() if known["resume"] != "free"}
    args = task.args
    batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    return as_json({**values, "images of a step": batch})


def describe_data(task: Task) -> dict[str, Any]:
    """Returns what tells the images that a training reads, and their targets, from any others."""
    sources = split_sources(task.data.dataset_name)
    found = {
        f"{kind} of {split}": value
        for split in TRAINED_ON
        if split in task.loaded.splits
        for kind, value in fingerprint(task.loaded.splits[split], sources).items()
    }
    if isinstance(task.data, StreamArguments) and task.data.streaming:
        local = [source for source in sources if Path(source).exists()]
        found["files of the stream"] = file_list(local)
    return found


def as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values as they come out of a file of JSON."""
    content: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return content


def check_changes(checkpoint: str | Path, values: Mapping[str, Any], is_accepted: bool) -> list[str]:
    """Compares conditions with those of a checkpoint, as far as both have them.

    Args:
        checkpoint: Whose training resumes.
        values: Arguments or data, as now.
        is_accepted: Whether they may differ.

    Returns:
        What differs.

    Raises:
        ValueError: if something differs that is not accepted, or with which no checkpoint of the other fits.
    """
    begun = read_conditions(checkpoint).get("values", {})
    if not begun and not is_accepted:
        raise ValueError(
            f"{checkpoint} has no {CONDITIONS}, which holds the options and data of its training run. If they are "
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
    options = options_of(*(kind for task in TASKS.values() for kind in task.argument_types()))
    if fixed := sorted(name for name in changed if name in options and options[name]["resume"] == "fixed"):
        raise ValueError(
            f"The optimizer of {checkpoint} is of a training with other conditions ({'; '.join(differences)}), and "
            f"does not fit another {' or '.join(fixed)}. Resume without that change, {advice}."
        )
    return differences


def shown(value: Any) -> str:
    """Returns a value for a message, which is not to be long."""
    text = str(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


def with_changes(values: Mapping[str, Any], checkpoint: str | Path | None, differences: list[str]) -> dict[str, Any]:
    """Returns the conditions of a training, as its checkpoints hold them, with all changes since it was started."""
    if checkpoint is None:
        return {"values": dict(values), "changes": []}
    changes = list(read_conditions(checkpoint).get("changes", []))
    if differences:
        state = json.loads((Path(checkpoint) / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        changes.append(f"from step {state['global_step']} on: {'; '.join(differences)}")
    return {"values": dict(values), "changes": changes}
