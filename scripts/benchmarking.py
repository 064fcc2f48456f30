"""What the benchmark scripts share: steps that are timed in turns, what they ran on, results as JSON."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def in_turns(
    steps: dict[str, Callable[[], object]], rounds: int, min_seconds: float, device: str
) -> list[dict[str, float]]:
    """Times every step once a round, repeated where it is short, and returns the seconds of each in each round."""

    def seconds(name: str, repeats: int = 1) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            steps[name]()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / repeats

    warm = [{name: seconds(name) for name in steps} for _ in range(2)]
    repeats = max(1, round(min_seconds / min(warm[-1].values())))
    names = [*steps]
    # who goes first changes, as the place in the round shows in the time
    orders = (names[turn % len(names) :] + names[: turn % len(names)] for turn in range(rounds))
    return [{name: seconds(name, repeats) for name in order} for order in orders]


def describe_device(device: str) -> str:
    """Names the GPU, or says how many threads the CPU has."""
    return torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def describe_versions(*libraries: ModuleType) -> str:
    """Names libraries with their versions."""
    return ", ".join(f"{library.__name__} {library.__version__}" for library in libraries)


def save(result: dict[str, Any], output: str | None) -> None:
    """Writes what was measured as JSON, if a file was asked for."""
    if output:
        Path(output).write_text(json.dumps(result, indent=1))
