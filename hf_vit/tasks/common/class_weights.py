"""Class weights of a loss: computed from class frequencies, or read from a file.

In shapes, C is the number of classes.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
from numpy.typing import ArrayLike

from ...data.reading.files import joined, parse_json, read_text
from .arguments import CLASS_POWERS


def choose_weights(option: str, names: Sequence[str], count: Callable[[], ArrayLike]) -> list[float]:
    """Return the weight of each class in the loss, (C,).

    The weights are either read from a file, or the class frequencies to the power of -p, normalized to a mean of 1
    over all labels. Classes that have no labels, or are missing in the file, have weight 1.

    Args:
        option: Key of a power p in `CLASS_POWERS`, or path of a JSON file that maps class names to weights.
        names: Names of the C classes.
        count: Function that returns the number of labels per class, (C,).

    Raises:
        ValueError: if the file does not exist, or contains invalid weights or unknown classes.
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
        raise ValueError(
            f"{option} has weights for unknown classes {joined(unknown)}. The classes are {joined(names)}."
        )
    numbers = [found.get(name, 1) for name in names]
    if not all(isinstance(n, int | float) and 0 <= n < math.inf for n in numbers) or not any(numbers):
        raise ValueError(
            f"{option} has the weights {joined(numbers)}. Weights must be at least 0, and one must be above 0."
        )
    return [float(number) for number in numbers]
