"""torchrun, whose processes are forks of it: they have imported what it has.

`python -m tests.helpers.torchrun ...` takes torchrun's arguments.
"""

import gc
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed.run as torchrun
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from .zygote import run


def work(unbuffered: str, *arguments: str) -> None:
    """Runs one of the processes, which dies of signals that the launcher handles, as after a fresh start."""
    assert unbuffered == "-u"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    run(list(arguments))


def launch(config: LaunchConfig, entrypoint: str | Callable[..., Any]) -> Callable[..., Any]:
    """Takes the place of what torchrun starts its processes by."""
    assert entrypoint == sys.executable
    config.start_method = "fork"
    gc.freeze()
    return elastic_launch(config, work)


if __name__ == "__main__":
    torchrun.elastic_launch = launch  # type: ignore[misc, assignment]
    torchrun.main(sys.argv[1:])
