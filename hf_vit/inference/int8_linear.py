"""Linear layers in 8-bit integers, for processors with such matrix products (VNNI, AMX).

Shapes: M rows, K inputs, N outputs.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


LEVELS = 255  # of an activation: 0 to 255
LEVELS_OF_WEIGHT = 127  # on either side of 0


class Int8Linear(nn.Module):
    """A linear layer whose weights, per output, and inputs, all with one scale, are 8-bit integers.

    Args:
        linear: The layer that it stands for.
        low: (K,), the least value of each input over images like those to come.
        high: (K,), the largest.
    """

    # Channels of the input are evened out at the cost of the weights: SmoothQuant (https://arxiv.org/abs/2211.10438),
    # at its default of one half.

    inverse: Tensor
    weight: Tensor
    weight_scale: Tensor
    zeros: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear, low: Tensor, high: Tensor) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        largest = torch.maximum(high, -low).float().clamp_min(1e-5)  # (K,)
        smooth = (largest / weight.abs().amax(dim=0).clamp_min(1e-5)).sqrt()  # (K,)
        low, high = (low / smooth).min().clamp_max(0), (high / smooth).max().clamp_min(0)
        self.scale = max((high - low).item(), 1e-8) / LEVELS
        self.zero_point = round(-low.item() / self.scale)
        weight = weight * smooth
        scale = weight.abs().amax(dim=1).clamp_min(1e-8) / LEVELS_OF_WEIGHT  # (N,)
        self.register_buffer("inverse", 1 / (smooth * self.scale))
        self.register_buffer("weight", (weight / scale[:, None]).round().to(torch.int8))
        self.register_buffer("weight_scale", scale)
        self.register_buffer("zeros", torch.zeros(len(scale), dtype=torch.int64))
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().float())
        self.dtype = linear.weight.dtype

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., K) to (..., N)."""
        rows = inputs.flatten(0, -2)  # (M, K)
        integers = (rows * self.inverse + self.zero_point).round().clamp(0, LEVELS).to(torch.uint8)
        # What compiles does this once and for all.
        packed = torch.ops.onednn.qlinear_prepack(self.weight, list(rows.shape))
        post_operation = ("none", [0.0], "")  # with an argument, as torch.export cannot save an empty list
        inputs_and_weights = (integers, self.scale, self.zero_point, packed, self.weight_scale, self.zeros, self.bias)
        outputs = torch.ops.onednn.qlinear_pointwise(*inputs_and_weights, 1.0, 0, self.dtype, *post_operation)
        return outputs.unflatten(0, inputs.shape[:-1])


def quantize_blocks(model: nn.Module, run: Callable[[], Any]) -> None:
    """Replaces the linear layers of all blocks by ones in 8 bits, for the range of inputs that they have in `run`."""
    found = {
        f"{name}.{inner}": layer
        for name, block in model.named_modules()
        if type(block).__name__ == "HfViTLayer"  # ours, or the copy that a checkpoint brings
        for inner, layer in block.named_modules()
        if isinstance(layer, nn.Linear)
    }
    ranges: dict[str, tuple[Tensor, Tensor]] = {}

    def record(name: str, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        low, high = inputs[0].flatten(0, -2).float().aminmax(dim=0)
        if name in ranges:
            low, high = torch.minimum(ranges[name][0], low), torch.maximum(ranges[name][1], high)
        ranges[name] = (low, high)

    with ExitStack() as stack, torch.no_grad():
        for name, layer in found.items():
            stack.callback(layer.register_forward_pre_hook(partial(record, name)).remove)
        run()
    for name, layer in found.items():
        model.set_submodule(name, Int8Linear(layer, *ranges[name]))
