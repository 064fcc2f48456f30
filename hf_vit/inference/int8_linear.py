"""Linear layers that compute with 8-bit integers, for CPUs with 8-bit matrix multiplication (VNNI, AMX).

In shapes, M is the number of rows, K the number of inputs and N the number of outputs.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


# Activations are quantized to 0…255. Without VNNI, CPUs add pairs of products in 16 bits, which 127 does not exceed.
LEVELS = 255 if torch.cpu._is_vnni_supported() else 127
LEVELS_OF_WEIGHT = 127  # Weights are quantized to -127…127.


class Int8Linear(nn.Module):
    """A linear layer with 8-bit weights, with one scale per output channel, and 8-bit inputs with a single scale.

    Args:
        linear: The layer to quantize.
        low: Smallest value of each input channel on calibration images, (K,).
        high: Largest value of each input channel on calibration images, (K,).
    """

    # The layer uses SmoothQuant (https://arxiv.org/abs/2211.10438) with the default strength of 0.5: input channels
    # with large values are scaled down, and the weights of these channels are scaled up.

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
        """Maps inputs (..., K) to outputs (..., N)."""
        rows = inputs.flatten(0, -2)  # (M, K)
        integers = (rows * self.inverse + self.zero_point).round().clamp(0, LEVELS).to(torch.uint8)
        # The compiler replaces this call by a constant, so the weights are packed only once.
        packed = torch.ops.onednn.qlinear_prepack(self.weight, list(rows.shape))
        post_operation = ("none", [0.0], "")  # 0.0 is unused: torch.export cannot save an empty list
        inputs_and_weights = (integers, self.scale, self.zero_point, packed, self.weight_scale, self.zeros, self.bias)
        outputs = torch.ops.onednn.qlinear_pointwise(*inputs_and_weights, 1.0, 0, self.dtype, *post_operation)
        return outputs.unflatten(0, inputs.shape[:-1])


def quantize_blocks(model: nn.Module, run: Callable[[], Any]) -> None:
    """Replaces the linear layers of all transformer blocks by `Int8Linear` layers.

    Args:
        model: The model to change.
        run: Function that runs the model on calibration images. Input ranges are measured while it runs.
    """
    found = {
        f"{name}.{inner}": layer
        for name, block in model.named_modules()
        if type(block).__name__ == "HfViTLayer"  # by name, because remote code has a copy of the class
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
