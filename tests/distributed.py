"""Runs the jobs of `tests.trainings` in processes of their own: one, or several that train together."""

import os
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).parents[1]
# Not `accelerate launch --cpu --num_processes 2`, which runs one process and does not say so.
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc_per_node")
TIMEOUT = 240  # seconds


def start(job: str, folder: Path, *arguments: object, processes: int = 1) -> subprocess.Popen[bytes]:
    """Starts a job, which writes what it has to say to `folder` and what it prints to output.txt there."""
    folder.mkdir(parents=True, exist_ok=True)
    launcher = [] if processes == 1 else [*TORCHRUN, str(processes), "-m"]
    # A file rather than a pipe, which the workers of a killed process would hold open.
    with (folder / "output.txt").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *launcher, "tests.trainings", job, str(folder), *map(str, arguments)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def finish(process: subprocess.Popen[bytes], folder: Path, returncode: int = 0) -> None:
    """Waits for a job.

    Raises:
        AssertionError: if it ends in another way, with what it printed.
    """
    try:
        process.wait(TIMEOUT)
    finally:
        process.terminate()  # not kill(), of which torchrun's processes would not learn
    assert process.returncode == returncode, (folder / "output.txt").read_text()
