"""Errors that end a training before its time, in one line each."""

import os
import re
import shutil
import traceback
from pathlib import Path

import torch
from transformers import TrainingArguments

from .checkpoints import find_gap, last_checkpoint


class Preempted(SystemExit):
    """A signal has ended a training, which a checkpoint holds; a script that does not catch it exits with its code.

    That is 128 and the number of the signal, 143 for SIGTERM, as of a process that the signal has killed. A code of 0
    would tell SLURM, Kubernetes and `&&` that the model is trained.

    Args:
        number: The signal.
        message: What has been done, and how to resume.
    """

    def __init__(self, number: int, message: str) -> None:
        super().__init__(128 + number)
        self.number = number
        self.message = message


class NotFiniteError(FloatingPointError):
    """The loss or the weights of a training are infinite or NaN."""


class NoUpdateError(ValueError):
    """No step of a training has changed the weights."""


class CheckpointError(OSError):
    """A checkpoint could not be written."""


class ExampleError(OSError):
    """An example could not be read in the middle of a training."""


def in_one_line(error: BaseException) -> str:
    """Returns the message of an error, without the traceback that a worker process of a loader puts into it."""
    message = str(error)
    if message.startswith("Caught ") and "\nOriginal Traceback" in message:
        return re.split(rf"\n(?:\w+\.)*{type(error).__name__}: ", message)[-1].strip()
    return message


def as_sentence(error: BaseException) -> str:
    """Returns the message of an error with a full stop, for another sentence to follow."""
    return in_one_line(error).rstrip(".") + "."


def how_to_resume(output_dir: str | os.PathLike[str]) -> str:
    """Returns a sentence on where a training in a folder can resume."""
    checkpoint = last_checkpoint(output_dir, reads_all=False)
    if checkpoint is None:
        return "No checkpoint is complete yet: start again with --resume_from_checkpoint last."
    return f"The last complete checkpoint is {checkpoint}: resume from it with --resume_from_checkpoint last."


def describe_lost_numbers(what: str, step: int, learning_rate: float, args: TrainingArguments) -> str:
    """Returns the message that `what`, "loss" or "weights", is not finite, what usually helps, and what is left."""
    checkpoint = last_checkpoint(args.output_dir, reads_all=False)
    left = "No checkpoint is complete yet."
    if checkpoint is not None:
        left = (
            f"The last complete checkpoint is {checkpoint}. From there it would come to the same step again: start "
            f"another training, from its weights with --model_name_or_path {checkpoint}, or from scratch."
        )
    is_are = "loss is" if what == "loss" else "weights are"
    return (
        f"The {is_are} infinite or NaN after step {step}, at a learning rate of {learning_rate:.3g}; nothing of it is "
        "saved. What usually helps: a lower --learning_rate, more --warmup_steps, a lower --max_grad_norm, --bf16 "
        f"rather than --fp16. {left}"
    )


def unwritten_checkpoint(folder: Path, error: Exception) -> CheckpointError | None:
    """Removes a checkpoint that could not be written; returns an error that says what is missing and what is safe.

    Returns None if the checkpoint is complete, or the error is about something else.
    """
    # Of RuntimeErrors only those of torch.save count, which has no kind of its own for files, nor one message.
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_of_writer = any(frame.f_code.co_filename == torch.serialization.__file__ for frame in frames)
    if (isinstance(error, RuntimeError) and not is_of_writer) or find_gap(folder) is None:
        return None
    written = size_of(folder)
    shutil.rmtree(folder, ignore_errors=True)
    reason = str(error).partition("\n")[0]
    return CheckpointError(
        f"{folder} could not be written ({reason}) and was removed. {describe_room(folder, written)} "
        f"{how_to_resume(folder.parent)}"
    )


def describe_room(folder: Path, written: int) -> str:
    """Returns a sentence on the room that a checkpoint takes, of which `written` bytes fitted, and what is free."""
    last = last_checkpoint(folder.parent, reads_all=False)
    needed = written if last is None else max(written, size_of(Path(last)))
    free = shutil.disk_usage(folder.parent).free
    takes = f"It takes {'more than ' if last is None else ''}{format_bytes(needed)}, and {format_bytes(free)} are free"
    if free > needed:
        return f"{takes}: look for a quota or a limit on the size of files."
    return f"{takes}: make room for {format_bytes(needed - free)} more, or keep fewer with --save_total_limit."


def size_of(folder: Path) -> int:
    """Returns the bytes of all files of a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def format_bytes(size: int) -> str:
    """Returns a number of bytes as people write it."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size / 1000:.0f} kB"
