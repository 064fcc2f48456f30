"""Throughput of a training: images per second, FLOPs, memory, and the progress bar.

Shapes: N patches, P prefix tokens, L = P + N, D hidden size; of windows W of S patches each.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ProgressCallback

from ...model.configuration_hf_vit import HfViTConfig, to_pair
from ...model.embeddings import Grid, HfViTPatchEmbeddings
from ...model.encoder import window_size


@dataclass(frozen=True)
class Work:
    """What has been done in a time.

    Args:
        images: Number of images that went forward and back.
        flops: Floating-point operations of the model for them.
        seconds: The time.
    """

    images: int
    flops: int
    seconds: float


class Throughput:
    """Counts work, from the first batch on, and times it without the pauses."""

    def __init__(self) -> None:
        """Begins; the clock starts with the first batch."""
        self.start: float | None = None
        self._images = 0
        self._flops = 0

    def count(self, images: int, flops: int) -> None:
        """Adds a batch that begins now."""
        if self.start is None:
            self.start = time.perf_counter()
        self._images += images
        self._flops += flops

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clock while something else is done."""
        began = time.perf_counter()
        try:
            yield
        finally:
            if self.start is not None:
                self.start += time.perf_counter() - began

    def take(self) -> Work:
        """Returns the work since the last call, and begins to count anew; there must be some."""
        assert self.start is not None
        now = time.perf_counter()
        work = Work(self._images, self._flops, now - self.start)
        self.start, self._images, self._flops = now, 0, 0
        return work


# 10^12 operations per second in bfloat16 and float16, summed up in float32, without sparsity, as NVIDIA's data sheets
# and architecture white papers of the products say. The first name that occurs in a device's own counts.
PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200 NVL": 835.0,
    "H200": 989.4,
    "GH200": 989.4,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.4,
    "A100": 312.0,
    "A10G": 70.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
    "RTX 3090 Ti": 80.0,
    "RTX 3090": 71.0,
}


def peak_flops(device_name: str) -> float | None:
    """Returns the operations per second of a device in bfloat16, or None where they are not known.

    Args:
        device_name: As `torch.cuda.get_device_name` says it.
    """
    return next((tflops * 1e12 for name, tflops in PEAK_TFLOPS.items() if name in device_name), None)


def forward_flops(config: HfViTConfig, height: int, width: int) -> int:
    """Counts the floating-point operations of `HfViTModel` on one image, on which the heads of all tasks stand.

    A product that is added counts as two. Only matrix products and convolutions count, as is usual; heads come on top
    (that of a classifier takes 2 · D · number of labels). Forward and backward together take three times as many.

    Args:
        config: The model.
        height: Of the image in pixels.
        width: Of the image in pixels.

    Raises:
        ValueError: if the image does not fit the model.
    """
    with torch.device("meta"):
        grid = HfViTPatchEmbeddings(config).grid(torch.empty(1, config.num_channels, height, width))
    patch_height, patch_width = to_pair(config.patch_size)
    num_patches, hidden = grid[0] * grid[1], config.hidden_size
    num_tokens = num_patches + config.num_prefix_tokens
    embeddings = num_patches * hidden * config.num_channels * patch_height * patch_width
    projections = num_tokens * 4 * hidden**2  # query, key, value and what follows the attention
    mlp = num_tokens * (3 if config.use_gated_mlp else 2) * hidden * config.intermediate_size
    layers = config.num_hidden_layers * (projections + mlp)
    return 2 * (embeddings + layers + attention_products(config, grid) + pooling_products(config, num_patches))


def attention_products(config: HfViTConfig, grid: Grid) -> int:
    """Counts the products of queries with keys, and of weights with values, in all blocks on a patch grid."""
    num_prefix = config.num_prefix_tokens
    num_tokens = num_prefix + grid[0] * grid[1]
    pairs = num_tokens**2
    windows = window_size(config, grid)
    if windows is None:
        return config.num_hidden_layers * 2 * pairs * config.hidden_size
    rows, columns = (-(length // -side) for length, side in zip(grid, windows, strict=True))
    in_window = windows[0] * windows[1]  # the last ones are filled up
    pairs_in_windows = rows * columns * in_window * (num_prefix + in_window) + num_prefix * num_tokens
    num_global = len(set(config.global_attention_layers))
    all_pairs = num_global * pairs + (config.num_hidden_layers - num_global) * pairs_in_windows
    return 2 * all_pairs * config.hidden_size


def pooling_products(config: HfViTConfig, num_patches: int) -> int:
    """Counts the products of what sums up the tokens as one vector."""
    hidden, products = config.hidden_size, 0
    if config.pooling == "attention":
        keys_and_values, pairs = 2 * num_patches * hidden**2, num_patches
        mlp = 2 * hidden * config.intermediate_size
        products += keys_and_values + 2 * hidden**2 + 2 * pairs * hidden + mlp
    if config.use_pooler:
        products += (2 if config.pooling == "cls_mean" else 1) * hidden**2
    return products


class TrainingProgress(ProgressCallback):
    """The library's bar of steps with the time left, which also shows loss, images per second and peak memory.

    In a training that is taken up again it begins where that was, and tells the time from there.
    """

    training_bar: Any
    prediction_bar: Any

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Draws the bar."""
        super().on_train_begin(args, state, control, **kwargs)
        self.current_step = state.global_step
        if self.training_bar is not None:
            bar = self.training_bar
            bar.unit = "step"
            bar.initial = bar.n = bar.last_print_n = state.global_step
            bar.refresh()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any],
        **kwargs: Any,
    ) -> None:
        """Writes what is logged above the bar, and the latest of it beside the bar."""
        super().on_log(args, state, control, logs=logs, **kwargs)
        if self.training_bar is not None and "images_per_second" in logs:
            shown = {"loss": f"{logs['loss']:.4g}", "img/s": f"{logs['images_per_second']:.4g}"}
            self.training_bar.set_postfix(**shown, memory=f"{logs['peak_memory_mib']} MiB")

    def close(self) -> None:
        """Leaves the bars as they are, so that what is said next begins on a line of its own."""
        for bar in (self.prediction_bar, self.training_bar):
            if bar is not None:
                bar.close()
        self.prediction_bar = self.training_bar = None
