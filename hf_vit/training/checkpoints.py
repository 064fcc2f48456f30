"""Finds the checkpoint that a training which was killed can resume from."""

import json
import os
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path

from accelerate.utils.constants import FSDP_MODEL_NAME
from accelerate.utils.constants import OPTIMIZER_NAME as FSDP_OPTIMIZER_NAME
from safetensors import SafetensorError, safe_open
from transformers import TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_SAFE_WEIGHTS_NAME,
    CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    logging,
)

from .callbacks.ema import AVERAGE_FOLDER


logger = logging.get_logger(__name__)

# What FSDP saves is one file, or a folder of parts and, written last, their table of contents.
FSDP_ENDINGS = (".bin", "_0/.metadata")


def last_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """Finds the newest complete checkpoint, for `trainer.train(resume_from_checkpoint=last_checkpoint(output_dir))`.

    A training that is killed while it saves leaves half a checkpoint behind; those are skipped with a warning.

    Args:
        output_dir: Folder of the training, which need not exist yet.

    Returns:
        The folder `checkpoint-N` with the largest N that is complete, or None for a training from scratch.
    """
    folders = {
        int(match[1]): folder
        for folder in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if (match := re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", folder.name)) and folder.is_dir()
    }
    for _, folder in sorted(folders.items(), reverse=True):
        fault = find_fault(folder)
        if fault is None:
            return str(folder)
        logger.warning(f"Skipping the incomplete checkpoint {folder}: {fault}.")
    return None


def missing_weights(folder: Path) -> list[str]:
    """Lists the files of weights, one or the shards that an index names, that a saved model lacks."""
    is_adapter = (folder / ADAPTER_CONFIG_NAME).is_file()  # alone, in a checkpoint
    weights, index = {ADAPTER_SAFE_WEIGHTS_NAME if is_adapter else SAFE_WEIGHTS_NAME}, folder / SAFE_WEIGHTS_INDEX_NAME
    if index.is_file():
        weights = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return sorted(name for name in weights if not (folder / name).is_file())


def missing_state(checkpoint: Path) -> list[str]:
    """Lists the files of weights and optimizer that a checkpoint lacks, which under FSDP are others."""
    for ending in FSDP_ENDINGS:
        if (checkpoint / f"{FSDP_OPTIMIZER_NAME}{ending}").is_file():
            weights = f"{FSDP_MODEL_NAME}{ending}"
            return [] if (checkpoint / weights).is_file() else [weights]
    return [*missing_weights(checkpoint), *([] if (checkpoint / OPTIMIZER_NAME).is_file() else [OPTIMIZER_NAME])]


def find_fault(checkpoint: Path) -> str | None:
    """Returns what a checkpoint lacks for a training to resume from it, or None if it is complete."""
    # The Trainer writes this file last: where it can be read, the others are whole.
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"it has no {TRAINER_STATE_NAME}, which is written last"
    except ValueError as error:
        return f"{TRAINER_STATE_NAME} cannot be read ({error})"
    missing = missing_state(checkpoint)
    missing += [] if (checkpoint / SCHEDULER_NAME).is_file() else [SCHEDULER_NAME]
    args_file = checkpoint / TRAINING_ARGS_JSON
    if args_file.is_file() and json.loads(args_file.read_text(encoding="utf-8")).get("ema_decay") is not None:
        missing += [f"{AVERAGE_FOLDER}/{name}" for name in missing_weights(checkpoint / AVERAGE_FOLDER)]
    if not any(checkpoint.glob("rng_state*.pth")):  # one file, or one for each process
        missing.append("rng_state.pth")
    return f"it has no {' and no '.join(missing)}" if missing else find_damage(checkpoint)


def find_damage(checkpoint: Path) -> str | None:
    """Returns which files of a checkpoint are cut off, as far as that can be told without reading them, or None."""
    cut_off = [file.name for file in sorted(checkpoint.glob("*.safetensors")) if not is_whole(file)]
    # The directory of a zip file is at its end.
    archives = [file for suffix in ("pt", "pth", "bin") for file in checkpoint.glob(f"*.{suffix}")]
    cut_off += [file.name for file in sorted(archives) if not zipfile.is_zipfile(file)]
    return f"cut off: {', '.join(cut_off)}" if cut_off else None


def is_whole(weights: Path) -> bool:
    """Returns whether a file of safetensors is as long as its header says, which opening it checks."""
    try:
        with safe_open(weights, framework="pt"):
            return True
    except (OSError, SafetensorError):
        return False


def checkpoint_to_resume(args: TrainingArguments) -> str | None:
    """Returns the checkpoint that a training starts from.

    Args:
        args: `resume_from_checkpoint` is "last" (or "true") for the newest complete checkpoint in `output_dir`, or the
            folder of a checkpoint; without it, `output_dir` must hold no earlier training.

    Returns:
        The folder, or None for a training from scratch, as "last" does too where there is no checkpoint yet.

    Raises:
        ValueError: if the folder is no complete checkpoint, or a new training would write over an earlier one.
    """
    wanted, output_dir = args.resume_from_checkpoint, Path(args.output_dir)
    if wanted is None:
        if any(output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*")) or (output_dir / SAFE_WEIGHTS_NAME).exists():
            raise ValueError(
                f"{output_dir} already holds a training. Resume it with --resume_from_checkpoint last, or choose "
                "another --output_dir."
            )
        return None
    if str(wanted).lower() in ("last", "true"):
        checkpoint = last_checkpoint(output_dir)
        if checkpoint is None:
            logger.warning(f"{output_dir} holds no complete checkpoint yet: the training starts from scratch.")
        return checkpoint
    if (fault := find_fault(Path(wanted))) is not None:
        raise ValueError(f"{wanted} cannot be resumed from: {fault}. --resume_from_checkpoint last finds the newest.")
    return str(wanted)


def stopped_early_at(checkpoint: str | os.PathLike[str]) -> int | None:
    """Returns the step at which early stopping has ended the training of a checkpoint, or None if it has not."""
    state = json.loads((Path(checkpoint) / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    stopping = state.get("stateful_callbacks", {}).get("EarlyStoppingCallback")
    if stopping is None:
        return None
    counter = stopping["attributes"]["early_stopping_patience_counter"]
    return int(state["global_step"]) if counter >= stopping["args"]["early_stopping_patience"] else None


def check_labels(checkpoint: str | os.PathLike[str], names: Sequence[str]) -> None:
    """Raises `ValueError` unless a checkpoint was trained on classes with these names, in this order."""
    config = json.loads((Path(checkpoint) / CONFIG_NAME).read_text(encoding="utf-8"))
    begun = [config["id2label"][str(index)] for index in range(len(config["id2label"]))]
    if begun != list(names):
        raise ValueError(
            f"The training of {checkpoint} was started with the classes {', '.join(begun)}, not {', '.join(names)}. "
            "Resume with the same data, or start another training in another --output_dir."
        )
