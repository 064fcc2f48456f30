"""A process that has imported the large libraries and forks into the processes that tests start.

A fresh process takes seconds to import them. It imports nothing of Hugging Face, which reads its environment
(`HF_HOME`, `HF_ENDPOINT`, …) at import: what it forks into does so by itself, in the environment of its order.

`python zygote.py SOCKET` receives sockets, until the socket that they come by is closed. On each there is an `Order`,
answered by two numbers: the id of the process and, when that has ended, its exit code.
"""

import ctypes
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


LIBRARIES = (
    *("aiohttp", "faster_coco_eval", "fsspec", "jinja2", "matplotlib.pyplot", "multiprocess", "pandas"),
    *("pyarrow.dataset", "pyarrow.parquet", "requests", "scipy.ndimage", "scipy.optimize", "scipy.stats"),
    *("sklearn.datasets", "sklearn.metrics", "sympy", "torch", "torch._dynamo", "torch.distributed.fsdp"),
    *("torch.distributed.tensor", "torch.utils.data", "torch.utils.tensorboard", "torchvision.transforms.v2", "yaml"),
)
NUMBER = struct.Struct("i")


class Order(TypedDict):
    """What a process is to be."""

    arguments: list[str]  # as of Python: a script, "-m" and a module or "-c" and code, and what follows in `sys.argv`
    processes: int  # with more than one, what torchrun would start
    workdir: str
    environment: dict[str, str]
    stdout: str  # a file
    stderr: str


def serve(source: socket.socket) -> Order:
    """Answers orders; returns, in a process of its own, each one."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that answer
    while descriptors := socket.recv_fds(source, 1, 1)[1]:
        with socket.socket(fileno=descriptors[0]) as connection:
            if os.fork() == 0:
                source.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                order = json.load(connection.makefile())
                child = os.fork()
                if child == 0:
                    return order
                connection.sendall(NUMBER.pack(child))
                _, status = os.waitpid(child, 0)
                connection.sendall(NUMBER.pack(os.waitstatus_to_exitcode(status)))
                os._exit(0)
    sys.exit()


def become(order: Order) -> None:
    """Makes this process what the order says, as if Python had been started so."""
    for descriptor, path in enumerate((os.devnull, order["stdout"], order["stderr"])):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["workdir"])
    script = order["arguments"][0]
    first = "" if script in ("-c", "-m") else os.path.dirname(os.path.abspath(script))
    sys.path[0:1] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]


def run(arguments: list[str]) -> None:
    """Runs a script, module or code as the main program."""
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
    """Runs the main program as one of several processes, as torchrun starts them; none outlives who started it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    run(arguments)


def run_processes(order: Order) -> None:
    """Forks into several processes, which share what they all import."""
    from torch.distributed.elastic.utils.distributed import get_free_port
    from torch.multiprocessing import start_processes

    import hf_vit.training  # noqa: F401

    processes: Any = order["processes"]
    start_processes(run_as_one_of, (processes, get_free_port(), order["arguments"]), processes, start_method="fork")


if __name__ == "__main__":
    for name in LIBRARIES:
        importlib.import_module(name)
    with socket.socket(fileno=int(sys.argv[1])) as orders:
        task = serve(orders)
    become(task)
    if task["processes"] > 1:
        run_processes(task)
    else:
        run(task["arguments"])
