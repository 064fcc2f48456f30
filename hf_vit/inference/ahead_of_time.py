"""Compilation of a model for images of one shape, in a process of its own that can be stopped when it takes too long.

The process runs this very file, so it imports nothing but torch. The compiled program has the weights in it, packed as
the matrix products of the processor read them, and is called without a guard or a line of Python between its kernels.
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
    """A model cannot be compiled here; the text says why, in one line."""


class FlatOutputs(nn.Module):
    """A model whose outputs are the tensors in them, without their names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> list[Tensor]:
        """(B, C, H, W) to the tensors in the order of the output's fields."""
        return list(pytree.tree_leaves(self.model(pixel_values=pixel_values)))


def check_compiler() -> None:
    """Raises `CompilationError` where there is no C++ compiler."""
    from torch._inductor import config

    name = config.cpp.cxx[-1]
    if shutil.which(name) is None:
        raise CompilationError(f"there is no C++ compiler: {name} is not found. Install it, or set CXX")


def compile_flat(model: nn.Module, images: Tensor, max_seconds: float) -> Callable[[Tensor], list[Tensor]]:
    """Compiles a model that returns a list of tensors for images (B, C, H, W) of one shape and dtype.

    Args:
        model: In evaluation mode, on a CPU.
        images: Of the shape and dtype that the program will take. It does not check them.
        max_seconds: Time after which the compilation is given up.

    Raises:
        CompilationError: if the model cannot be exported or compiled, or that takes too long.
    """
    check_compiler()
    with tempfile.TemporaryDirectory(prefix="hf_vit_") as folder:
        exported, package = Path(folder) / "exported.pt2", Path(folder) / "compiled.pt2"
        try:
            torch.export.save(torch.export.export(model, (images,), strict=False), exported)
        except Exception as error:  # tracing fails in many ways
            raise CompilationError(f"torch.export fails: {first_line(error)}") from error
        _run_apart(str(exported), str(package), max_seconds)
        program = torch._inductor.aoti_load_package(str(package))
    return lambda pixel_values: program(pixel_values)


def _run_apart(exported: str, package: str, max_seconds: float) -> None:
    """Compiles in another process, which ends with all that it has started after `max_seconds`."""
    command = [sys.executable, "-P", str(Path(__file__).resolve()), exported, package, str(torch.get_num_threads())]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        _, errors = process.communicate(timeout=max(max_seconds, 0))
    except subprocess.TimeoutExpired as error:
        raise CompilationError(f"not compiled after max_seconds: {max_seconds:.0f} s were left") from error
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the C++ compiler is a child of that process
            process.communicate()
    if process.returncode or not os.path.exists(package):
        lines = [line for line in errors.splitlines() if line.strip()] or [f"exit code {process.returncode}"]
        raise CompilationError(f"the compiler fails: {lines[-1][:200]}")


def first_line(error: Exception) -> str:
    """Returns the kind of an error and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def _compile(exported: str, package: str, num_threads: str) -> None:
    """Compiles what `torch.export` has saved; the program uses `num_threads`."""
    torch.set_num_threads(int(num_threads))
    program: Any = torch.export.load(exported)
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(program, package_path=package, inductor_configs={"freezing": True})


if __name__ == "__main__":
    _compile(*sys.argv[1:])
