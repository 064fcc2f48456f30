"""Complete, check, find and delete the checkpoints of a training run."""

import hashlib
import json
import os
import re
import shutil
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch.serialization import register_package
from transformers.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    logging,
)

from ..outputs import flush_folder, write_atomically


logger = logging.get_logger(__name__)
CONDITIONS = "conditions.json"  # file with the training options and data of the run, written before all other files
CHECKSUMS = "SHA256SUMS"
THREADS = 4  # number of threads that read files in parallel


def restore_on_cpu(storage: Any, location: str) -> Any:
    """Load tensors saved with the device name "cpu:0", which Accelerate uses in multi-process runs on a CPU."""
    return storage if location == "cpu:0" else None


# transformers 5.17 loads the optimizer state of multi-process CPU runs to "cpu:0", which torch 2.9 does not support.
register_package(100, lambda storage: None, restore_on_cpu)


def checkpoints_in(output_dir: str | os.PathLike[str]) -> dict[int, Path]:
    """Return the checkpoints in an output folder by step in ascending order, including incomplete ones."""
    found = {
        int(match[1]): folder
        for folder in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if (match := re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", folder.name)) and folder.is_dir()
    }
    return dict(sorted(found.items()))


def last_checkpoint(output_dir: str | os.PathLike[str], *, reads_all: bool = True) -> str | None:
    """Return the newest complete checkpoint, for `trainer.train(resume_from_checkpoint=last_checkpoint(output_dir))`.

    Incomplete or corrupt checkpoints are skipped with a warning. They occur, for example, if a run is killed while it
    saves a checkpoint, or after a power failure.

    Args:
        output_dir: Output folder of the training run. It may not exist yet.
        reads_all: Whether to verify the checksums of all files. If False, only missing and truncated files are found.

    Returns:
        The complete folder `checkpoint-N` with the largest N, or None if there is none.
    """
    for folder in reversed(checkpoints_in(output_dir).values()):
        fault = find_resume_error(folder) if reads_all else find_incomplete(folder)
        if fault is None:
            return str(folder)
        logger.warning(f"Skipping the incomplete checkpoint {folder}: {fault}.")
    return None


def resolve_checkpoint(wanted: str | bool | None, output_dir: str) -> Path | None:
    """Return the checkpoint that `Trainer.train` resumes from, or None to start from scratch.

    Args:
        wanted: Value of `resume_from_checkpoint`: True or "last" for the newest checkpoint, a folder, or None.
        output_dir: Output folder of the training run.
    """
    if wanted in (True, "last"):
        newest = last_checkpoint(output_dir)
        if newest is None:
            raise ValueError(f"{output_dir} contains no complete checkpoint. Remove resume_from_checkpoint.")
        return Path(newest)
    if not isinstance(wanted, str | os.PathLike):
        return None
    if (fault := find_resume_error(Path(wanted))) is not None:
        raise ValueError(
            f"Cannot resume from {wanted}: {fault}. Use --resume_from_checkpoint last for the newest checkpoint."
        )
    return Path(wanted)


def complete(checkpoint: Path) -> None:
    """Write the checksums of a checkpoint once all processes have saved; raise `OSError` if a file is truncated."""
    # Look for truncated files, because torch does not raise an error if it cannot write the last bytes of a file.
    if damage := find_damage(checkpoint):
        raise OSError(damage)
    write_checksums(checkpoint)


def delete_older(checkpoint: Path, limit: int | None, best: str | None) -> None:
    """Delete the oldest checkpoints, so that at most `limit` remain, including `checkpoint` and the best one.

    Checkpoints of later steps, left by a run that was resumed from an earlier step, are ignored.
    """
    if limit is None or limit < 1:
        return
    found = checkpoints_in(checkpoint.parent)
    older = [folder for step, folder in found.items() if step < int(checkpoint.name.rpartition("-")[2])]
    spare = [folder for folder in older if best is None or folder.name != Path(best).name]
    for folder in spare[: max(0, len(older) + 1 - limit)]:
        shutil.rmtree(folder, ignore_errors=True)


def missing_weights(folder: Path) -> list[str]:
    """List the missing weight files of a saved model: the single file, or the shards listed in its index."""
    is_adapter = (folder / ADAPTER_CONFIG_NAME).is_file()  # checkpoints of adapted models contain only adapter weights
    weights, index = {ADAPTER_SAFE_WEIGHTS_NAME if is_adapter else SAFE_WEIGHTS_NAME}, folder / SAFE_WEIGHTS_INDEX_NAME
    if index.is_file():
        try:
            weights = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            return [f"readable {SAFE_WEIGHTS_INDEX_NAME}"]
    return sorted(name for name in weights if not (folder / name).is_file())


def find_resume_error(checkpoint: Path) -> str | None:
    """Verify all checksums of a checkpoint. Return the reason why a run cannot resume from it, None if it can."""
    return find_incomplete(checkpoint) or find_mismatch(checkpoint)


def find_load_error(checkpoint: Path) -> str | None:
    """Return why the model of a checkpoint cannot be loaded, None if it can. The optimizer file is not required."""
    if not checkpoint.is_dir():
        return "the folder does not exist"
    return find_mismatch(checkpoint) or find_damage(checkpoint)


def find_incomplete(checkpoint: Path) -> str | None:
    """Return the reason why a run cannot resume from a checkpoint, None if it can. Checksums are not verified."""
    try:
        names = read_checksums(checkpoint)
    except FileNotFoundError:
        return f"it has no {CHECKSUMS}"  # the checkpoint is incomplete: checksums are written last
    except (OSError, ValueError) as error:
        return str(error)
    missing = [name for name in names if not (checkpoint / name).is_file()]
    if not any(name.startswith("optimizer") for name in names):  # FSDP uses different file names
        missing.append(OPTIMIZER_NAME)
    return f"it has no {' and no '.join(missing)}" if missing else find_damage(checkpoint)


def find_damage(checkpoint: Path) -> str | None:
    """Describe the truncated files of a checkpoint, without reading whole files; return None if there are none."""
    cut_off = [file.name for file in sorted(checkpoint.glob("*.safetensors")) if not is_complete_safetensors(file)]
    # A zip file ends with its table of contents, so a truncated file is not a valid zip file.
    archives = [file for suffix in ("pt", "pth", "bin") for file in checkpoint.glob(f"*.{suffix}")]
    cut_off += [file.name for file in sorted(archives) if not zipfile.is_zipfile(file)]
    return f"truncated files: {', '.join(cut_off)}" if cut_off else None


def is_complete_safetensors(weights: Path) -> bool:
    """Return whether a safetensors file has the length given in its header. The check is done by `safe_open`."""
    try:
        with safe_open(weights, framework="pt"):
            return True
    except (OSError, SafetensorError):
        return False


def read_conditions(checkpoint: str | Path) -> dict[str, Any]:
    """Return the training conditions stored in a checkpoint, or an empty dictionary for older checkpoints."""
    file = Path(checkpoint) / CONDITIONS
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def read_state(checkpoint: str | Path) -> dict[str, Any]:
    """Return the content of trainer_state.json of a checkpoint."""
    return dict(json.loads((Path(checkpoint) / TRAINER_STATE_NAME).read_text(encoding="utf-8")))


def stopped_early_at(state: dict[str, Any]) -> int | None:
    """Return the step at which early stopping ended a run, given its trainer state; None if it did not stop early."""
    stopping = state.get("stateful_callbacks", {}).get("EarlyStoppingCallback")
    if stopping is None:
        return None
    counter = stopping["attributes"]["early_stopping_patience_counter"]
    return int(state["global_step"]) if counter >= stopping["args"]["early_stopping_patience"] else None


def write_checksums(folder: Path) -> None:
    """Flush all files of a folder to disk, and then write their checksums to SHA256SUMS."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file != folder / CHECKSUMS)
    with ThreadPoolExecutor(THREADS) as threads:
        sums = list(threads.map(_flushed_checksum, files))
    for place in {folder.parent, *(path.parent for path in folder.rglob("*"))}:
        flush_folder(place)
    lines = [f"{checksum}  {file.relative_to(folder).as_posix()}" for checksum, file in zip(sums, files, strict=True)]
    # The first line contains the number of files, so that missing lines are noticed. sha256sum ignores this line.
    write_atomically(folder / CHECKSUMS, "\n".join([f"# {len(files)} files", *lines, ""]))


def read_checksums(folder: Path) -> dict[str, str]:
    """Return the checksums in SHA256SUMS of a folder by file name; raise `ValueError` if the file is damaged."""
    # Split at "\n" only: `splitlines` also splits at other characters, which would hide damaged lines.
    first, *lines = (folder / CHECKSUMS).read_text(encoding="utf-8", errors="replace").removesuffix("\n").split("\n")
    matches = [match for line in lines if (match := re.fullmatch(r"([0-9a-f]{64})  (.+)", line))]
    if first != f"# {len(matches)} files" or len(matches) < len(lines):
        raise ValueError(f"{CHECKSUMS} is damaged")
    return {match[2]: match[1] for match in matches}


def find_mismatch(folder: Path) -> str | None:
    """Describe the files of a folder that do not match SHA256SUMS; None if all match or SHA256SUMS does not exist."""
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
    return f"the checksums in {CHECKSUMS} do not match {', '.join(changed)}" if changed else None


def _checksum(file: Path) -> str | None:
    """Return the checksum of a file, or None if it is missing or unreadable."""
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError:
        return None


def _flushed_checksum(file: Path) -> str:
    with file.open("rb+") as stream:  # opened for writing, because fsync requires write access on some systems
        os.fsync(stream.fileno())
        return hashlib.file_digest(stream, "sha256").hexdigest()
