"""Checkpoints of a training run: how they are completed, checked, found and deleted."""

import hashlib
import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError, safe_open
from torch.serialization import register_package
from transformers import TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    logging,
)


logger = logging.get_logger(__name__)
T = TypeVar("T")
CONDITIONS = "conditions.json"  # of a training, the first file of a checkpoint
CHECKSUMS = "SHA256SUMS"
THREADS = 4  # that read files at a time


def restore_on_cpu(storage: Any, location: str) -> Any:
    """Opens tensors of a CPU by the name that several processes have for it."""
    return storage if location == "cpu:0" else None


# transformers 5.17 opens the optimizer of several processes on a CPU there, which is no place that torch 2.9 knows.
register_package(100, lambda storage: None, restore_on_cpu)


def on_first_process(args: TrainingArguments, work: Callable[[], T]) -> T:
    """Does work on the first process; returns on all of them what came of it, or raises its error for users."""
    outcome: list[Any] = [None, None]
    if args.process_index == 0:
        try:
            outcome[0] = work()
        except (ValueError, OSError) as error:
            outcome[1] = error
    broadcast_object_list(outcome)
    result, raised = outcome
    if raised is not None:
        raise raised
    return result


def checkpoints_in(output_dir: str | os.PathLike[str]) -> dict[int, Path]:
    """Returns the checkpoints of a training, whole or not, by their step, the first ones first."""
    found = {
        int(match[1]): folder
        for folder in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if (match := re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", folder.name)) and folder.is_dir()
    }
    return dict(sorted(found.items()))


def last_checkpoint(output_dir: str | os.PathLike[str], *, reads_all: bool = True) -> str | None:
    """Finds the newest complete checkpoint, for `trainer.train(resume_from_checkpoint=last_checkpoint(output_dir))`.

    A training that is killed while it saves leaves half a checkpoint behind, and a machine that loses its power may
    leave files with other bytes in them; those checkpoints are skipped with a warning.

    Args:
        output_dir: Folder of the training, which need not exist yet.
        reads_all: Whether all files are compared with their checksums, and not only looked at.

    Returns:
        The folder `checkpoint-N` with the largest N that is complete, or None for a training from scratch.
    """
    for folder in reversed(checkpoints_in(output_dir).values()):
        fault = find_fault(folder) if reads_all else find_gap(folder)
        if fault is None:
            return str(folder)
        logger.warning(f"Skipping the incomplete checkpoint {folder}: {fault}.")
    return None


def chosen_checkpoint(wanted: str | bool | None, output_dir: str) -> Path | None:
    """Return the checkpoint that `Trainer.train` resumes from: True or "last" for the newest one, a folder, or none."""
    if wanted in (True, "last"):
        newest = last_checkpoint(output_dir)
        if newest is None:
            raise ValueError(f"{output_dir} holds no complete checkpoint. Leave resume_from_checkpoint out.")
        return Path(newest)
    if not isinstance(wanted, str | os.PathLike):
        return None
    if (fault := find_fault(Path(wanted))) is not None:
        raise ValueError(f"{wanted} cannot be resumed from: {fault}. --resume_from_checkpoint last finds the newest.")
    return Path(wanted)


def complete(checkpoint: Path) -> None:
    """Writes the checksums of a checkpoint, which all processes have written; `OSError` if a file is cut off."""
    # The last bytes of a small file are written as it is closed, where torch hears of no error.
    if damage := find_damage(checkpoint):
        raise OSError(damage)
    seal(checkpoint)


def delete_older(checkpoint: Path, limit: int | None, best: str | None) -> None:
    """Deletes checkpoints of earlier steps, the first ones first, until `limit` are left with this one and the best.

    Those of later steps, from which a training was not resumed, are neither counted nor deleted.
    """
    if limit is None or limit < 1:
        return
    found = checkpoints_in(checkpoint.parent)
    older = [folder for step, folder in found.items() if step < int(checkpoint.name.rpartition("-")[2])]
    spare = [folder for folder in older if best is None or folder.name != Path(best).name]
    for folder in spare[: max(0, len(older) + 1 - limit)]:
        shutil.rmtree(folder, ignore_errors=True)


def missing_weights(folder: Path) -> list[str]:
    """Lists the files of weights, one or the shards that an index names, that a saved model lacks."""
    is_adapter = (folder / ADAPTER_CONFIG_NAME).is_file()  # alone, in a checkpoint
    weights, index = {ADAPTER_SAFE_WEIGHTS_NAME if is_adapter else SAFE_WEIGHTS_NAME}, folder / SAFE_WEIGHTS_INDEX_NAME
    if index.is_file():
        try:
            weights = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            return [f"{SAFE_WEIGHTS_INDEX_NAME} that can be read"]
    return sorted(name for name in weights if not (folder / name).is_file())


def find_fault(checkpoint: Path) -> str | None:
    """Returns why a training cannot resume from a checkpoint, whose files it reads, or None if it is whole."""
    return find_gap(checkpoint) or find_mismatch(checkpoint)


def find_loss(checkpoint: Path) -> str | None:
    """Returns why the model of a checkpoint cannot be loaded, be it from a training that can resume there or not."""
    if not checkpoint.is_dir():
        return "there is no such folder"
    return find_mismatch(checkpoint) or find_damage(checkpoint)


def find_gap(checkpoint: Path) -> str | None:
    """Returns what a checkpoint lacks for a training to resume from it, as far as that can be told by a look."""
    try:
        names = read_checksums(checkpoint)
    except FileNotFoundError:
        return f"it has no {CHECKSUMS}"  # which is written last
    except (OSError, ValueError) as error:
        return str(error)
    missing = [name for name in names if not (checkpoint / name).is_file()]
    if not any(name.startswith("optimizer") for name in names):  # of one process, or under FSDP
        missing.append(OPTIMIZER_NAME)
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


def read_conditions(checkpoint: str | Path) -> dict[str, Any]:
    """Returns the conditions of the training of a checkpoint, empty if it is older than they are."""
    file = Path(checkpoint) / CONDITIONS
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def read_state(checkpoint: str | Path) -> dict[str, Any]:
    """Returns the state of the library's Trainer in a checkpoint."""
    return dict(json.loads((Path(checkpoint) / TRAINER_STATE_NAME).read_text(encoding="utf-8")))


def stopped_early_at(state: dict[str, Any]) -> int | None:
    """Returns the step at which early stopping has ended the training of a state, or None if it has not."""
    stopping = state.get("stateful_callbacks", {}).get("EarlyStoppingCallback")
    if stopping is None:
        return None
    counter = stopping["attributes"]["early_stopping_patience_counter"]
    return int(state["global_step"]) if counter >= stopping["args"]["early_stopping_patience"] else None


def seal(folder: Path) -> None:
    """Brings all files of a folder to the disk, and then SHA256SUMS with a line for each of them."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file != folder / CHECKSUMS)
    with ThreadPoolExecutor(THREADS) as threads:
        sums = list(threads.map(_flushed_checksum, files))
    for place in {folder.parent, *(path.parent for path in folder.rglob("*"))}:
        flush_folder(place)
    lines = [f"{checksum}  {file.relative_to(folder).as_posix()}" for checksum, file in zip(sums, files, strict=True)]
    # The number tells of lines that are lost, and is a comment to sha256sum.
    write_whole(folder / CHECKSUMS, "\n".join([f"# {len(files)} files", *lines, ""]))


def read_checksums(folder: Path) -> dict[str, str]:
    """Returns the checksums in a folder's SHA256SUMS by the names of files; `ValueError` if lines are damaged."""
    # Only "\n" ends a line here: `splitlines` would take a damaged one for whole.
    first, *lines = (folder / CHECKSUMS).read_text(encoding="utf-8", errors="replace").removesuffix("\n").split("\n")
    matches = [match for line in lines if (match := re.fullmatch(r"([0-9a-f]{64})  (.+)", line))]
    if first != f"# {len(matches)} files" or len(matches) < len(lines):
        raise ValueError(f"{CHECKSUMS} cannot be read")
    return {match[2]: match[1] for match in matches}


def find_mismatch(folder: Path) -> str | None:
    """Returns which files of a folder are not as its SHA256SUMS has them, or None; without that file nothing is."""
    if not (folder / CHECKSUMS).is_file():
        return None
    try:
        expected = read_checksums(folder)
    except ValueError as error:
        return str(error)
    with ThreadPoolExecutor(THREADS) as threads:
        actual = threads.map(_checksum, [folder / name for name in expected])
        found = dict(zip(expected, actual, strict=True))
    missing = [name for name, checksum in found.items() if checksum is None]
    changed = [name for name in expected if name not in missing and found[name] != expected[name]]
    if missing:
        return f"it has no {' and no '.join(missing)}"
    return f"{CHECKSUMS} has other checksums for {', '.join(changed)}" if changed else None


def _checksum(file: Path) -> str | None:
    """Returns the checksum of a file, None if there is none or the disk cannot read it."""
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError:
        return None


def _flushed_checksum(file: Path) -> str:
    with file.open("rb+") as stream:  # which some systems want for flushing
        os.fsync(stream.fileno())
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_whole(file: Path, text: str) -> None:
    """Writes a text file so that, whenever the machine fails, the old content or all of the new one stands there."""
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with unfinished.open("w", encoding="utf-8", newline="") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)
    flush_folder(file.parent)


def flush_folder(folder: Path) -> None:
    """Brings the names in a folder to the disk, where the system can."""
    if os.name == "posix":  # elsewhere folders cannot be opened
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
