"""Specifications of tasks. Each file defines one task, and is named like the task in transformers."""

import inspect
from importlib import import_module
from pkgutil import iter_modules

from .base import Choice, Task
from .image_classification import ImageClassification
from .zero_shot_image_classification import train_tokenizer


__all__ = ["TASKS", "Choice", "ImageClassification", "Task", "find_tasks", "train_tokenizer"]


def find_tasks() -> dict[str, type[Task]]:
    """Return the tasks in the files of this folder by their names in transformers."""
    found: dict[str, type[Task]] = {}
    for file in iter_modules(__path__):
        module = import_module(f"{__name__}.{file.name}")
        for kind in vars(module).values():
            is_task = isinstance(kind, type) and issubclass(kind, Task) and not inspect.isabstract(kind)
            if is_task and kind.__module__ == module.__name__:
                found[file.name.replace("_", "-")] = kind
    return found


TASKS = find_tasks()
