"""Runs the jobs of `tests.helpers.trainings` in processes of their own: one, or several that train together."""

import os
import subprocess
import sys
from pathlib import Path

from .processes import ONE_THREAD, ROOT, TIMEOUT, Process


OFFLINE = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def start(job: str, folder: Path, *arguments: object, processes: int = 1) -> Process:
    """Starts a job, which writes what it has to say to `folder` and what it prints to output.txt there."""
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / "output.txt"
    return Process(
        *("-m", "tests.helpers.trainings", job, str(folder), *map(str, arguments)),
        workdir=ROOT,
        environment={**os.environ, **OFFLINE},
        stdout=output,
        stderr=output,
        processes=processes,
    )


def launch(*arguments: str, folder: Path, workdir: Path = ROOT) -> subprocess.Popen[bytes]:
    """Starts torchrun itself, whose processes import everything anew; what they print goes to output.txt in `folder`.

    Not `accelerate launch --cpu --num_processes 2`, which runs one process and does not say so.
    """
    # A file rather than a pipe, which the workers of a killed process would hold open.
    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--log_dir", str(folder / "logs"), *arguments],
            cwd=workdir,
            env={**os.environ, **OFFLINE, **ONE_THREAD},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def finish(process: Process | subprocess.Popen[bytes], folder: Path, returncode: int = 0) -> None:
    """Waits for a job.

    Raises:
        AssertionError: if it ends in another way, with what it printed.
    """
    try:
        process.wait(TIMEOUT)
    finally:
        process.terminate()  # not kill(), of which torchrun's processes would not learn
    assert process.returncode == returncode, (folder / "output.txt").read_text()
