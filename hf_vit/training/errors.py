"""Errors that end a training run early. Their messages are one line long."""

import os
import re
import shutil
import traceback
from pathlib import Path

import torch
from transformers import TrainingArguments

from .checkpoints import find_incomplete, last_checkpoint


class Preempted(SystemExit):
    """Raised when a signal has ended a training run, after a checkpoint was saved.

    If the exception is not caught, the script exits with code 128 plus the signal number (143 for SIGTERM), as if the
    signal had killed the process. With exit code 0, SLURM, Kubernetes and `&&` would assume that training is complete.

    Args:
        number: Signal number.
        message: Message about the saved checkpoint and how to resume.
    """

    def __init__(self, number: int, message: str) -> None:
        super().__init__(128 + number)
        self.number = number
        self.message = message


class NotFiniteError(FloatingPointError):
    """The loss or weights of a training run are infinite or NaN."""


class CheckpointError(OSError):
    """A checkpoint could not be written."""


class ExampleError(OSError):
    """An example could not be read during training."""


def short_message(error: BaseException) -> str:
    """Return the message of an error without the traceback that a data loader worker adds to it."""
    message = str(error)
    if message.startswith("Caught ") and "\nOriginal Traceback" in message:
        return re.split(rf"\n(?:\w+\.)*{type(error).__name__}: ", message)[-1].strip()
    return message


def as_sentence(error: BaseException) -> str:
    """Return the message of an error with a period at the end."""
    return short_message(error).rstrip(".") + "."


def how_to_resume(output_dir: str | os.PathLike[str]) -> str:
    """Return a sentence that names the checkpoint from which a training run can resume, if there is one."""
    checkpoint = last_checkpoint(output_dir, reads_all=False)
    if checkpoint is None:
        return "There is no complete checkpoint yet. Restart with --resume_from_checkpoint last."
    return f"The last complete checkpoint is {checkpoint}. Resume from it with --resume_from_checkpoint last."


def not_finite_message(what: str, step: int, learning_rate: float, args: TrainingArguments) -> str:
    """Return the error message for a non-finite loss or weight, with remedies and the path of the last checkpoint."""
    checkpoint = last_checkpoint(args.output_dir, reads_all=False)
    left = "There is no complete checkpoint yet."
    if checkpoint is not None:
        left = (
            f"The last complete checkpoint is {checkpoint}. Resuming from it would fail at the same step. Start a new "
            f"run from its weights with --model_name_or_path {checkpoint}, or from scratch."
        )
    is_are = "loss is" if what == "loss" else "weights are"
    return (
        f"The {is_are} infinite or NaN after step {step}, at a learning rate of {learning_rate:.3g}. This step is not "
        "saved. Common remedies: a lower --learning_rate, more --warmup_steps, a lower --max_grad_norm, --bf16 "
        f"instead of --fp16. {left}"
    )


def checkpoint_error(folder: Path, error: Exception) -> CheckpointError | None:
    """Remove a checkpoint that could not be written, and return the error to raise.

    Returns None if the checkpoint is complete or the error has a different cause.
    """
    # torch.save raises RuntimeError with various messages if it cannot write a file. A RuntimeError raised elsewhere
    # is not a file error.
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_of_writer = any(frame.f_code.co_filename == torch.serialization.__file__ for frame in frames)
    if (isinstance(error, RuntimeError) and not is_of_writer) or find_incomplete(folder) is None:
        return None
    written = size_of(folder)
    shutil.rmtree(folder, ignore_errors=True)
    reason = str(error).partition("\n")[0]
    return CheckpointError(
        f"{folder} could not be written ({reason}) and was removed. {describe_disk_space(folder, written)} "
        f"{how_to_resume(folder.parent)}"
    )


def describe_disk_space(folder: Path, written: int) -> str:
    """Return a sentence about the free disk space and the size of a checkpoint that was cut off at `written` bytes."""
    last = last_checkpoint(folder.parent, reads_all=False)
    needed = written if last is None else max(written, size_of(Path(last)))
    free = shutil.disk_usage(folder.parent).free
    takes = (
        f"A checkpoint needs {'more than ' if last is None else ''}{format_bytes(needed)}, and "
        f"{format_bytes(free)} are free"
    )
    if free > needed:
        return f"{takes}. Check for a disk quota or a file size limit."
    return f"{takes}. Free {format_bytes(needed - free)} more, or keep fewer checkpoints with --save_total_limit."


def size_of(folder: Path) -> int:
    """Return the total size in bytes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def format_bytes(size: int) -> str:
    """Format a number of bytes with a unit, such as "1.5 GB"."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size / 1000:.0f} kB"
