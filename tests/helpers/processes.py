"""Starts Python in other processes, forks of `tests/helpers/zygote.py` that cost a fraction of fresh ones."""

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from .zygote import NUMBER, Order


ROOT = Path(__file__).parents[2]
TIMEOUT = 480  # seconds, of which a busy machine needs half
LIBRARIES = ("accelerate", "datasets", "peft", "safetensors.torch", "transformers.pipelines", "transformers.trainer")
PACKAGE = ("hf_vit.features", "hf_vit.training", "hf_vit.visualize")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}  # which torch reads at import
NO_COUNTING = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_UPDATE_DOWNLOAD_COUNTS": "0",
    "ORT_DISABLE_TELEMETRY": "1",
}  # which is done over the network

ZYGOTES: set[int] = set()  # their ids; they end with this process

_STARTED: list[subprocess.Popen[bytes]] = []  # none of which is waited for


class Process:
    """Python running in another process; to tests what a `subprocess.Popen` is.

    Attributes:
        pid: Its id.
        returncode: Its exit code, minus the signal that ended it, or `None` before it is waited for.
    """

    def __init__(
        self,
        *arguments: str,
        workdir: Path,
        environment: Mapping[str, str],
        stdout: Path,
        stderr: Path,
        processes: int = 1,
        fresh: bool = False,
    ) -> None:
        """Starts it.

        Args:
            *arguments: Those of Python: a script, "-m" and a module or "-c" and code, and what follows.
            workdir: Where it runs.
            environment: All that is in its environment.
            stdout: File that it prints to.
            stderr: File of its errors; may be the same.
            processes: How many there are of it, that torchrun would start.
            fresh: Whether it is to import the libraries of Hugging Face and `hf_vit` by itself.
        """
        variables = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
        source = zygote() if fresh else warm_zygote(tuple(sorted(variables.items())))
        order: Order = {
            "arguments": list(arguments),
            "processes": processes,
            "workdir": str(workdir),
            "environment": dict(environment),
            "stdout": str(stdout),
            "stderr": str(stderr),
        }
        self.returncode: int | None = None
        self._connection, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(source, [b"+"], [theirs.fileno()])
        self._connection.sendall(json.dumps(order).encode())
        self._connection.shutdown(socket.SHUT_WR)
        self.pid = receive(self._connection)

    def poll(self) -> int | None:
        """Returns its exit code if it has ended."""
        try:
            return self.wait(0)
        except BlockingIOError:
            return None

    def wait(self, timeout: float = TIMEOUT) -> int:
        """Returns its exit code; raises `TimeoutError` if it has not ended after so many seconds."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            self.returncode = receive(self._connection)
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ends it, if it has not ended."""
        self.send_signal(signal.SIGTERM)


def receive(connection: socket.socket) -> int:
    """Waits for a number that a zygote answers with."""
    return NUMBER.unpack(connection.recv(NUMBER.size, socket.MSG_WAITALL))[0]


@functools.cache
def zygote() -> socket.socket:
    """Starts the zygote, which ends with this process; returns where it receives sockets."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHONPATH"))}
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "tests.helpers.zygote", str(theirs.fileno())]
        environment = {**variables, **ONE_THREAD}
        _STARTED.append(subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=[theirs.fileno()]))
    ZYGOTES.add(_STARTED[-1].pid)
    return ours


@functools.lru_cache(maxsize=4)  # of some hundred MiB; one that is dropped ends
def warm_zygote(environment: tuple[tuple[str, str], ...]) -> socket.socket:
    """Starts a zygote that has imported Hugging Face's libraries too, and `hf_vit` where it is in the path."""
    variables = dict(environment)
    ours, theirs = socket.socketpair()
    connection, others = socket.socketpair()
    order: Order = {
        "arguments": [*LIBRARIES, *(PACKAGE if "PYTHONPATH" in variables else ())],
        "processes": 1,
        "workdir": tempfile.gettempdir(),
        "environment": variables,
        "stdout": os.devnull,
        "stderr": os.devnull,
    }
    with theirs, connection, others:
        socket.send_fds(zygote(), [b"+"], [others.fileno(), theirs.fileno()])
        connection.sendall(json.dumps(order).encode())
        connection.shutdown(socket.SHUT_WR)
        ZYGOTES.add(receive(connection))
    return ours
