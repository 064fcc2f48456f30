"""Runs the jobs of `tests.trainings` in processes of their own: one, or several that train together."""

import os
from pathlib import Path

from .processes import ROOT, TIMEOUT, Process


def start(job: str, folder: Path, *arguments: object, processes: int = 1) -> Process:
    """Starts a job, which writes what it has to say to `folder` and what it prints to output.txt there."""
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / "output.txt"
    return Process(
        *("-m", "tests.trainings", job, str(folder), *map(str, arguments)),
        workdir=ROOT,
        environment=os.environ,
        stdout=output,
        stderr=output,
        processes=processes,
    )


def finish(process: Process, folder: Path, returncode: int = 0) -> None:
    """Waits for a job.

    Raises:
        AssertionError: if it ends in another way, with what it printed.
    """
    try:
        process.wait(TIMEOUT)
    finally:
        process.terminate()
    assert process.returncode == returncode, (folder / "output.txt").read_text()
