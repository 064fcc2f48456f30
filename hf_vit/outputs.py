"""Check output folders and files, so that commands do not overwrite their inputs or files of other programs."""

import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from enum import Enum, auto
from hashlib import file_digest
from itertools import count, filterfalse, takewhile
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from uuid import uuid4

import psutil
from transformers.utils import logging


logger = logging.get_logger(__name__)
LOCK_NAME = "training.lock"  # lock file that contains host and process of a running training run
LOCK_TIMEOUT_SECONDS = 300.0  # age at which a lock file of another host is considered stale
AVERAGE_FOLDER = "ema"  # subfolder with the model that has the averaged weights
UNFINISHED = ".part"  # suffix of temporary files
STALE_SECONDS = 86400.0  # age at which a temporary file is considered left over
RECORD = ".hf_vit_outputs"  # file of checksums of written files, in the format of sha256sum


class FolderState(Enum):
    """State of an output folder."""

    UNWRITABLE = auto()
    FREE = auto()  # The folder does not exist or is empty.
    RUNNING = auto()  # Another process writes to the folder.
    RESUMABLE = auto()  # The folder contains checkpoints.
    FINISHED = auto()  # The folder contains a saved model and no checkpoints.
    OTHER = auto()


class Judgment(NamedTuple):
    """State of an output folder, with the reason if a new training run cannot write to the folder."""

    state: FolderState
    reason: str = ""


def find_folder_state(path: str | os.PathLike[str]) -> Judgment:
    """Return the state of an output folder, without writing to the folder."""
    folder = Path(path)
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        fault = "not writable" if nearest.is_dir() else "not a folder"
        reason = f"Nothing can be written to {folder} ({nearest} is {fault}). Choose another --output_dir."
        return Judgment(FolderState.UNWRITABLE, reason)
    if not folder.is_symlink() and not (folder.exists() and any(folder.iterdir())):
        return Judgment(FolderState.FREE)
    if running := _describe_running(folder / LOCK_NAME):
        return Judgment(FolderState.RUNNING, running)
    if any(folder.glob("checkpoint-*/")):
        advice = "Resume it with --resume_from_checkpoint last, or choose another --output_dir."
        return Judgment(FolderState.RESUMABLE, f"{folder} already contains a training run. {advice}")
    return Judgment(FolderState.FINISHED if (folder / "model.safetensors").is_file() else FolderState.OTHER)


def check_writable(folder: str | os.PathLike[str]) -> None:
    """Raise `OSError` unless a folder is writable or can be created."""
    state, reason = find_folder_state(folder)
    if state is FolderState.UNWRITABLE:
        raise OSError(reason)


def check_new_folder(path: str | os.PathLike[str]) -> None:
    """Raise `OSError` if `path` is not writable, and `ValueError` if it exists and is not an empty folder."""
    check_writable(path)
    if find_folder_state(path).state is not FolderState.FREE:
        raise ValueError(f"{str(path)!r} exists and is not empty, or is a link. Choose a new folder.")


@contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `path` on exit, or deleted if an error is raised."""
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
    """Return the first folder of `path`, `path`-2, `path`-3, … that does not exist or is empty. It is not created."""
    return next(filterfalse(_is_taken, _numbered_folders(Path(path))))


def last_folder(path: str | os.PathLike[str]) -> Path:
    """Return the folder before the first free one in `path`, `path`-2, `path`-3, …, or `path` if `path` is free."""
    return [Path(path), *takewhile(_is_taken, _numbered_folders(Path(path)))][-1]


def _numbered_folders(wanted: Path) -> Iterator[Path]:
    yield wanted
    yield from (wanted.with_name(f"{wanted.name}-{number}") for number in count(2))


def _is_taken(folder: Path) -> bool:
    return os.path.lexists(folder) and find_folder_state(folder).state is not FolderState.FREE


def file_age_seconds(file: Path) -> float:
    """Return the age of a file, measured with the clock of the file system, which may be on another host."""
    with tempfile.NamedTemporaryFile(dir=file.parent) as now:
        return os.stat(now.name).st_mtime - file.stat().st_mtime


def _describe_running(lock: Path) -> str | None:
    """Return a message if another process is training in the folder that contains a lock file, else None."""
    try:
        holder = json.loads(lock.read_text(encoding="utf-8"))
        host, process, started = holder["host"], holder["process"], holder["started"]
        silence = file_age_seconds(lock)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        host, process, silence = "an unknown host", "unknown", file_age_seconds(lock)
    if host == socket.gethostname():
        with suppress(psutil.NoSuchProcess):
            # The start time is compared too, because the id of an ended process may be reused.
            if process != os.getpid() and psutil.Process(process).create_time() == started:
                return (
                    f"A training run (process {process}) is using {lock.parent}. Wait until it ends, or choose "
                    "another --output_dir."
                )
    elif silence < LOCK_TIMEOUT_SECONDS:
        return (
            f"A training run (process {process} on {host}) is using {lock.parent}. Its lock file was updated "
            f"{max(silence, 0):.0f} seconds ago. If the run has ended, delete {lock}, or wait until the file is "
            f"{LOCK_TIMEOUT_SECONDS:.0f} seconds old. Otherwise choose another --output_dir."
        )
    return None


def check_outputs(planned: Iterable[Path], inputs: Iterable[Path] = (), overwrite: bool = False) -> None:
    """Raise `ValueError` if a planned output file would overwrite an input or another existing file.

    If `overwrite` is set, files of an earlier run are accepted if they match their checksums in `RECORD`.
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
            raise ValueError(f"{file} exists from an earlier run. Replace it with --overwrite, or choose a new file.")


def record_outputs(files: Iterable[Path]) -> None:
    """Store the checksums of written files in `RECORD`. A later run with `overwrite` may replace these files."""
    for file in files:
        _record(file, file.name)


def _record(file: Path, name: str) -> None:
    with (file.parent / RECORD).open("a", encoding="utf-8") as record:
        record.write(f"{_checksum(file)}  {name}\n")


def find_intact(folder: Path, names: Iterable[str]) -> set[str]:
    """Return those names of files in a folder whose content matches its checksum in `RECORD`."""
    record = folder / RECORD
    known = set(record.read_text(encoding="utf-8", errors="replace").splitlines()) if record.is_file() else set()
    files = [file for name in names if known and (file := folder / name).is_file()]
    with ThreadPoolExecutor() as threads:
        checksums = threads.map(_checksum, files)
        return {file.name for file, own in zip(files, checksums, strict=True) if f"{own}  {file.name}" in known}


def _is_recorded(file: Path) -> bool:
    return not file.is_symlink() and bool(find_intact(file.parent, [file.name]))


def _checksum(file: Path) -> str:
    with file.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()


@contextmanager
def replaced_file(file: Path) -> Iterator[Path]:
    """Yield a temporary file that only this process writes. On exit it replaces `file`, unless an error is raised."""
    unfinished = file.with_name(f".{file.name}.{uuid4().hex}{UNFINISHED}")
    try:
        yield unfinished
        os.replace(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def recorded_file(file: Path) -> Iterator[Path]:
    """Same as `replaced_file`, but also store the checksum in `RECORD`, and log a warning if `file` is damaged."""
    if file.is_file() and not _is_recorded(file):
        logger.warning("%s does not match its checksum in %s and is computed again.", file, RECORD)
    with replaced_file(file) as unfinished:
        yield unfinished
        _record(unfinished, file.name)


def remove_unfinished(folder: Path) -> None:
    """Remove the temporary files of processes that were killed more than `STALE_SECONDS` ago."""
    for file in folder.glob(f".*{UNFINISHED}"):
        if file_age_seconds(file) > STALE_SECONDS:
            file.unlink(missing_ok=True)


def write_atomically(file: Path, text: str) -> None:
    """Write a text file atomically: after a crash, the file has either the old or the complete new content."""
    with replaced_file(file) as unfinished, unfinished.open("w", encoding="utf-8", newline="") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    flush_folder(file.parent)


def flush_folder(folder: Path) -> None:
    """Flush the directory entries of a folder to disk, if the operating system supports it."""
    if os.name == "posix":  # Windows cannot open folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def file_name(source: str) -> str:
    """Return a file name for the outputs of a model or dataset, with the parent folder if its name is generic."""
    file = Path(source).expanduser()
    place = file.resolve() if file.exists() else PurePosixPath(source)  # a local path, or a name on the Hub
    is_part = place.name == AVERAGE_FOLDER or place.name.startswith("checkpoint-")
    return re.sub(r"[^\w.-]+", "-", "-".join(place.parts[-2:]) if is_part else place.name)
