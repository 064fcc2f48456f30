"""What a full disk leads to while a checkpoint is written, said in one line."""

import shutil
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError

from .checkpoints import find_fault, last_checkpoint
from .stops import CheckpointError, how_to_go_on


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Removes a checkpoint that cannot be written, and says what is missing and what is safe.

    Args:
        folder: Where it is written.

    Raises:
        CheckpointError: if writing fails before the checkpoint is complete.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        # What follows the last file is about another thing, as is a RuntimeError of others than torch's writer.
        if (isinstance(error, RuntimeError) and not is_of_writer(error)) or find_fault(folder) is None:
            raise
        written = size_of(folder)
        shutil.rmtree(folder, ignore_errors=True)
        raise CheckpointError(
            f"{folder} could not be written ({reason_of(error)}) and was removed. {describe_room(folder, written)} "
            f"{how_to_go_on(folder.parent)}"
        ) from error


def is_of_writer(error: RuntimeError) -> bool:
    """Tells whether an error comes from `torch.save`, which has no kind of its own for files, nor one message."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(frame.f_code.co_filename == torch.serialization.__file__ for frame in frames)


def reason_of(error: Exception) -> str:
    """Returns the first line of what an error says."""
    return str(error).partition("\n")[0]


def describe_room(folder: Path, written: int) -> str:
    """Says how much room a checkpoint takes that could not be written, and how much there is.

    Args:
        folder: Where it was to be.
        written: How many bytes of it could be written.
    """
    last = last_checkpoint(folder.parent)
    needed = written if last is None else max(written, size_of(Path(last)))
    free = shutil.disk_usage(folder.parent).free
    takes = f"It takes {'more than ' if last is None else ''}{in_words(needed)}, and {in_words(free)} are free there"
    if free > needed:
        return f"{takes}: look for a quota or a limit on the size of files."
    return f"{takes}: make room for {in_words(needed - free)} more, or keep fewer with --save_total_limit."


def size_of(folder: Path) -> int:
    """Returns how many bytes the files of a folder have."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def in_words(size: int) -> str:
    """Returns a number of bytes as people write it."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size / 1000:.0f} kB"
