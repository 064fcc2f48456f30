"""Weights of classes in a loss: by how rare a class is, or from a file.

Shapes: C classes.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
from numpy.typing import ArrayLike

from ..data.formats.files import joined, parse_json, read_text
from .arguments import CLASS_POWERS


def choose_weights(option: str, names: Sequence[str], count: Callable[[], ArrayLike]) -> list[float]:
    """Returns how much each class counts in the loss, (C,).

    By its share of the labels to minus a power of `CLASS_POWERS`, in proportions that leave the mean label at 1; or by
    its name in a file. A class without a label, or that a file leaves out, counts 1.

    Args:
        option: Name of a power, or a JSON file.
        names: Names of the C classes.
        count: Counts the labels of each, (C,).

    Raises:
        ValueError: if there is no such file, or it holds anything but weights of these classes.
    """
    if (power := CLASS_POWERS.get(option)) is not None:
        counts = pd.Series(count(), dtype=float)
        shares = counts[counts > 0] / counts.sum()
        weights = shares**-power / (shares ** (1 - power)).sum()
        return weights.round(4).reindex(counts.index, fill_value=1.0).tolist()
    try:
        found = dict(parse_json(read_text(Path(option).expanduser())))
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(
            f"class_weights={option!r} must be {', '.join(CLASS_POWERS)} or a JSON file: {error}"
        ) from error
    if unknown := sorted(found.keys() - {*names}):
        raise ValueError(f"{option} has weights of {joined(unknown)}, but the classes are {joined(names)}.")
    numbers = [found.get(name, 1) for name in names]
    if not all(isinstance(n, int | float) and 0 <= n < math.inf for n in numbers) or not any(numbers):
        raise ValueError(f"{option} has the weights {joined(numbers)}. Give numbers of at least 0, one above 0.")
    return [float(number) for number in numbers]
