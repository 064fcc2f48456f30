"""Runs of an exported program beside the model, at sizes that were not traced.

Shapes: B batch, Q queries.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ...model.layers import match
from ...model.pretrained import HfViTPreTrainedModel
from ...model.task_object_detection import HfViTForObjectDetection
from .formats import Run
from .programs import Bounds, HfViTProgram, checked_sizes, example_inputs


TOLERANCE = 1e-4  # of the largest value of an output, in float32


class Difference(NamedTuple):
    """How far an output of a program is from that of the model."""

    batch: int
    height: int  # pixels
    width: int
    output: str
    largest: float  # difference, relative to the largest value of the output

    @property
    def is_equal(self) -> bool:
        """Whether it is no more than rounding; what is no number is not."""
        return self.largest <= TOLERANCE


@torch.no_grad()
def compare(model: HfViTPreTrainedModel, run: Run, bounds: Bounds) -> Iterator[Difference]:
    """Yields how an exported program differs from its model, at three batches and three sizes.

    Args:
        model: In evaluation mode, in float32 on the CPU.
        run: Runs the program.
        bounds: Of the program.

    Raises:
        ValueError: if the program does not run at one of them, or returns other shapes.
    """
    program = HfViTProgram(model).eval()
    for seed, (batch, grid) in enumerate(checked_sizes(model, bounds), start=1):
        inputs = example_inputs(model, batch, grid, seed)
        height, width = inputs["pixel_values"].shape[2:]
        expected: dict[str, Tensor] = program(**inputs)
        try:
            found = run(inputs)
        except Exception as error:  # each runtime has its own
            raise ValueError(f"The program does not run on {batch} images of {height}x{width}: {error}") from error
        shapes = {name: tuple(value.shape) for name, value in expected.items()}
        if {name: tuple(value.shape) for name, value in found.items()} != shapes:
            raise ValueError(f"The program returns other shapes than {shapes} on {batch} images of {height}x{width}.")
        if isinstance(model, HfViTForObjectDetection):
            found = in_order(found, expected)
        for name, value in expected.items():
            largest = float((found[name] - value).abs().max() / value.abs().max())
            yield Difference(batch, height, width, name, largest)


def in_order(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns queries (B, Q, .) in the order of those that they are most like: that of equal scores may flip."""
    queries, wanted = (torch.cat([part[name] for name in expected], dim=-1) for part in (found, expected))  # (B, Q, .)
    orders = [match(torch.cdist(own, other))[1] for own, other in zip(wanted, queries, strict=True)]
    index = torch.stack(orders)[..., None]  # (B, Q, 1)
    return {name: value.gather(1, index.expand_as(value)) for name, value in found.items()}
