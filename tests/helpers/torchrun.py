"""torchrun with forked worker processes, which need not import the libraries that the launcher has imported.

`python -m tests.helpers.torchrun ...` takes the arguments of torchrun.
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
    """Run a worker process after restoring the default signal handlers, which the launcher has replaced."""
    assert unbuffered == "-u"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    run(list(arguments))


def launch(config: LaunchConfig, entrypoint: str | Callable[..., Any]) -> Callable[..., Any]:
    """Replacement for torchrun's `elastic_launch` that forks worker processes."""
    assert entrypoint == sys.executable
    config.start_method = "fork"
    gc.freeze()
    return elastic_launch(config, work)


if __name__ == "__main__":
    torchrun.elastic_launch = launch  # type: ignore[misc, assignment]
    torchrun.main(sys.argv[1:])
