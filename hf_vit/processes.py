"""Functions for several training processes."""

from collections.abc import Callable
from typing import Any, TypeVar

from accelerate.utils import broadcast_object_list
from transformers import TrainingArguments


T = TypeVar("T")


def on_first_process(args: TrainingArguments, work: Callable[[], T]) -> T:
    """Run `work` on the first process and return its result on all processes.

    If `work` raises `ValueError` or `OSError`, the error is raised on all processes.
    """
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
