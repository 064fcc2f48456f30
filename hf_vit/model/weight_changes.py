"""Detection of changed weights, in a running process and between processes."""

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


PROJECTIONS, MOST_SAMPLES = 8, 512  # projections in a fingerprint, and values of each tensor that they depend on
SMALL = 1e-4  # a change of weights with a smaller magnitude is measured relative to this value
ROUNDING = 2**-8  # root mean square of relative changes that conversions to bfloat16 and back do not exceed


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

    def __reduce__(self) -> tuple[Any, ...]:
        self.check()
        return type(self), self.models  # Copied tensors have new version counters, so the copy records them again.

    def read(self) -> tuple[list[tuple[int, int]], Tensor]:
        """Returns the version and address of each tensor, and the current value of one element of each tensor."""
        return [(version_of(own), own.data_ptr()) for own in self.tensors], torch.stack(self.samples)

    def has_changed(self) -> bool:
        """Returns whether a weight or module has changed."""
        versions, values = self.read()
        is_same = versions == self.versions and torch.equal(values, self.values)
        return not is_same or any(holder.get(name) is not held for holder, name, held in self.places)

    def check(self) -> None:
        """Raises `ValueError` if a weight or module of an optimized model has changed."""
        if self.has_changed():
            raise ValueError(
                f"The weights of {type(self.models[0]).__name__} have changed since it was optimized, and the "
                "optimized model still uses the old ones. Call optimize_for_inference(model) again, or create a new "
                "pipeline."
            )


def fingerprint(names: Iterable[str], weights: Sequence[Any]) -> list[float]:
    """Returns numbers that change with the names of labels, and about as much as the weights.

    The first number is a checksum of the names. The others are projections of the logarithms of some values of each
    weight. They are missing for weights that cannot be compared: quantized or sharded weights, and weights on the meta
    device or on several devices.
    """
    found = [float(zlib.crc32("\n".join(names).encode()))]
    is_plain = all(type(each) in (Tensor, nn.Parameter) and each.itemsize > 1 and each.numel() for each in weights)
    if not is_plain or len({weight.device for weight in weights}) != 1 or weights[0].is_meta:
        return found
    places = torch.arange(len(weights) + 2 * MOST_SAMPLES, dtype=torch.float64, device="cpu")
    waves = torch.outer(places[1 : PROJECTIONS + 1], places).cos()  # nearly orthogonal rows
    sums, count = 0 * places[:PROJECTIONS], 0
    for number, weight in enumerate(weight.detach().flatten() for weight in weights if weight.is_floating_point()):
        values = weight[:: max(1, len(weight) // MOST_SAMPLES)].cpu().double()
        sums = sums + waves[:, number : number + len(values)] @ (values / SMALL).asinh()
        count += len(values)
    return found + (sums / (count / 2) ** 0.5).tolist()


def has_changed(before: Sequence[float], after: Sequence[float]) -> bool:
    """Returns whether two fingerprints are those of different labels, or of weights that differ beyond rounding."""
    squares = [(one - other) ** 2 for one, other in zip(before, after, strict=False)]
    return sum(squares) > PROJECTIONS * ROUNDING**2
