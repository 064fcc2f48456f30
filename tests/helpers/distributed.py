"""Runs the jobs of `tests.helpers.trainings` in processes of their own: one, or several that train together."""

from pathlib import Path

from .fresh import offline
from .processes import ROOT, TIMEOUT, Process


def start(job: str, folder: Path, *arguments: object, processes: int = 1) -> Process:
    """Starts a job, which writes what it has to say to `folder` and what it prints to output.txt there."""
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / "output.txt"
    return Process(
        *("-m", "tests.helpers.trainings", job, str(folder), *map(str, arguments)),
        workdir=folder,
        environment=offline({"PYTHONPATH": str(ROOT)}),
        stdout=output,
        stderr=output,
        processes=processes,
    )


def launch(*arguments: str, folder: Path, workdir: Path | None = None) -> Process:
    """Starts torchrun, in `workdir` or else in `folder`, where what it and its processes print goes to output.txt.

    Not `accelerate launch --cpu --num_processes 2`, which runs one process and does not say so.
    """
    return Process(
        *("-m", "tests.helpers.torchrun", "--log_dir", str(folder / "logs"), *arguments),
        workdir=workdir or folder,
        environment=offline({"PYTHONPATH": str(ROOT)}),
        stdout=folder / "output.txt",
        stderr=folder / "output.txt",
    )


def finish(process: Process, folder: Path, returncode: int = 0) -> None:
    """Waits for a job.

    Raises:
        AssertionError: if it ends in another way, with what it printed.
    """
    try:
        process.wait(TIMEOUT)
    finally:
        process.terminate()  # not kill(), of which torchrun's processes would not learn
    assert process.returncode == returncode, (folder / "output.txt").read_text()
