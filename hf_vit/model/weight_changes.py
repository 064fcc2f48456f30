"""Detection of changed weights, in a running process and between processes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


PROJECTIONS, MOST_SAMPLES = 8, 512  # numbers of a fingerprint, and values of each tensor that it depends on
SMALL = 1e-4  # a change of weights with a smaller magnitude is measured relative to this value
# Largest root mean square of the relative changes of weights: between conversions, and by rounding to bfloat16
SAME, ROUNDED = 1e-6, 2**-8


def version_of(tensor: Tensor) -> int:
    """Returns the number of in-place changes of a tensor, or -1 for inference tensors, for which it is unknown."""
    return -1 if tensor.is_inference() else tensor._version


def largest_of(tensor: Tensor) -> Tensor:
    """Returns a zero-dimensional view of the largest element by magnitude, which almost every update changes."""
    return tensor[tuple(map(int, torch.unravel_index(tensor.abs().argmax(), tensor.shape)))]


class WeightWatch:
    """Detects changes of the weights or modules of models since this object was created; takes about 0.1 ms."""

    # Fused optimizers and changes via `.data` do not increase the version counters of tensors. Therefore, one value of
    # each tensor is compared in addition to its version.

    def __init__(self, *models: nn.Module) -> None:
        self.models = models
        parts = dict.fromkeys(part for model in models for part in model.modules())
        holders = [each for part in parts for each in (part._parameters, part._buffers, part._modules)]
        self.places = [(holder, name, held) for holder in holders for name, held in holder.items()]
        self.tensors = [held for *_, held in self.places if isinstance(held, Tensor) and held.numel()]
        self.samples = [largest_of(own.detach()) for own in self.tensors]
        self.versions, self.values = self.read()

    def read(self) -> tuple[list[tuple[int, int]], Tensor]:
        """Returns the version and address of each tensor, and the current value of one element of each tensor."""
        return [(version_of(own), own.data_ptr()) for own in self.tensors], torch.stack(self.samples)

    def has_changed(self) -> bool:
        """Returns whether a weight or module has changed."""
        versions, values = self.read()
        is_same = versions == self.versions and torch.equal(values, self.values)
        return not is_same or any(holder.get(name) is not held for holder, name, held in self.places)


def fingerprint(weights: Sequence[Any]) -> list[float]:
    """Returns numbers that change about as much as the weights, or an empty list for weights that it cannot compare.

    The fingerprint consists of projections of the logarithms of some values of each weight. The root mean square of
    the difference of two fingerprints estimates that of the relative changes of the weights. Quantized and sharded
    weights, and weights on the meta device or on several devices, cannot be compared.
    """
    is_plain = all(type(weight) in (Tensor, nn.Parameter) and weight.itemsize > 1 for weight in weights)
    if not is_plain or len({weight.device for weight in weights}) != 1 or weights[0].is_meta:
        return []
    places = torch.arange(len(weights) + 2 * MOST_SAMPLES, dtype=torch.float64, device="cpu")
    waves = torch.outer(places[1 : PROJECTIONS + 1], places).cos()  # nearly orthogonal rows
    sums, count = torch.zeros(PROJECTIONS, dtype=torch.float64, device="cpu"), 0
    for number, weight in enumerate(weight for weight in weights if weight.is_floating_point()):
        values = weight.detach().flatten()
        values = values[:: max(1, len(values) // MOST_SAMPLES)].cpu().double()
        sums = sums + waves[:, number : number + len(values)] @ (values / SMALL).asinh()
        count += len(values)
    return [round(value, 9) for value in (sums / (count / 2) ** 0.5).tolist()]


def relative_change(before: Sequence[float], after: Sequence[float]) -> float:
    """Returns the root mean square difference of two fingerprints; 0 if one of them is empty."""
    squares = [(one - other) ** 2 for one, other in zip(before, after, strict=False)]
    return float((sum(squares) / max(len(squares), 1)) ** 0.5)
