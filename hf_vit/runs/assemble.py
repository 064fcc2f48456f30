"""Open and build a run of one or several tasks."""

from ..tasks.multi_task import MultiTask
from .build import Run, build_task, open_task
from .multi_task import build_heads, open_heads


def open_run(run: Run) -> Run:
    """Open and check the data of a run. Raises the errors of `open_task`."""
    return open_heads(run) if isinstance(run.task, MultiTask) else open_task(run)


def build_run(run: Run) -> Run:
    """Open the model of a run, and return the run with its trainer. Raises the errors of `build_task`."""
    return build_heads(run) if run.heads else build_task(run)
