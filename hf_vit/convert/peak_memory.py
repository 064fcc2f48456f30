"""The largest memory that this process has had."""

import resource
import sys
from pathlib import Path


def peak_memory() -> int:
    """Returns it in MiB.

    On Linux from the kernel's own account of the process: `getrusage` there counts what it was forked from too.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) // 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (2**20 if sys.platform == "darwin" else 2**10)
