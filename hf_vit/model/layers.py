"""Layers that several heads share, and their initialization.

Shapes: B batch, C channels, H W pixels, h w patch grid, N = h·w patches, P prefix tokens, Q queries, D hidden size, K
classes, s how much finer the output of a head is than the grid.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.utils.import_utils import is_scipy_available
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from .configuration_hf_vit import HfViTConfig


if is_scipy_available():
    from scipy.optimize import linear_sum_assignment

P = ParamSpec("P")
R = TypeVar("R")
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


def at_least_float32(values: Tensor) -> Tensor:
    """Returns values in float32, or in float64 if they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def in_float32(loss: Callable[Concatenate[Tensor, P], R]) -> Callable[Concatenate[Tensor, P], R]:
    """Runs a loss function on predictions in float32 at least, and without autocast, which would undo that."""

    @wraps(loss)
    def run_in_float32(predictions: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with torch.autocast(predictions.device.type, enabled=False):
            return loss(at_least_float32(predictions), *args, **kwargs)

    return run_in_float32


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


def may_read(*tensors: Tensor) -> bool:
    """Returns whether checks may read values: on the CPU only, as reading one would stall a GPU, or break a graph."""
    return all(tensor.device.type == "cpu" for tensor in tensors) and not torch.compiler.is_compiling()


def check_shape(name: str, values: Tensor, dimensions: str, *expected: int) -> None:
    """Raises `ValueError` unless a tensor has the expected shape, whose dimensions have names."""
    if values.shape != expected:
        raise ValueError(f"{name} must be ({dimensions}) = {expected}, not {tuple(values.shape)}.")


def check_class_numbers(
    numbers: Tensor, num_labels: int, ignored: int | None = None, name: str = "Label", place: str = ""
) -> None:
    """Raises `ValueError` if a class number is neither in [0, num_labels) nor `ignored`, where it `may_read` it."""
    if not may_read(numbers):
        return
    is_wrong = (numbers < 0) | (numbers >= num_labels)
    wrong = numbers[is_wrong if ignored is None else is_wrong & (numbers != ignored)]
    if len(wrong):
        others = "" if ignored in (None, -100) else f", and {ignored} for those that do not count"
        raise ValueError(
            f"{name} {int(wrong[0])}{place} is out of range: the model has {num_labels} labels, 0 to {num_labels - 1}"
            f"{others}. Load it with num_labels= or id2label= of your data."
        )


def count_processes() -> int:
    """Returns the number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@torch.no_grad()
def match(cost: Tensor) -> tuple[Tensor, Tensor]:
    """Matches queries with targets one to one so that the sum of costs (Q, M) is least (Hungarian algorithm)."""
    # Numbers of queries and of their targets, each (min(Q, M),) int64. What is NaN or infinite is only matched if
    # nothing else is left. `ImportError` without scipy.
    if not is_scipy_available():
        raise ImportError("Matching predictions with targets needs scipy. Install it: pip install scipy")
    largest = torch.finfo(torch.float32).max / (4 * max(cost.shape))  # sums of it stay finite
    cost = at_least_float32(cost).nan_to_num(nan=largest, posinf=largest, neginf=largest).clamp(-largest, largest)
    queries, targets = linear_sum_assignment(cost.cpu().numpy())
    return torch.as_tensor(queries, device=cost.device), torch.as_tensor(targets, device=cost.device)


def sum_over_processes(values: Tensor) -> Tensor:
    """Adds up the values of all processes, with their gradients."""
    if count_processes() > 1:
        values = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(values.detach())
        if values.requires_grad:
            values.register_hook(sum_over_processes)
    return values


def gather_rows(*parts: Tensor) -> tuple[tuple[Tensor, ...], list[int], int]:
    """Returns the rows of all processes, which have each tensor (B, D) alike, with their gradients.

    After them how many rows each process has, and where those of this one start.
    """
    if count_processes() == 1:
        return parts, [len(parts[0])], 0
    counts = torch.zeros(count_processes(), dtype=torch.long, device=parts[0].device)
    counts[dist.get_rank()] = len(parts[0])
    dist.all_reduce(counts)
    shares = counts.tolist()
    start = sum(shares[: dist.get_rank()])
    others = (0, 0, start, sum(shares) - start - len(parts[0]))
    rows = sum_over_processes(F.pad(torch.cat(parts, dim=1), others))
    return rows.split([part.shape[1] for part in parts], dim=1), shares, start


def choose_blocks(indices: Sequence[int] | None, config: HfViTConfig, count: int = 1) -> list[int]:
    """Returns the numbers of the blocks that a head reads, by default `count` spread evenly over the encoder.

    Raises:
        ValueError: if an encoder has no blocks of these numbers, or there are none.
    """
    total = config.num_hidden_layers
    chosen = [max(1, total * (i + 1) // count) for i in range(count)] if indices is None else list(indices)
    if not chosen or not all(0 <= index <= total for index in chosen):
        raise ValueError(f"out_indices={chosen} must name blocks from 1 to num_hidden_layers={total}, or 0 (stem).")
    return chosen


def count_query_blocks(num_blocks: int, config: HfViTConfig, field: str) -> int:
    """Returns the number of blocks that queries pass through; `ValueError` if the encoder has fewer."""
    if num_blocks > config.num_hidden_layers:
        raise ValueError(
            f"num_blocks={num_blocks} blocks for the queries exceed {config.num_hidden_layers} layers. Lower {field}."
        )
    return num_blocks


def to_maps(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """Returns patch tokens (B, N, D) as maps (B, D, h, w)."""
    return tokens.transpose(1, 2).unflatten(2, grid).contiguous()


def upsample_mask(mask: Tensor | None, scale: tuple[int, int] = (2, 2)) -> Tensor | None:
    """Repeats the rows and columns of a mask (B, h, w) by `scale`."""
    return None if mask is None else mask.repeat_interleave(scale[0], dim=1).repeat_interleave(scale[1], dim=2)


def run_unpadded(head: Callable[..., Tensor], mask: Tensor | None, *inputs: Tensor) -> Tensor:
    """Runs a head on each image without the padding around it: (B, K, s·h, s·w).

    `inputs` are maps (B, D, h, w), the first one at least, and prefix tokens (B, P, D), which stay whole; the mask
    (B, h, w) is False for padding on the right and at the bottom. Beyond an image its border is repeated, as resizing
    does beyond the border of a map.
    """
    if mask is None:
        return head(*inputs)
    rows, columns = mask.any(dim=2).sum(dim=1).tolist(), mask.any(dim=1).sum(dim=1).tolist()
    outputs = []
    for index, (height, width) in enumerate(zip(rows, columns, strict=True)):
        own = (values[index : index + 1] for values in inputs)
        cropped = (values[:, :, :height, :width] if values.ndim == 4 else values for values in own)
        output = head(*cropped)  # (1, K, s·height, s·width)
        below = (mask.shape[1] - height) * output.shape[2] // height
        right = (mask.shape[2] - width) * output.shape[3] // width
        outputs.append(F.pad(output, (0, right, 0, below), mode="replicate"))
    return torch.cat(outputs)


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
