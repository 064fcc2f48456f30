"""Functions that all benchmarks share: options, rounds in random order, ratios, tables, and results as JSON."""

import io
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any, TypeVar

import torch
from PIL import Image
from torch import nn


T = TypeVar("T")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(kw_only=True)
class OutputArguments:
    """Output options of a benchmark."""

    output: str | None = field(default=None, metadata={"help": "file for the result as JSON"})


@dataclass(kw_only=True)
class RoundArguments(OutputArguments):
    """Options for the rounds of a benchmark."""

    rounds: int = field(default=7, metadata={"help": "number of rounds; each measures all candidates in random order"})


@dataclass(kw_only=True)
class StepArguments(RoundArguments):
    """Options for the timed steps of a benchmark."""

    min_seconds: float = field(
        default=0.5, metadata={"help": "minimum time per measurement; short steps are repeated"}
    )
    device: str = field(default="cpu", metadata={"help": "cpu or cuda"})


@dataclass(kw_only=True)
class ModelArguments(StepArguments):
    """Options for the input images of a benchmark."""

    image_size: int = field(default=224, metadata={"help": "height and width of the images in pixels"})
    batch_size: int = field(default=1, metadata={"help": "images per step"})
    dtype: str = field(default="float32", metadata={"help": ", ".join(DTYPES)})

    def random_images(self) -> torch.Tensor:
        """Return a batch of random noise images, float32 of shape (B, 3, H, W)."""
        return torch.randn(self.batch_size, 3, self.image_size, self.image_size).to(self.device)


def make_photos(size: Sequence[int], count: int = 16) -> list[bytes]:
    """Return encoded JPEG images of smooth random colors. They take about as long to decode as photos."""
    photos = []
    for number in range(count):
        noise = torch.rand(24, 32, 3, generator=torch.Generator().manual_seed(number))
        stream = io.BytesIO()
        Image.fromarray((255 * noise).byte().numpy()).resize((size[0], size[1])).save(stream, "JPEG", quality=90)
        photos.append(stream.getvalue())
    return photos


def in_rounds(measurements: Mapping[str, Callable[[], T]], rounds: int) -> Iterator[dict[str, T]]:
    """Yield the results of each round by name. A round calls every function once, in random order."""
    names, order = list(measurements), random.Random(0)
    for _ in range(rounds):
        found = {name: measurements[name]() for name in order.sample(names, len(names))}
        yield {name: found[name] for name in names}


def time_steps(steps: Mapping[str, Callable[[], object]], args: StepArguments) -> list[dict[str, float]]:
    """Return the seconds of each step in each round. Short steps are repeated for a precise measurement."""

    def seconds(step: Callable[[], object], repeats: int = 1) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        if args.device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / repeats

    warm = [[seconds(step) for step in steps.values()] for _ in range(2)]
    repeats = max(1, round(args.min_seconds / min(warm[-1])))
    return list(in_rounds({name: partial(seconds, step, repeats) for name, step in steps.items()}, args.rounds))


def median_of(rounds: Sequence[Mapping[str, float]], name: str) -> float:
    """Return the median over the rounds of the measurement `name`."""
    return median(found[name] for found in rounds)


def median_ratio(rounds: Sequence[Mapping[str, float]], name: str, to: str) -> float:
    """Return the median over the rounds of the ratio of the measurement `name` to the measurement `to`."""
    return median(found[name] / found[to] for found in rounds)


def compare_with_peer(
    task: str, models: Mapping[str, tuple[nn.Module, Callable[[Any], object]]], args: ModelArguments
) -> list[Any]:
    """Time two models from pixels to decoded outputs and print a row of the table.

    Args:
        task: First cell of the row.
        models: Two models by name, "hf_vit" and a peer, each with the function that decodes its outputs.
        args: Options of the measurement.

    Returns:
        Task, name of the peer, images per second of both models, and the ratio, above 1 if "hf_vit" is faster.
    """
    images = args.random_images().to(DTYPES[args.dtype])

    def make_step(model: nn.Module, decode: Callable[[Any], object]) -> Callable[[], object]:
        model.to(args.device, DTYPES[args.dtype]).eval()
        return torch.inference_mode()(lambda: decode(model(pixel_values=images)))

    rounds = time_steps({name: make_step(*pair) for name, pair in models.items()}, args)
    (peer,) = set(models) - {"hf_vit"}
    speeds = [args.batch_size / median_of(rounds, name) for name in ("hf_vit", peer)]
    row = [task, peer, *speeds, median_ratio(rounds, peer, to="hf_vit")]
    print_row(*row)
    return row


def describe_run(args: OutputArguments, *libraries: ModuleType) -> dict[str, Any]:
    """Print and return the hardware, library versions and options of a benchmark."""
    device = args.device if isinstance(args, StepArguments) else "cuda" if torch.cuda.is_available() else "cpu"
    run = {
        "device": torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads",
        "versions": ", ".join(f"{library.__name__} {library.__version__}" for library in (torch, *libraries)),
        "arguments": vars(args),
    }
    print("; ".join(map(str, run.values())), flush=True)
    return run


def print_header(*columns: str) -> None:
    """Print the header of a Markdown table."""
    print_row(*columns)
    print_row(*["---"] * len(columns))


def print_row(*values: Any) -> None:
    """Print a row of a Markdown table."""
    cells = (f"{value:.3f}" if isinstance(value, float) else str(value) for value in values)
    print(f"| {' | '.join(cells)} |", flush=True)


def save(result: dict[str, Any], output: str | None) -> None:
    """Write a result to the JSON file `output` unless it is None."""
    if output:
        Path(output).write_text(json.dumps(result, indent=1) + "\n")
