"""Runs code in a fresh process that cannot import the package, as a user without it would."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path


PREAMBLE = """
import sys
sys.modules["hf_vit"] = None  # an import of it now fails
import warnings
import torch, transformers
"""


def run_without_package(
    code: str, workdir: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs `code` in `workdir` with an empty cache; its arguments are in `sys.argv[1:]`.

    Raises:
        AssertionError: if the process fails, with what it printed.
    """
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
    process = subprocess.run(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(code), *arguments],
        cwd=workdir,
        env=variables,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process
