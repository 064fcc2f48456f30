"""Start Python processes as forks of `tests/helpers/zygote.py`, which is much faster than starting new ones."""

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
TIMEOUT = 480  # Time limit in seconds: twice the time that the longest test needs on a busy machine.
LIBRARIES = ("accelerate", "datasets", "peft", "safetensors.torch", "transformers.pipelines", "transformers.trainer")
PACKAGE = ("hf_vit.features", "hf_vit.training", "hf_vit.visualize")
# Environment variables that torch reads at import.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
NO_COUNTING = {
    "GRADIO_ANALYTICS_ENABLED": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_UPDATE_DOWNLOAD_COUNTS": "0",
    "ORT_DISABLE_TELEMETRY": "1",
}  # Usage statistics are disabled, because reporting them needs the network.

ZYGOTES: set[int] = set()  # Process ids of zygotes, which end with this process.

_STARTED: list[subprocess.Popen[bytes]] = []  # Processes for which `wait` was not called yet.


class Process:
    """A Python process with the interface of `subprocess.Popen`, such as `pid`, `returncode`, `poll` and `wait`."""

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
        """Start Python with a script, "-m" and a module, or "-c" and code, in one process or, like torchrun, several.

        The process has no variables other than `environment`. If `fresh`, it imports the Hugging Face libraries and
        `hf_vit` itself; otherwise, it is forked from a process that has imported them.
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
        """Return the exit code, or None while the process is running."""
        try:
            return self.wait(0)
        except BlockingIOError:
            return None

    def wait(self, timeout: float = TIMEOUT) -> int:
        """Return the exit code; raise `TimeoutError` if the process does not end within `timeout` seconds."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            self.returncode = receive(self._connection)
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def receive(connection: socket.socket) -> int:
    return NUMBER.unpack(connection.recv(NUMBER.size, socket.MSG_WAITALL))[0]


@functools.cache
def zygote() -> socket.socket:
    """Start the zygote, which ends when this process ends; return the socket for orders to the zygote."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHONPATH"))}
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "tests.helpers.zygote", str(theirs.fileno())]
        environment = {**variables, **ONE_THREAD}
        _STARTED.append(subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=[theirs.fileno()]))
    ZYGOTES.add(_STARTED[-1].pid)
    return ours


@functools.lru_cache(maxsize=4)  # Each zygote takes several hundred MiB. Evicted zygotes end.
def warm_zygote(environment: tuple[tuple[str, str], ...]) -> socket.socket:
    """Start a zygote that has also imported the libraries of Hugging Face and, if it is in the path, `hf_vit`."""
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
