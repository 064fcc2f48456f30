"""Why a training ends before its time, in words for people."""

import os
import re

from transformers import TrainingArguments

from .checkpoints import last_checkpoint


class Preempted(SystemExit):
    """A signal has ended a training, which a checkpoint holds; a script that does not catch it exits with its code.

    That is 128 and the number of the signal, 143 for SIGTERM, as of a process that the signal has killed. A code of 0
    would tell SLURM, Kubernetes and `&&` that the model is trained.

    Args:
        number: The signal.
        message: What has been done, and how to go on.
    """

    def __init__(self, number: int, message: str) -> None:
        """Takes the reason."""
        super().__init__(128 + number)
        self.number = number
        self.message = message


class NotFiniteError(FloatingPointError):
    """The loss or the weights of a training are no numbers any more."""


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


def how_to_go_on(output_dir: str | os.PathLike[str]) -> str:
    """Says from where a training in a folder can be taken up."""
    checkpoint = last_checkpoint(output_dir)
    if checkpoint is None:
        return "No checkpoint is complete yet: begin again with --resume_from_checkpoint last."
    return f"The last complete checkpoint is {checkpoint}: go on from it with --resume_from_checkpoint last."


def describe_lost_numbers(what: str, step: int, learning_rate: float, args: TrainingArguments) -> str:
    """Says that a training has failed, what usually helps, and what is left of it.

    Args:
        what: What is no number any more: "loss" or "weights".
        step: When it was found.
        learning_rate: Near that step.
        args: Those of the training.
    """
    checkpoint = last_checkpoint(args.output_dir)
    left = "No checkpoint is complete yet."
    if checkpoint is not None:
        left = (
            f"The last complete checkpoint is {checkpoint}. From there it would come to the same step again: begin "
            f"another training, from its weights with --model_name_or_path {checkpoint}, or anew."
        )
    is_are = "loss is" if what == "loss" else "weights are"
    return (
        f"The {is_are} infinite or NaN after step {step}, at a learning rate of {learning_rate:.3g}; nothing of it is "
        "saved. What usually helps: a lower --learning_rate, more --warmup_steps, a lower --max_grad_norm, --bf16 "
        f"rather than --fp16. {left}"
    )
