"""Layers that several heads share, and their initialization.

Shapes: B batch, C channels, H W pixels, h w patch grid, N = h·w patches, P prefix tokens, Q queries, D hidden size, K
classes, s how much finer the output of a head is than the grid.
"""

import math
from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from .shared import at_least_float32, run_unpadded, sum_over_processes


# Logit of a class where most queries have none (https://arxiv.org/abs/1708.02002)
PRIOR_BIAS = math.log(0.01 / 0.99)


# The library initializes no module of remote code that has no weights of its own, so only such modules belong here.
class HfViTInitialized(nn.Module):
    """A layer that initializes its own weights; those of all others follow from their kind."""

    def initialize(self, std: float) -> None:
        """Sets the weights that this very layer holds, not those of layers within it.

        Use the functions of `transformers.initialization`, which skip weights that a checkpoint has filled.

        Args:
            std: `config.initializer_range`.
        """
        raise NotImplementedError


class HfViTRecorded(nn.Module):
    """A module whose outputs the library records, by hooks that are functions within a function.

    Such cannot be pickled, so they stay behind; `HfViTPreTrainedModel` installs them again.
    """

    def __getstate__(self) -> dict[str, Any]:
        recording = maybe_install_capturing_hooks.__module__
        hooks = [item for item in self._forward_hooks.items() if item[1].__module__ != recording]
        return {**vars(self), "_forward_hooks": OrderedDict(hooks)}


class HfViTHeadConv2d(HfViTInitialized, nn.Conv2d):
    """A convolution of a head, initialized by its fan-in (He, https://arxiv.org/abs/1502.01852)."""

    initial_bias = 0.0
    initial_gain = 1.0  # factor of the weights
    initial_limit: float | None = None  # largest weight, in place of the one by fan-in

    def initialize(self, std: float) -> None:
        """Draws weights uniformly up to the limit."""
        fan_in = self.in_channels // self.groups * math.prod(self.kernel_size)
        limit = self.initial_limit or self.initial_gain * math.sqrt(6 / fan_in)
        init.uniform_(self.weight, -limit, limit)
        if self.bias is not None:
            init.constant_(self.bias, self.initial_bias)

    def forward(self, input: Tensor) -> Tensor:
        """(B, C, H, W) to (B, C', H', W')."""
        # Through a view, whose gradient has the strides of the weight, which DDP compares, whatever those of the maps.
        weight = self.weight.flatten().view_as(self.weight) if self.training else self.weight
        return self._conv_forward(input, weight, self.bias)


class HfViTHeadConvTranspose2d(HfViTInitialized, nn.ConvTranspose2d):
    """A transposed convolution of a head, initialized in the same way."""

    def initialize(self, std: float) -> None:
        """Draws weights uniformly; only each stride-th row and column of the kernel meets a result."""
        limit = math.sqrt(6 * math.prod(self.stride) / (self.in_channels // self.groups * math.prod(self.kernel_size)))
        init.uniform_(self.weight, -limit, limit)
        if self.bias is not None:
            init.zeros_(self.bias)


class HfViTHeadLinear(HfViTInitialized, nn.Linear):
    """A linear layer of a decoder, initialized by fan-in and fan-out (Glorot)."""

    def initialize(self, std: float) -> None:
        """Draws weights uniformly."""
        init.xavier_uniform_(self.weight)
        init.zeros_(self.bias)


class HfViTPredictor(HfViTInitialized, nn.Linear):
    """The last layer of a head, with an initial bias and, if `starts_at_zero`, initial weights of zero."""

    def __init__(self, size: int, out_size: int, initial_bias: float = 0.0, starts_at_zero: bool = False) -> None:
        super().__init__(size, out_size)
        self.initial_bias, self.starts_at_zero = initial_bias, starts_at_zero

    def initialize(self, std: float) -> None:
        """Draws weights as of a linear layer, or sets them to zero, and sets the bias."""
        init.trunc_normal_(self.weight, mean=0.0, std=std)
        if self.starts_at_zero:
            init.zeros_(self.weight)
        init.constant_(self.bias, self.initial_bias)


class HfViTQueries(HfViTInitialized, nn.Embedding):
    """Learned queries that join the patches."""

    def initialize(self, std: float) -> None:
        """Draws with a deviation of 1, so that no two of them are alike."""
        init.normal_(self.weight, mean=0.0, std=1.0)

    def append_to(self, hidden_states: Tensor) -> Tensor:
        """Returns tokens (B, P + N, D) with the queries behind them, (B, P + N + Q, D)."""
        # Not `weight`, which may lie on a disk: only a call fetches it.
        queries = self(torch.arange(self.num_embeddings, device=hidden_states.device))
        queries = queries.to(hidden_states.device).expand(hidden_states.shape[0], -1, -1)
        return torch.cat((hidden_states, queries), dim=1)


class HfViTPredictionHead(nn.Module):
    """Linear layers of width `size` with ReLU between, from queries to `out_size` predictions."""

    # The last one takes `start`: `initial_bias` and `starts_at_zero` of `HfViTPredictor`.

    def __init__(self, size: int, out_size: int, num_layers: int = 3, **start: Any) -> None:
        super().__init__()
        inner = [nn.Linear(size, size) for _ in range(num_layers - 1)]
        self.layers = nn.ModuleList([*inner, HfViTPredictor(size, out_size, **start)])

    def forward(self, features: Tensor) -> Tensor:
        """(..., size) to (..., out_size)."""
        for layer in self.layers[:-1]:
            features = F.relu(layer(features))
        output: Tensor = self.layers[-1](features)
        return output


class HfViTLayerNorm2d(nn.LayerNorm):
    """Layer norm over the channels of each patch."""

    def forward(self, maps: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, C, h, w) to the same shape; a mask makes no difference."""
        return super().forward(maps.movedim(1, -1)).movedim(-1, 1)


class HfViTInstanceNorm2d(nn.GroupNorm):
    """Norm of each channel over the patches of an image, without those that are padding."""

    # Source: https://arxiv.org/abs/1607.08022. It is a group norm with a group for each channel.

    def forward(self, maps: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, C, h, w) to the same shape; `mask` is (B, h, w) bool, False for padding."""
        return run_unpadded(super().forward, mask, maps)


class HfViTBatchNorm2d(nn.BatchNorm2d):
    """Batch norm over the patches of all processes, without those that are padding."""

    # torch's own synchronized batch norm works on GPUs alone, and none leaves padding out. Several processes have the
    # gradients that one would have; accumulated batches do not have those of one, as each is normalized by itself.

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    momentum: float

    def forward(self, maps: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, C, h, w) to the same shape; `mask` is (B, h, w) bool, False for padding."""
        if not self.training:
            return super().forward(maps)
        counted = torch.ones_like(maps[:, 0]) if mask is None else mask.to(maps.dtype)  # (B, h, w)
        counted = at_least_float32(counted[:, None])  # (B, 1, h, w)
        values = maps.to(counted.dtype)
        total = torch.cat(((values * counted).sum((0, 2, 3)), counted.sum()[None]))  # (C + 1,)
        total = sum_over_processes(total)
        mean, count = total[:-1] / total[-1], total[-1]
        centered = values - mean[:, None, None]
        variance = sum_over_processes((centered.square() * counted).sum((0, 2, 3))) / count
        with torch.no_grad():
            unbiased = variance * count / (count - 1).clamp_min(1)
            for running, value in ((self.running_mean, mean), (self.running_var, unbiased)):
                running.lerp_(value.to(running.dtype), self.momentum)
            self.num_batches_tracked.add_(1)
        scale = self.weight * (variance + self.eps).rsqrt()
        return (centered * scale[:, None, None] + self.bias[:, None, None]).to(maps.dtype)


def make_map_norm(name: str, size: int) -> HfViTBatchNorm2d | HfViTInstanceNorm2d | HfViTLayerNorm2d:
    """Returns the norm of maps (B, `size`, h, w) that an option names: "batch", "instance" or "layer"."""
    if name == "layer":
        return HfViTLayerNorm2d(size, eps=1e-6)
    return HfViTBatchNorm2d(size) if name == "batch" else HfViTInstanceNorm2d(num_groups=size, num_channels=size)


class HfViTFanInLinear(HfViTInitialized, nn.Linear):
    """A linear layer that keeps the deviation of what comes in, whatever that of the blocks' weights is."""

    def initialize(self, std: float) -> None:
        """Draws weights by fan-in (LeCun), and sets the bias to zero."""
        init.trunc_normal_(self.weight, mean=0.0, std=self.in_features**-0.5)
        if self.bias is not None:
            init.zeros_(self.bias)


class HfViTNamedHead(nn.Module):
    """A head under the name of its kind, so that the weights of one kind are never loaded into another."""

    def __init__(self, name: str, decoder: nn.Module) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, decoder)

    @property
    def decoder(self) -> nn.Module:
        """The head itself."""
        return self.get_submodule(self.name)

    def forward(self, *inputs: Any) -> Any:
        """Runs the head."""
        return self.decoder(*inputs)
