"""The tasks that models are trained for and evaluated on: a file each, named as the library names the task."""

import inspect
from importlib import import_module
from pkgutil import iter_modules

from .base import Task


def find_tasks() -> dict[str, type[Task]]:
    """Returns the tasks of the files beside this one, by the names that the library has for them."""
    found: dict[str, type[Task]] = {}
    for file in iter_modules(__path__):
        module = import_module(f"{__name__}.{file.name}")
        for kind in vars(module).values():
            is_task = isinstance(kind, type) and issubclass(kind, Task) and not inspect.isabstract(kind)
            if is_task and kind.__module__ == module.__name__:
                found[file.name.replace("_", "-")] = kind
    return found


TASKS = find_tasks()
