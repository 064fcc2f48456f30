"""Functions that several heads and losses share, such as checks, matching, and sums over processes.

Shapes: B batch, C channels, H W pixels, h w patch grid, N = h·w patches, Q queries, D hidden size, K
classes, s upsampling factor of a head from the patch grid to its output.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers.utils.generic import maybe_autocast
from transformers.utils.import_utils import is_scipy_available

from .configuration_hf_vit import HfViTConfig


if is_scipy_available():
    from scipy.optimize import linear_sum_assignment

P = ParamSpec("P")
R = TypeVar("R")


def to_float32_or_higher(values: Tensor) -> Tensor:
    """Converts values to float32, unless they are float64."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def in_float32(loss: Callable[Concatenate[Tensor, P], R]) -> Callable[Concatenate[Tensor, P], R]:
    """Decorates a loss function so that it is computed in float32 or float64, without autocast."""

    @wraps(loss)
    def run_in_float32(predictions: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with maybe_autocast(predictions.device.type, enabled=False):
            return loss(to_float32_or_higher(predictions), *args, **kwargs)

    return run_in_float32


def can_read_values(*tensors: Tensor) -> bool:
    """Returns whether checks may read tensor values without stalling a GPU or breaking a compiled graph."""
    return all(tensor.device.type == "cpu" for tensor in tensors) and not torch.compiler.is_compiling()


def check_shape(name: str, values: Tensor, dimensions: str, *expected: int) -> None:
    """Raises `ValueError` unless a tensor has the expected shape; `dimensions` names its dimensions."""
    if values.shape != expected:
        raise ValueError(f"{name} must be ({dimensions}) = {expected}, not {tuple(values.shape)}.")


def check_class_numbers(
    numbers: Tensor, num_labels: int, ignored: int | None = None, name: str = "Label", place: str = ""
) -> None:
    """Raises `ValueError` if a class number is neither in [0, num_labels) nor `ignored`; see `can_read_values`."""
    if not can_read_values(numbers):
        return
    is_wrong = (numbers < 0) | (numbers >= num_labels)
    wrong = numbers[is_wrong if ignored is None else is_wrong & (numbers != ignored)]
    if len(wrong):
        others = "" if ignored in (None, -100) else f", and {ignored} marks ignored entries"
        raise ValueError(
            f"{name} {int(wrong[0])}{place} is out of range: the model has {num_labels} labels, 0 to {num_labels - 1}"
            f"{others}. Load the model with num_labels= or id2label= of your data."
        )


def count_processes() -> int:
    """Returns the number of processes in the distributed training run."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@torch.no_grad()
def match(cost: Tensor) -> tuple[Tensor, Tensor]:
    """Matches queries to targets one to one by the Hungarian algorithm, minimizing the sum of costs (Q, M).

    Returns the indices of the matched queries and of their targets, each (min(Q, M),) int64. Pairs with a NaN or
    infinite cost are matched only if no other pair is left. Raises `ImportError` if scipy is not installed.
    """
    if not is_scipy_available():
        raise ImportError("Matching predictions with targets needs scipy. Install it: pip install scipy")
    largest = torch.finfo(torch.float32).max / (4 * max(cost.shape))  # limit of costs, so that their sums stay finite
    cost = to_float32_or_higher(cost).nan_to_num(nan=largest, posinf=largest, neginf=largest).clamp(-largest, largest)
    queries, targets = linear_sum_assignment(cost.cpu().numpy())
    return torch.as_tensor(queries, device=cost.device), torch.as_tensor(targets, device=cost.device)


def sum_over_processes(values: Tensor) -> Tensor:
    """Sums a tensor over all processes, with gradients."""
    if count_processes() > 1:
        values = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(values.detach())
        if values.requires_grad:
            values.register_hook(sum_over_processes)
    return values


def gather_rows(*parts: Tensor) -> tuple[tuple[Tensor, ...], list[int], int]:
    """Concatenates the rows (B, D) of each tensor with those of all other processes, with gradients.

    Returns the concatenated tensors, the number of rows of each process, and the index of the first row of this
    process.
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
    """Returns the indices of the blocks that a head uses, by default `count` blocks spread evenly over the encoder.

    Raises:
        ValueError: if `indices` is empty or has an index that the encoder does not have.
    """
    total = config.num_hidden_layers
    chosen = [max(1, total * (i + 1) // count) for i in range(count)] if indices is None else list(indices)
    if not chosen or not all(0 <= index <= total for index in chosen):
        raise ValueError(f"out_indices={chosen} must list blocks from 1 to num_hidden_layers={total}, or 0 (stem).")
    return chosen


def count_query_blocks(num_blocks: int, config: HfViTConfig, field: str) -> int:
    """Returns `num_blocks`, the number of blocks that process queries; raises `ValueError` if it is too large."""
    if num_blocks > config.num_hidden_layers:
        raise ValueError(
            f"num_blocks={num_blocks} blocks for the queries exceed num_hidden_layers={config.num_hidden_layers}. "
            f"Lower num_blocks in {field}."
        )
    return num_blocks


def to_maps(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """Reshapes patch tokens (B, N, D) to feature maps (B, D, h, w)."""
    return tokens.transpose(1, 2).unflatten(2, grid).contiguous()


def upsample_mask(mask: Tensor | None, scale: tuple[int, int] = (2, 2)) -> Tensor | None:
    """Repeats the rows and columns of a mask (B, h, w) by `scale`."""
    return None if mask is None else mask.repeat_interleave(scale[0], dim=1).repeat_interleave(scale[1], dim=2)


def run_unpadded(head: Callable[..., Tensor], mask: Tensor | None, *inputs: Tensor) -> Tensor:
    """Runs a head on each image without its padding and returns the outputs (B, K, s·h, s·w).

    `inputs` are one or more feature maps (B, D, h, w), optionally followed by prefix tokens (B, P, D), which are not
    cropped. `mask` (B, h, w) is False for padding on the right and at the bottom. In the output, padding repeats the
    last row and column of the image, so that resizing the output gives the same values as without padding.
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
