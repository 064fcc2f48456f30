"""Options and data of a training run, stored in its checkpoints and compared on resume."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import TrainingArguments
from transformers.utils import logging

from ..data.datasets import TargetData
from ..data.fingerprint import digest_files, fingerprint
from ..options.library import options_of
from ..options.training_arguments import HfViTTrainingArguments
from ..tasks.base import Task
from ..training.checkpoints import read_conditions, read_state
from .build import Run


logger = logging.get_logger(__name__)
MAX_VALUE_LENGTH = 60  # maximum number of characters of a value in a message
TRAINED_ON = ("train", "validation")  # splits that affect the model ("validation" is used to choose the best step)


def describe_arguments(task: Task, args: HfViTTrainingArguments) -> dict[str, Any]:
    """Return the global batch size and all options that must be the same in a resumed run, as JSON values."""
    values: dict[str, Any] = {}
    for part in (args, *vars(task).values()):
        given = part.to_dict() if isinstance(part, TrainingArguments) else asdict(part)
        values |= {name: given[name] for name, known in options_of(type(part)).items() if known["resume"] != "free"}
    values["images of a step"] = args.images_per_step
    content: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return content


def describe_data(data: TargetData, sources: Sequence[str]) -> dict[str, Any]:
    """Return fingerprints of the images and targets that a training run reads."""
    found = {
        f"{kind} of {split}": value
        for split in TRAINED_ON
        if split in data.splits
        for kind, value in fingerprint(data.splits[split]).items()
    }
    if data.stream is not None:
        found["files of the stream"] = digest_files([source for source in sources if Path(source).exists()])
    return found


def find_changes(
    task: Task, args: HfViTTrainingArguments, values: Mapping[str, Any], checkpoint: str | Path
) -> list[str]:
    """Compare the options and data of a run with those of a checkpoint. Names that occur in only one are ignored.

    Args:
        task: Specification of the run to resume.
        args: Training arguments.
        values: Current conditions: options, or facts about the data.
        checkpoint: Folder of the checkpoint.

    Returns:
        Descriptions of the differences.

    Raises:
        ValueError: if there are differences that `resume_with_changes` does not accept, or an option differs that the
            saved optimizer depends on.
    """
    begun, is_accepted = read_conditions(checkpoint).get("values", {}), args.resume_with_changes
    if not begun and not is_accepted:
        raise ValueError(
            f"{checkpoint} has no conditions.json, which describes the options and data of its training run. If they "
            "have not changed, resume with --resume_with_changes true."
        )
    changed = {name: value for name, value in values.items() if name in begun and begun[name] != value}
    differences = [
        f"{name}: {format_value(begun[name])} then, {format_value(value)} now" for name, value in changed.items()
    ]
    advice = f"or start a new run in another folder from its weights with --model_name_or_path {checkpoint}"
    if differences and not is_accepted:
        raise ValueError(
            f"The training run of {checkpoint} was started with other conditions ({'; '.join(differences)}). Resume "
            f"with the original conditions, accept the changes with --resume_with_changes true, {advice}."
        )
    options = options_of(*task.argument_types())
    if fixed := sorted(name for name in changed if name in options and options[name]["resume"] == "fixed"):
        raise ValueError(
            f"The training run of {checkpoint} was started with other conditions ({'; '.join(differences)}), and its "
            f"optimizer does not support a change of {' or '.join(fixed)}. Resume without this change, {advice}."
        )
    return differences


def format_value(value: Any) -> str:
    """Format a value for a message, truncated to 60 characters."""
    text = str(value)
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[:MAX_VALUE_LENGTH]}…"


def find_conditions(run: Run, values: Mapping[str, Any], checkpoint: str | None) -> dict[str, Any]:
    """Return the training conditions (options and data) to store in checkpoints, and their changes since the start.

    Args:
        run: The run.
        values: Output of `describe_arguments`.
        checkpoint: Folder of the checkpoint to resume from, if any.

    Raises:
        ValueError: see `find_changes`.
    """
    values = {**values, **describe_data(run.data, run.task.options.sources)}
    if checkpoint is None:
        return {"values": values, "changes": []}
    changes = list(read_conditions(checkpoint).get("changes", []))
    if differences := "; ".join(find_changes(run.task, run.args, values, checkpoint)):
        logger.warning(f"The training run of {checkpoint} resumes with changes: {differences}.")
        changes.append(f"from step {read_state(checkpoint)['global_step']} on: {differences}")
    return {"values": values, "changes": changes}
