"""Zygote: a process that has imported large libraries and forks into the processes that tests start.

A new process takes seconds to import these libraries. The libraries of Hugging Face read their environment (`HF_HOME`,
`HF_ENDPOINT`, …) at import, so they are imported by an additional zygote per environment, or by the process itself.

`python -m tests.helpers.zygote SOCKET` receives sockets until SOCKET is closed. Each received socket carries an
`Order`. The zygote answers on this socket with the process id and, when the process has ended, its exit code. If a
second socket is received with the first one, the new process becomes a zygote: it imports the modules in its
arguments and receives orders on the second socket. Its exit code is not sent.
"""

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import struct
import sys
import types
from runpy import run_module, run_path
from typing import Any, TypedDict

from .network import refuse_network
from .seeds import VARIABLE, seed_everything


LIBRARIES = (
    *("aiohttp", "faster_coco_eval", "fsspec", "jinja2", "matplotlib.pyplot", "multiprocess", "pandas"),
    *("pyarrow.dataset", "pyarrow.parquet", "requests", "scipy.ndimage", "scipy.optimize", "scipy.stats"),
    *("sklearn.datasets", "sklearn.metrics", "sympy", "torch", "torch._dynamo", "torch.distributed.fsdp"),
    *("torch.distributed.tensor", "torch.utils.data", "torch.utils.tensorboard", "torchvision.transforms.v2", "yaml"),
)
NUMBER = struct.Struct("i")
LIBRARY_PATH = sys.path[1:]


class Order(TypedDict):
    """Description of a process that the zygote starts."""

    # Arguments of Python: a script, "-m" and a module, or "-c" and code, then their arguments. For a zygote: modules
    arguments: list[str]
    processes: int  # Number of processes; if there are several, they are started as by torchrun
    workdir: str
    environment: dict[str, str]
    stdout: str  # Output file
    stderr: str


def serve(source: socket.socket) -> tuple[Order, socket.socket | None]:
    """Process orders. Return only in forked processes: the order and, if the fork is a zygote, its order socket."""
    gc.collect()
    gc.freeze()  # otherwise, garbage collection in forks would copy the memory of imported modules
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The system cleans up responder processes when they end.
    while descriptors := socket.recv_fds(source, 1, 2)[1]:
        connection, *others = (socket.socket(fileno=descriptor) for descriptor in descriptors)
        with connection:
            if os.fork() == 0:
                source.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                order = json.load(connection.makefile())
                if others:
                    connection.sendall(NUMBER.pack(os.getpid()))
                    return order, others[0]
                child = os.fork()
                if child == 0:
                    return order, None
                connection.sendall(NUMBER.pack(child))
                _, status = os.waitpid(child, 0)
                connection.sendall(NUMBER.pack(os.waitstatus_to_exitcode(status)))
                os._exit(0)
        for other in others:
            other.close()
    sys.exit()


def become(order: Order) -> None:
    """Give this process the environment, working directory and output files that an order describes."""
    for descriptor, path in enumerate((os.devnull, order["stdout"], order["stderr"])):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["workdir"])
    script = order["arguments"][0]
    first = os.path.dirname(os.path.abspath(script)) if script.endswith(".py") else ""
    sys.path[:] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *LIBRARY_PATH]


def run(arguments: list[str]) -> None:
    """Run a script, module or code as the main program, with the random seed of the test."""
    if VARIABLE in os.environ:
        seed_everything(int(os.environ[VARIABLE]))
    how, *rest = arguments
    if how == "-c":
        code, *others = rest
        sys.argv = ["-c", *others]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), main.__dict__)
    elif how == "-m":
        sys.argv = rest
        run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        run_path(how, run_name="__main__")


def run_as_one_of(rank: int, processes: int, port: int, arguments: list[str]) -> None:
    """Run the main program as one of several torchrun processes. The process ends when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: kill this process when its parent ends
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    run(arguments)


def run_processes(order: Order) -> None:
    """Fork several processes, which share the imported libraries."""
    from torch.distributed.elastic.utils.distributed import get_free_port
    from torch.multiprocessing import start_processes

    import hf_vit.training  # noqa: F401

    gc.freeze()
    processes: Any = order["processes"]
    start_processes(run_as_one_of, (processes, get_free_port(), order["arguments"]), processes, start_method="fork")


def main() -> None:
    refuse_network()
    modules: list[str] = list(LIBRARIES)
    orders: socket.socket | None = socket.socket(fileno=int(sys.argv[1]))
    while orders:
        for name in modules:
            importlib.import_module(name)
        order, orders = serve(orders)
        become(order)
        modules = order["arguments"]
    if order["processes"] > 1:
        run_processes(order)
    else:
        run(order["arguments"])


if __name__ == "__main__":
    main()
