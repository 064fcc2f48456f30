"""Measure how time and memory of a forward pass scale with image size, batch size, depth and number of queries.

The model is a detector whose query tokens pass through all blocks. Each curve varies one of the four sizes; the other
three sizes are set by --image_size, --batch_size, --depth and --queries. Measurements are compared with predictions.
The predicted time is a linear function of FLOPs, bytes moved and number of blocks, with three coefficients fitted to
all measurements. The predicted memory is the memory of the tensors alive in the middle of an MLP, without fitted
coefficients. On CPUs, resident memory is measured, which includes buffers of kernels and of the allocator. Therefore,
the ratio of measured to predicted memory is above 1, but it should be constant.
"""

import ctypes
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from scipy.optimize import nnls

from hf_vit import HfViTConfig, HfViTForObjectDetection, visualize
from hf_vit.convert.loading import peak_memory
from hf_vit.model.configuration_hf_vit import PRESETS, to_pair

from .harness import DTYPES, ModelArguments, describe_run, median_of, print_header, print_row, save, time_steps


@dataclass(kw_only=True)
class Arguments(ModelArguments):
    """Options of the benchmark."""

    preset: str = field(default="tiny", metadata={"help": "width of the model", "choices": list(PRESETS)})
    depth: int = field(default=12, metadata={"help": "number of blocks"})
    queries: int = field(default=100, metadata={"help": "number of queries"})
    image_sizes: list[int] = field(
        default_factory=lambda: [224, 384, 512, 768, 1024], metadata={"help": "image sizes in pixels"}
    )
    batch_sizes: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16], metadata={"help": "images per step"})
    depths: list[int] = field(default_factory=lambda: [3, 6, 12, 24], metadata={"help": "numbers of blocks"})
    query_counts: list[int] = field(
        default_factory=lambda: [1, 100, 300, 900], metadata={"help": "numbers of queries"}
    )
    picture: str | None = field(default=None, metadata={"help": "file for a plot of measured and predicted curves"})


@dataclass(frozen=True)
class Point:
    """Point of a curve: the sizes of a model and its input."""

    image_size: int
    batch_size: int
    depth: int
    queries: int

    def make_step(self, args: Arguments) -> Callable[[], object]:
        """Return a function that runs a forward pass on noise."""
        config = HfViTConfig.from_preset(
            args.preset,
            num_hidden_layers=self.depth,
            detection_config={"decoder": "queries", "num_queries": self.queries},
        )
        model = HfViTForObjectDetection(config).to(args.device, DTYPES[args.dtype]).eval()
        images = torch.randn(self.batch_size, config.num_channels, self.image_size, self.image_size)
        images = images.to(args.device, DTYPES[args.dtype])
        return torch.inference_mode()(lambda: model(images))

    def costs(self, config: HfViTConfig, item_size: int) -> tuple[float, float, float]:
        """Return the FLOPs, bytes moved and number of blocks, from which the time is predicted."""
        width, inner, tokens = config.hidden_size, config.intermediate_size, self.num_tokens(config)
        products = (
            tokens * (4 * width**2 + 2 * width * inner) + 2 * tokens**2 * width
        )  # multiply-adds of one block for one image
        embedding = (tokens - self.queries) * width * config.num_channels * math.prod(to_pair(config.patch_size))
        operations = 2.0 * self.batch_size * (self.depth * products + embedding)
        weights = 4 * width**2 + 2 * width * inner
        # Tensors of width D read and written per block: qkv 4, attention 4, projection 2, norms 4, residuals 6, MLP 2.
        states = self.batch_size * tokens * (22 * width + 4 * inner)
        return operations, float(item_size * self.depth * (weights + states)), float(self.depth)

    def memory(self, config: HfViTConfig, item_size: int) -> float:
        """Return the bytes of tensors alive in the middle of an MLP: tokens, normalized tokens, both hidden states."""
        states = 2 * config.hidden_size + 2 * config.intermediate_size
        return float(item_size * self.batch_size * self.num_tokens(config) * states)

    def num_tokens(self, config: HfViTConfig) -> int:
        """Return the number of tokens per image, L."""
        rows, columns = (self.image_size // side for side in to_pair(config.patch_size))
        return config.num_prefix_tokens + rows * columns + self.queries


def measure_memory(step: Callable[[], object], device: str) -> float | None:
    """Return the additional peak memory of a step in bytes, or None if the system does not report it."""
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return float(torch.cuda.max_memory_allocated() - before)
    if sys.platform != "linux":
        return None
    ctypes.CDLL(None).malloc_trim(0)  # returns freed memory, whose reuse would not be measured
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current memory
    before = peak_memory()
    step()
    return float(peak_memory() - before) * 2**20


def curves_of(args: Arguments) -> dict[str, list[Point]]:
    """Return the points of each curve by curve name."""
    shared = Point(args.image_size, args.batch_size, args.depth, args.queries)
    values = {
        "image_size": args.image_sizes,
        "batch_size": args.batch_sizes,
        "depth": args.depths,
        "queries": args.query_counts,
    }
    return {name: [replace(shared, **{name: value}) for value in column] for name, column in values.items()}


def measure(points: list[Point], args: Arguments) -> list[dict[str, Any]]:
    """Return the measurements and predictions for each point."""
    config, item_size = HfViTConfig.from_preset(args.preset), DTYPES[args.dtype].itemsize
    rows = []
    for point in points:
        step = point.make_step(args)
        seconds = median_of(time_steps({"step": step}, args), "step")
        rows.append({**asdict(point), "seconds": seconds, "bytes": measure_memory(step, args.device)})
    costs = np.array([point.costs(config, item_size) for point in points])
    times = np.array([row["seconds"] for row in rows])
    scale = costs.max(axis=0)
    # Non-negative least squares fit that minimizes relative errors
    rates = nnls(costs / scale / times[:, None], np.ones(len(points)))[0] / scale
    for row, point, predicted in zip(rows, points, costs @ rates, strict=True):
        row |= {"predicted_seconds": float(predicted), "predicted_bytes": point.memory(config, item_size)}
    per_operation, per_byte, per_block = rates
    print(
        f"Fitted: {per_operation * 1e12:.3g} ms per GFLOP, {per_byte * 1e12:.3g} ms per GB, "
        f"{per_block * 1e3:.3g} ms per block",
        flush=True,
    )
    return rows


def draw(curves: dict[str, list[dict[str, Any]]], file: str) -> None:
    """Plot measured and predicted time and memory of each curve."""
    figure = visualize.figures.new_figure(14, 6)
    grid = figure.subplots(2, len(curves))
    for column, (name, rows) in enumerate(curves.items()):
        for axes, measured, unit, factor in zip(
            grid[:, column], ("seconds", "bytes"), ("ms", "MiB"), (1e3, 2**-20), strict=True
        ):
            values = [row[name] for row in rows]
            for key, style in ((measured, "o-"), (f"predicted_{measured}", "--")):
                known = [(value, row[key] * factor) for value, row in zip(values, rows, strict=True) if row[key]]
                axes.plot(*zip(*known, strict=True) if known else ([], []), style, label=key.replace("_", " "))
            axes.set(xlabel=name.replace("_", " "), ylabel=unit, xscale="log", yscale="log")
            axes.set_xticks(values, values)
            axes.minorticks_off()
            axes.legend(fontsize=8)
    visualize.figures.save(figure, Path(file))


def main(args: Arguments) -> None:
    """Measure all points, print the measurements and predictions, and plot the curves."""
    run = describe_run(args, transformers)
    torch.manual_seed(0)
    curves = curves_of(args)
    points = list(dict.fromkeys(point for column in curves.values() for point in column))
    rows = dict(zip(points, measure(points, args), strict=True))
    print_header("curve", "value", "ms", "ratio to predicted", "MiB", "ratio to predicted")
    for name, column in curves.items():
        for row in map(rows.__getitem__, column):
            taken = row["bytes"]
            memory = ("", "") if taken is None else (taken / 2**20, taken / row["predicted_bytes"])
            print_row(name, row[name], row["seconds"] * 1e3, row["seconds"] / row["predicted_seconds"], *memory)
    found = {name: [rows[point] for point in column] for name, column in curves.items()}
    if args.picture:
        draw(found, args.picture)
    save({**run, "curves": found}, args.output)
