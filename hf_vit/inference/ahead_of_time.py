"""Compile a model ahead of time for images of one shape, in a separate process with a time limit.

The separate process runs this file as a script, so this file imports only torch and the standard library. The compiled
program contains the weights in a memory layout for the processor. No guards or Python code run between its kernels.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


class CompilationError(RuntimeError):
    """Raised if a model cannot be compiled on this machine. The message states the reason in one line."""


class FlatOutputs(nn.Module):
    """Wraps a model so that it returns a flat list of output tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> list[Tensor]:
        """Returns the output tensors for images (B, C, H, W), in the order of the fields of the model output."""
        return list(pytree.tree_leaves(self.model(pixel_values=pixel_values)))


def compile_flat(model: nn.Module, images: Tensor, max_seconds: float) -> Callable[[Tensor], list[Tensor]]:
    """Compiles a model that returns a list of tensors, on the CPU, for images of the shape and dtype of `images`.

    The compiled program does not check the shape and dtype.

    Raises:
        CompilationError: if the model cannot be exported or compiled within the time limit, or there is no compiler.
    """
    from torch._inductor import config

    if shutil.which(compiler := config.cpp.cxx[-1]) is None:
        raise CompilationError(f"no C++ compiler found: {compiler} is missing. Install it, or set CXX")
    with tempfile.TemporaryDirectory(prefix="hf_vit_") as folder:
        exported, package = Path(folder) / "exported.pt2", Path(folder) / "compiled.pt2"
        try:
            torch.export.save(torch.export.export(model, (images,), strict=False), exported)
        except Exception as error:  # Tracing raises many types of errors.
            raise CompilationError(f"torch.export failed: {first_line(error)}") from error
        _run_apart(str(exported), str(package), max_seconds)
        program = torch._inductor.aoti_load_package(str(package))
    return lambda pixel_values: program(pixel_values)


def _run_apart(exported: str, package: str, max_seconds: float) -> None:
    """Compiles an exported program in a separate process, which is killed with its children after `max_seconds`."""
    command = [sys.executable, "-P", str(Path(__file__).resolve()), exported, package, str(torch.get_num_threads())]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        _, errors = process.communicate(timeout=max_seconds)
    except subprocess.TimeoutExpired as error:
        raise CompilationError(f"compilation exceeded max_seconds={max_seconds:g}") from error
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also ends the C++ compiler
            process.communicate()
    if process.returncode or not os.path.exists(package):
        lines = [line for line in errors.splitlines() if line.strip()] or [f"exit code {process.returncode}"]
        raise CompilationError(f"the compiler failed: {lines[-1][:200]}")


def first_line(error: Exception) -> str:
    """Returns the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def _compile(exported: str, package: str, num_threads: str) -> None:
    """Compiles a program saved by `torch.export` for execution with `num_threads` threads."""
    torch.set_num_threads(int(num_threads))
    program: Any = torch.export.load(exported)
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(program, package_path=package, inductor_configs={"freezing": True})


if __name__ == "__main__":
    _compile(*sys.argv[1:])
