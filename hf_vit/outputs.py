"""Output folders and files: what a folder holds, and that no command writes over an input or a file of others."""

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum, auto
from hashlib import sha256
from itertools import count, filterfalse, takewhile
from pathlib import Path
from typing import NamedTuple

import psutil


LOCK_NAME = "training.lock"  # in the folder of a training that runs: host and process
SILENT_SECONDS = 300.0  # without a sign of life, after which a training that cannot be asked is taken for dead
RECORD = ".hf_vit_outputs"  # in each folder with outputs: a line "checksum  name" for each file, as of sha256sum


class FolderState(Enum):
    """What an output folder holds, or why it cannot hold anything."""

    UNWRITABLE = auto()
    FREE = auto()  # nothing, or an empty folder
    RUNNING = auto()  # a training of another process
    RESUMABLE = auto()  # checkpoints
    FINISHED = auto()  # a saved model, without checkpoints
    OTHER = auto()


class Judgment(NamedTuple):
    """The state of an output folder and, if a new training cannot write there, why."""

    state: FolderState
    reason: str = ""


def judge_folder(path: str | os.PathLike[str]) -> Judgment:
    """Judges whether a folder is free for a run, by a look; it leaves nothing there."""
    folder = Path(path)
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        fault = "not writable" if nearest.is_dir() else "no folder"
        reason = f"Nothing can be written to {folder} ({nearest} is {fault}). Choose another --output_dir."
        return Judgment(FolderState.UNWRITABLE, reason)
    if not folder.is_symlink() and not (folder.exists() and any(folder.iterdir())):
        return Judgment(FolderState.FREE)
    if running := _describe_running(folder / LOCK_NAME):
        return Judgment(FolderState.RUNNING, running)
    if any(folder.glob("checkpoint-*/")):
        advice = "Resume it with --resume_from_checkpoint last, or choose another --output_dir."
        return Judgment(FolderState.RESUMABLE, f"{folder} already holds a training. {advice}")
    return Judgment(FolderState.FINISHED if (folder / "model.safetensors").is_file() else FolderState.OTHER)


def check_writable(folder: str | os.PathLike[str]) -> None:
    """Raises `OSError` unless files can be written to a folder, or to a new one in its place."""
    state, reason = judge_folder(folder)
    if state is FolderState.UNWRITABLE:
        raise OSError(reason)


def check_new_folder(path: str | os.PathLike[str]) -> None:
    """Raise an error unless `path` can become a new folder: `OSError` if it cannot be written, else `ValueError`."""
    check_writable(path)
    if judge_folder(path).state is not FolderState.FREE:
        raise ValueError(f"{str(path)!r} exists and is not empty, or is a link. Give a new folder.")


@contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a folder to write into, which becomes `path` at the end; an error removes all of it."""
    check_new_folder(path)
    folder = Path(path).resolve()
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    made = [parent for parent in unfinished.parents if not parent.exists()]
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        unfinished.replace(folder)
    except BaseException:
        shutil.rmtree(unfinished)
        for parent in made:
            parent.rmdir()
        raise


def free_folder(path: str | os.PathLike[str]) -> Path:
    """Returns `path` if it is free, else the first free one of `path`-2, `path`-3 and so on. It makes none."""
    return next(filterfalse(_is_taken, _numbered_folders(Path(path))))


def last_folder(path: str | os.PathLike[str]) -> Path:
    """Returns the folder that `free_folder` gave out last, as far as anything was written there, or `path`."""
    return [Path(path), *takewhile(_is_taken, _numbered_folders(Path(path)))][-1]


def _numbered_folders(wanted: Path) -> Iterator[Path]:
    yield wanted
    yield from (wanted.with_name(f"{wanted.name}-{number}") for number in count(2))


def _is_taken(folder: Path) -> bool:
    return os.path.lexists(folder) and judge_folder(folder).state is not FolderState.FREE


def seconds_untouched(file: Path) -> float:
    """Returns the age of a file by the clock of the disk that it is on, which may be another host's."""
    with tempfile.NamedTemporaryFile(dir=file.parent) as now:
        return os.stat(now.name).st_mtime - file.stat().st_mtime


def _describe_running(lock: Path) -> str | None:
    """Returns which other process trains in the folder of a lock; None if it is gone, or silent on another host."""
    try:
        holder = json.loads(lock.read_text(encoding="utf-8"))
        host, process, started = holder["host"], holder["process"], holder["started"]
        silence = seconds_untouched(lock)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        host, process, silence = "an unknown host", "unknown", seconds_untouched(lock)
    if host == socket.gethostname():
        with suppress(psutil.NoSuchProcess):
            if process != os.getpid() and psutil.Process(process).create_time() == started:  # not another one by now
                return (
                    f"A training runs in {lock.parent}, as process {process}. Wait for its end, or choose another "
                    "--output_dir."
                )
    elif silence < SILENT_SECONDS:
        return (
            f"A training runs in {lock.parent} on {host}, as process {process}, by its last sign of life "
            f"{max(silence, 0):.0f} seconds ago. If it has ended, delete {lock} or try again when that is "
            f"{SILENT_SECONDS:.0f} seconds ago; else choose another --output_dir."
        )
    return None


def check_outputs(planned: Iterable[Path], inputs: Iterable[Path] = (), overwrite: bool = False) -> None:
    """Raises `ValueError` if any of the files that a command plans to write must stay, before it does any work.

    With `overwrite`, files of an earlier run may be replaced. They are recognized by their checksum in `RECORD`.
    """
    read, seen = {file.resolve() for file in inputs}, set[Path]()
    for file in planned:
        if (place := file.resolve()) in seen:
            raise ValueError(f"{file} would be written twice. Choose another output file or folder.")
        seen.add(place)
        if place in read:
            raise ValueError(f"{file} is an input and would be overwritten. Choose another output file or folder.")
        if os.path.lexists(file) and not _is_recorded(file):
            raise ValueError(
                f"{file} exists and was not written by this command, or was changed since. Choose another output file "
                "or folder."
            )
        if os.path.lexists(file) and not overwrite:
            raise ValueError(f"{file} exists, from an earlier run. Replace it with --overwrite, or choose another.")


def record_outputs(files: Iterable[Path]) -> None:
    """Notes the checksums of files that were just written, so that a later run may replace them on request."""
    for file in files:
        with (file.parent / RECORD).open("a", encoding="utf-8") as record:
            record.write(f"{sha256(file.read_bytes()).hexdigest()}  {file.name}\n")


def _is_recorded(file: Path) -> bool:
    record = file.parent / RECORD
    if file.is_symlink() or not file.is_file() or not record.is_file():
        return False
    return f"{sha256(file.read_bytes()).hexdigest()}  {file.name}" in record.read_text(encoding="utf-8").splitlines()
