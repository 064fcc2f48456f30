"""Fail tests that use the network, leave processes running, or leave files outside the temporary folder of pytest."""

import contextlib
import ctypes
import fnmatch
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator

import pytest

from ..helpers import network, processes
from ..helpers.environment import HOME, TEMPORARY


# Processes and files that tests may leave: Python, torch and CUDA create them once, or keep them after a failure.
KEPT_PROCESSES = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver", b"_inductor/compile_worker")
KEPT_FILES = ("pymp-*", "torchinductor_*", "pytorch-errorfile-*", ".nv", ".triton")
PATIENCE = 5.0  # seconds that a terminated process may take to end
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: processes whose parents have ended become children of this one


@pytest.fixture(scope="session", autouse=True)
def _own_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep temporary files in one folder, and make this process the parent of processes whose parents have ended."""
    tmp_path_factory.getbasetemp()  # creates the temporary folder of pytest before TMPDIR is changed
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(TEMPORARY))
        patch.setattr(tempfile, "tempdir", str(TEMPORARY))
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(SUBREAPER, 1)
        yield


def files_of_checkout() -> set[str]:
    """Return all files of this repository that git does not ignore."""
    ignored = [".git", *(line.strip("/\n") for line in (processes.ROOT / ".gitignore").open())]
    found = set()
    for folder, folders, names in os.walk(processes.ROOT):
        folders[:] = [name for name in folders if not any(fnmatch.fnmatch(name, pattern) for pattern in ignored)]
        found.update(os.path.join(folder, name) for name in names)
    return found


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_in_checkout() -> Iterator[None]:
    before = files_of_checkout()
    yield
    left = files_of_checkout() - before
    assert not left, f"A test of this file, or of one that ran beside it, left {sorted(left)} behind."


def temporary_files() -> set[str]:
    """Return the paths in folders that tests must leave empty."""
    names = {os.path.join(folder, name) for folder in (HOME, TEMPORARY) for name in os.listdir(folder)}
    return {name for name in names if not any(fnmatch.fnmatch(os.path.basename(name), kept) for kept in KEPT_FILES)}


def contents(path: str) -> bytes:
    """Return the content of a file in `/proc`, or empty content if the process has ended."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def running(pid: int) -> Iterator[int]:
    """Yield the child processes of a process, except those that may keep running after a test."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:  # the process has ended, or the system has no /proc
        return
    for thread in threads:
        for child in map(int, contents(f"/proc/{pid}/task/{thread}/children").split()):
            has_ended = contents(f"/proc/{child}/stat").rpartition(b")")[2].split()[:1] in ([], [b"Z"])
            command = contents(f"/proc/{child}/cmdline")
            if child not in processes.ZYGOTES and not has_ended and not any(k in command for k in KEPT_PROCESSES):
                yield child
            yield from running(child)


def left_running() -> dict[int, str]:
    """Return the ids and commands of child processes that did not end in time, and kill these processes."""
    if not any(running(os.getpid())):
        return {}
    for worker in multiprocessing.active_children():
        # Stop daemons such as data loader workers, which would otherwise run until garbage collection.
        if worker.daemon:
            worker.terminate()
    latest = time.monotonic() + PATIENCE
    while any(running(os.getpid())) and time.monotonic() < latest:
        time.sleep(0.01)
    left = {child: contents(f"/proc/{child}/cmdline").replace(b"\0", b" ").decode() for child in running(os.getpid())}
    for child in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    return left


known_files: set[str] = set()  # files that were left by earlier tests and already reported as a failure


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    refused, network.refused[:] = network.refused[:], []
    assert not refused, f"The test reached for the network: {refused}"
    left = left_running()
    assert not left, f"The test left processes running, which were ended: {left}"
    left_files = temporary_files() - known_files
    known_files.update(left_files)
    assert not left_files, f"The test left files outside its tmp_path: {sorted(left_files)}"
