"""Runs code in a fresh process with an empty cache: with the package, or without it as a user without it would."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path


ROOT = Path(__file__).parents[1]
PREAMBLE = """
import sys
sys.modules["hf_vit"] = None  # an import of it now fails
import warnings
import torch, transformers
"""


def run_without_package(
    code: str, workdir: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs `code` in `workdir`, where `hf_vit` cannot be imported; its arguments are in `sys.argv[1:]`.

    Raises:
        AssertionError: if the process fails, with what it printed.
    """
    process = run_python("-c", PREAMBLE + textwrap.dedent(code), *arguments, workdir=workdir, **environment)
    assert process.returncode == 0, process.stdout + process.stderr
    return process


def run_with_package(
    code: str, workdir: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs `code` in `workdir`, where `hf_vit` can be imported; otherwise as `run_without_package`."""
    environment["PYTHONPATH"] = str(ROOT)
    process = run_python("-c", textwrap.dedent(code), *arguments, workdir=workdir, **environment)
    assert process.returncode == 0, process.stdout + process.stderr
    return process


def run_script(name: str, workdir: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `scripts/{name}.py` in `workdir`, and returns what it printed and its exit code."""
    environment["PYTHONPATH"] = str(ROOT)
    return run_python(str(ROOT / "scripts" / f"{name}.py"), *arguments, workdir=workdir, **environment)


def run_python(*arguments: str, workdir: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in `workdir`, whose cache stays from one run there to the next; offline unless given a Hub."""
    workdir.mkdir(parents=True, exist_ok=True)
    home = workdir / "hf_home"
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHONPATH"))}
    variables |= {
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        **({"HF_HUB_OFFLINE": "1"} if "HF_ENDPOINT" not in environment else {}),
        **environment,
    }
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=workdir,
        env=variables,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
