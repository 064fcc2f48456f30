"""Runs code in a new process with an empty cache, with or without the package `hf_vit` on the import path."""

import os
import re
import subprocess
import textwrap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .processes import NO_COUNTING, ROOT, Process


# Matches the memory leak report that the extension module of triton 3.9 prints when a process ends.
LEAKS = re.compile(r"^nanobind: leaked .*?refleaks\.html\n?", flags=re.MULTILINE | re.DOTALL)

PREAMBLE = """
import sys
sys.modules["hf_vit"] = None  # makes its import fail
import warnings
import torch, transformers
"""


def run_without_package(
    code: str, workdir: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs `code` in `workdir`, where `hf_vit` cannot be imported; `arguments` are in `sys.argv[1:]`.

    Raises:
        AssertionError: if the process fails; the message is its output.
    """
    process = run_python("-c", PREAMBLE + textwrap.dedent(code), *arguments, workdir=workdir, **environment)
    assert process.returncode == 0, process.stdout + process.stderr
    return process


def run_with_package(
    code: str, workdir: Path, *arguments: str, fresh: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs `code` in `workdir` like `run_without_package`, but `hf_vit` can be imported."""
    environment["PYTHONPATH"] = str(ROOT)
    process = run_python("-c", textwrap.dedent(code), *arguments, workdir=workdir, fresh=fresh, **environment)
    assert process.returncode == 0, process.stdout + process.stderr
    return process


def run_script(
    name: str, workdir: Path, *arguments: str, processes: int = 1, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs `scripts/{name}.py` in `workdir` and returns its output and exit code."""
    environment["PYTHONPATH"] = str(ROOT)
    script = str(ROOT / "scripts" / f"{name}.py")
    return run_python(script, *arguments, workdir=workdir, processes=processes, **environment)


def run_command(
    name: str, workdir: Path, *arguments: str, processes: int = 1, **environment: Any
) -> subprocess.CompletedProcess[str]:
    """Runs `python -m hf_vit {name}` in `workdir`, and returns its output and exit code."""
    environment["PYTHONPATH"] = str(ROOT)
    return run_python("-m", "hf_vit", *name.split(), *arguments, workdir=workdir, processes=processes, **environment)


def start_python(*arguments: str, workdir: Path) -> Process:
    """Starts Python in `workdir` and discards the output of the process."""
    nowhere, environment = Path(os.devnull), offline({"PYTHONPATH": str(ROOT)})
    return Process(*arguments, workdir=workdir, environment=environment, stdout=nowhere, stderr=nowhere)


def run_python(
    *arguments: str, workdir: Path, processes: int = 1, fresh: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs Python in `workdir`, offline unless a Hub endpoint is given. All runs in `workdir` share a cache."""
    workdir.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder:
        outputs = {name: Path(folder) / name for name in ("stdout", "stderr")}
        variables = offline(environment)
        process = Process(
            *arguments, workdir=workdir, environment=variables, processes=processes, fresh=fresh, **outputs
        )
        try:
            process.wait()
        finally:
            process.terminate()
        said = {name: LEAKS.sub("", path.read_text()) for name, path in outputs.items()}
    return subprocess.CompletedProcess(arguments, process.wait(), **said)


def offline(environment: dict[str, str]) -> dict[str, str]:
    """Returns all environment variables for a process. The process is offline unless a Hub endpoint is given."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHONPATH"))}
    return variables | {
        "HF_HOME": "hf_home",  # the path is relative, so that the environment does not depend on the folder
        **NO_COUNTING,
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        **({"HF_HUB_OFFLINE": "1"} if "HF_ENDPOINT" not in environment else {}),
        **environment,
    }
