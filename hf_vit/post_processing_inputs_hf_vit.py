"""Checks of what post-processing is given: outputs with names, and the sizes of images."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor


Sizes = Any  # list of (height, width), or a tensor (B, 2)


def by_name(outputs: Any) -> Mapping[str, Any]:
    """Returns the outputs of a model if they have names."""
    if not isinstance(outputs, Mapping):
        raise ValueError(
            f"The outputs are a {type(outputs).__name__}, in which nothing has a name. Call the model without "
            "return_dict=False, and pass what it returns."
        )
    return outputs


def check_fields(outputs: Mapping[str, Any], fields: dict[str, int], model: str) -> None:
    """Raises `ValueError` unless outputs have tensors of these names and numbers of dimensions."""
    for name, dimensions in fields.items():
        if name not in outputs or outputs[name].ndim != dimensions:
            found = ", ".join(f"{key} {tuple(x.shape)}" for key, x in outputs.items() if isinstance(x, Tensor))
            raise ValueError(
                f"The outputs have no {name} with {dimensions} dimensions, but {found or 'no tensors'}. This takes "
                f"the outputs of {model}."
            )


def map_sizes(target_sizes: Sizes, maps: list[Tensor]) -> list[tuple[int, int]]:
    """Returns the height and width of each result, by default those of the maps (..., h, w)."""
    if target_sizes is None:
        return [(values.shape[-2], values.shape[-1]) for values in maps]
    return read_sizes(target_sizes, len(maps))


def read_sizes(target_sizes: Sizes, count: int) -> list[tuple[int, int]]:
    """Returns the height and width of each of `count` images, in pixels.

    Raises:
        ValueError: if there are not as many, or one is no size.
    """
    sizes = _plain(target_sizes)
    if not isinstance(sizes, list | tuple) or len(sizes) != count:
        given = f"{len(sizes)} entries" if isinstance(sizes, list | tuple) else f"the type {type(sizes).__name__}"
        raise ValueError(
            f"target_sizes has {given}, but the outputs are of {count} images. Give one (height, width) an image."
        )
    return [_pixels(size, index) for index, size in enumerate(map(_plain, sizes))]


def _pixels(size: Any, index: int) -> tuple[int, int]:
    """Returns height and width as ints, at least 1."""
    sides = [_plain(side) for side in size] if isinstance(size, list | tuple) else []
    if len(sides) != 2 or not all(isinstance(side, int | float) and side > 0 and side % 1 == 0 for side in sides):
        raise ValueError(
            f"target_sizes[{index}] is {size!r}, but must be (height, width) in whole pixels, such as "
            "(image.height, image.width), an entry for each image."
        )
    return int(sides[0]), int(sides[1])


def _plain(numbers: Any) -> Any:
    """Returns arrays and tensors as numbers or (nested) lists."""
    return numbers.tolist() if isinstance(numbers, np.ndarray | np.generic | Tensor) else numbers
