"""Fail tests that access the network or leave processes or files outside their folder."""

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


# Processes and files that Python and torch create once and keep until exit, or leave behind when a process fails.
KEPT_PROCESSES = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")
KEPT_FILES = ("pymp-*", "torchinductor_*", "pytorch-errorfile-*")
PATIENCE = 5.0  # seconds that a terminated process may take to exit
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: adopt orphaned descendants


@pytest.fixture(scope="session", autouse=True)
def _own_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep temporary files in one folder, and adopt orphaned processes that were started here."""
    tmp_path_factory.getbasetemp()  # creates the folder at its final place
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(TEMPORARY))
        patch.setattr(tempfile, "tempdir", str(TEMPORARY))
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(SUBREAPER, 1)
        yield


def files_of_checkout() -> set[str]:
    """Return all files of this repository except those ignored by git."""
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
    """Return the contents of folders that tests may use but must leave unchanged."""
    names = {os.path.join(folder, name) for folder in (HOME, TEMPORARY) for name in os.listdir(folder)}
    return {name for name in names if not any(fnmatch.fnmatch(os.path.basename(name), kept) for kept in KEPT_FILES)}


def contents(path: str) -> bytes:
    """Return the content of a `/proc` file, or nothing if its process has ended."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def running(pid: int) -> Iterator[int]:
    """Yield the descendants of a process, except those that are allowed to stay."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:  # it has ended, or the system has no /proc
        return
    for thread in threads:
        for child in map(int, contents(f"/proc/{pid}/task/{thread}/children").split()):
            has_ended = contents(f"/proc/{child}/stat").rpartition(b")")[2].split()[:1] in ([], [b"Z"])
            command = contents(f"/proc/{child}/cmdline")
            if child not in processes.ZYGOTES and not has_ended and not any(k in command for k in KEPT_PROCESSES):
                yield child
            yield from running(child)


def left_running() -> dict[int, str]:
    """End processes that are still running after a grace period and return their IDs and commands."""
    if not any(running(os.getpid())):
        return {}
    for worker in multiprocessing.active_children():
        if worker.daemon:  # such as data loader workers, which end with this process at the latest
            worker.terminate()
    latest = time.monotonic() + PATIENCE
    while any(running(os.getpid())) and time.monotonic() < latest:
        time.sleep(0.01)
    left = {child: contents(f"/proc/{child}/cmdline").replace(b"\0", b" ").decode() for child in running(os.getpid())}
    for child in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    return left


known_files: set[str] = set()  # files already reported for an earlier test


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
