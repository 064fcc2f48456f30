"""Runs the jobs defined in `tests.helpers.trainings` in one or several subprocesses."""

from pathlib import Path

from .fresh import offline
from .processes import ROOT, TIMEOUT, Process


def start(job: str, folder: Path, *arguments: object, processes: int = 1) -> Process:
    """Starts a job that writes its results to files in `folder`, and its output to output.txt in `folder`."""
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
    """Starts torchrun in `workdir` (by default `folder`) and writes its output to `folder`/output.txt.

    `accelerate launch --cpu --num_processes 2` cannot be used instead: it runs a single process without a warning.
    """
    return Process(
        *("-m", "tests.helpers.torchrun", "--log_dir", str(folder / "logs"), *arguments),
        workdir=workdir or folder,
        environment=offline({"PYTHONPATH": str(ROOT)}),
        stdout=folder / "output.txt",
        stderr=folder / "output.txt",
    )


def finish(process: Process, folder: Path, returncode: int = 0) -> None:
    """Waits until a job ends, and checks its exit code.

    Raises:
        AssertionError: if the job ends with an unexpected exit code. The message is the output of the job.
    """
    try:
        process.wait(TIMEOUT)
    finally:
        process.terminate()  # kill() would leave the processes of torchrun running
    assert process.returncode == returncode, (folder / "output.txt").read_text()
