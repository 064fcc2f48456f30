"""Layers that several heads share, and the initialization of these layers.

Shapes: B batch, C channels, H W pixels, h w patch grid, N = h·w patches, P prefix tokens, Q queries, D
hidden size, K classes, s upsampling factor of a head from the patch grid to its output.
"""

import math
from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from .shared import run_unpadded, sum_over_processes, to_float32_or_higher


# Initial logit of each class. It gives a probability of 0.01, because most queries do not match an object (RetinaNet,
# https://arxiv.org/abs/1708.02002).
PRIOR_BIAS = math.log(0.01 / 0.99)


# Subclasses must have parameters, because transformers does not initialize remote-code modules without parameters.
class HfViTInitialized(nn.Module):
    """Base class of layers that initialize their own weights. Other layers are initialized according to their type."""

    def initialize(self, std: float) -> None:
        """Initializes the weights of this layer, but not of its submodules.

        Use the functions of `transformers.initialization`, which skip weights loaded from a checkpoint.

        Args:
            std: `config.initializer_range`.
        """
        raise NotImplementedError


class HfViTRecorded(nn.Module):
    """Base class of modules whose outputs transformers records with forward hooks.

    The hooks are local functions, which cannot be pickled, so they are removed before pickling.
    `HfViTPreTrainedModel` installs them again.
    """

    def __getstate__(self) -> dict[str, Any]:
        recording = maybe_install_capturing_hooks.__module__
        hooks = [item for item in self._forward_hooks.items() if item[1].__module__ != recording]
        return {**vars(self), "_forward_hooks": OrderedDict(hooks)}


class HfViTHeadConv2d(HfViTInitialized, nn.Conv2d):
    """Convolution of a head, with initial weights scaled by fan-in (He, https://arxiv.org/abs/1502.01852)."""

    initial_bias = 0.0
    initial_gain = 1.0  # factor for the limit of the initial weights, which is computed from the fan-in
    initial_limit: float | None = None  # fixed limit of the initial weights; None computes it from the fan-in

    def initialize(self, std: float) -> None:
        """Draws weights uniformly from [-limit, limit] and sets the bias to `initial_bias`."""
        fan_in = self.in_channels // self.groups * math.prod(self.kernel_size)
        limit = self.initial_limit or self.initial_gain * math.sqrt(6 / fan_in)
        init.uniform_(self.weight, -limit, limit)
        if self.bias is not None:
            init.constant_(self.bias, self.initial_bias)

    def forward(self, input: Tensor) -> Tensor:
        """Convolves maps (B, C, H, W) and returns maps (B, C', H', W')."""
        # DDP expects gradients to have the strides of the weight. With this view, they have these strides in all
        # memory formats.
        weight = self.weight.flatten().view_as(self.weight) if self.training else self.weight
        return self._conv_forward(input, weight, self.bias)


class HfViTHeadConvTranspose2d(HfViTInitialized, nn.ConvTranspose2d):
    """Transposed convolution of a head, with initial weights scaled by fan-in (He)."""

    def initialize(self, std: float) -> None:
        """Draws weights uniformly. Fan-in counts only the kernel elements that contribute to one output pixel."""
        limit = math.sqrt(6 * math.prod(self.stride) / (self.in_channels // self.groups * math.prod(self.kernel_size)))
        init.uniform_(self.weight, -limit, limit)
        if self.bias is not None:
            init.zeros_(self.bias)


class HfViTHeadLinear(HfViTInitialized, nn.Linear):
    """Linear layer of a decoder, with initial weights scaled by fan-in and fan-out (Glorot)."""

    def initialize(self, std: float) -> None:
        """Draws weights uniformly (Glorot) and sets the bias to zero."""
        init.xavier_uniform_(self.weight)
        init.zeros_(self.bias)


class HfViTPredictor(HfViTInitialized, nn.Linear):
    """Last layer of a head, with a given initial bias. If `starts_at_zero`, the initial weights are zero."""

    def __init__(self, size: int, out_size: int, initial_bias: float = 0.0, starts_at_zero: bool = False) -> None:
        super().__init__(size, out_size)
        self.initial_bias, self.starts_at_zero = initial_bias, starts_at_zero

    def initialize(self, std: float) -> None:
        """Draws weights from a truncated normal or sets them to zero, and sets the bias to `initial_bias`."""
        init.trunc_normal_(self.weight, mean=0.0, std=std)
        if self.starts_at_zero:
            init.zeros_(self.weight)
        init.constant_(self.bias, self.initial_bias)


class HfViTQueries(HfViTInitialized, nn.Embedding):
    """Learned queries that the encoder processes together with the patches."""

    def initialize(self, std: float) -> None:
        """Draws the queries with a standard deviation of 1, so that they differ from each other."""
        init.normal_(self.weight, mean=0.0, std=1.0)

    def append_to(self, hidden_states: Tensor) -> Tensor:
        """Appends the queries to tokens (B, P + N, D) and returns (B, P + N + Q, D)."""
        # Call the module instead of reading `weight`, because accelerate may have offloaded the weight to disk.
        queries = self(torch.arange(self.num_embeddings, device=hidden_states.device))
        queries = queries.to(hidden_states.device).expand(hidden_states.shape[0], -1, -1)
        return torch.cat((hidden_states, queries), dim=1)


class HfViTPredictionHead(nn.Module):
    """An MLP with ReLU that computes `out_size` predictions from queries of width `size`."""

    # `start` contains arguments of the last layer, a `HfViTPredictor`: `initial_bias` and `starts_at_zero`.

    def __init__(self, size: int, out_size: int, num_layers: int = 3, **start: Any) -> None:
        super().__init__()
        inner = [nn.Linear(size, size) for _ in range(num_layers - 1)]
        self.layers = nn.ModuleList([*inner, HfViTPredictor(size, out_size, **start)])

    def forward(self, features: Tensor) -> Tensor:
        """Maps features (..., size) to predictions (..., out_size)."""
        for layer in self.layers[:-1]:
            features = F.relu(layer(features))
        output: Tensor = self.layers[-1](features)
        return output


class HfViTLayerNorm2d(nn.LayerNorm):
    """Layer norm over the channels of each patch of a feature map."""

    def forward(self, maps: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalizes maps (B, C, h, w); `mask` is accepted for compatibility and has no effect."""
        return super().forward(maps.movedim(1, -1)).movedim(-1, 1)


class HfViTInstanceNorm2d(nn.GroupNorm):
    """Instance norm: normalizes each channel over the patches of one image, excluding padding."""

    # Source: https://arxiv.org/abs/1607.08022. Implemented as a group norm with one group per channel.

    def forward(self, maps: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalizes maps (B, C, h, w); `mask` is (B, h, w) bool, False for padding."""
        return run_unpadded(super().forward, mask, maps)


class HfViTBatchNorm2d(nn.BatchNorm2d):
    """Batch norm over the patches of all processes, excluding padding."""

    # This class replaces the synchronized batch norm of torch, which works only on GPUs and does not exclude padding.
    # Several processes get the same gradients as one process with the whole batch. With gradient accumulation, each
    # batch is normalized separately.

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    momentum: float

    def forward(self, maps: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalizes maps (B, C, h, w); `mask` is (B, h, w) bool, False for padding."""
        if not self.training:
            return super().forward(maps)
        counted = torch.ones_like(maps[:, 0]) if mask is None else mask.to(maps.dtype)  # (B, h, w)
        counted = to_float32_or_higher(counted[:, None])  # (B, 1, h, w)
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
    """Returns a norm of feature maps (B, `size`, h, w), chosen by name: "batch", "instance" or "layer"."""
    if name == "layer":
        return HfViTLayerNorm2d(size, eps=1e-6)
    return HfViTBatchNorm2d(size) if name == "batch" else HfViTInstanceNorm2d(num_groups=size, num_channels=size)


class HfViTFanInLinear(HfViTInitialized, nn.Linear):
    """Linear layer whose initial weights preserve the standard deviation of features, for any `initializer_range`."""

    def initialize(self, std: float) -> None:
        """Draws weights scaled by fan-in (LeCun) and sets the bias to zero."""
        init.trunc_normal_(self.weight, mean=0.0, std=self.in_features**-0.5)
        if self.bias is not None:
            init.zeros_(self.bias)


class HfViTNamedHead(nn.Module):
    """Stores a head under the name of its type, so that weights are never loaded into a head of a different type."""

    def __init__(self, name: str, decoder: nn.Module) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, decoder)

    @property
    def decoder(self) -> nn.Module:
        """The wrapped head."""
        return self.get_submodule(self.name)

    def forward(self, *inputs: Any) -> Any:
        """Runs the wrapped head."""
        return self.decoder(*inputs)
