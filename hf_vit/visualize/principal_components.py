"""Principal components of many vectors."""

import torch
from torch import Tensor


def principal_components(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the directions along which vectors vary most.

    Args:
        rows: (M, D).
        count: How many directions; there are no more than M or D.

    Returns:
        The directions (count, D), each of length 1 and with a positive largest entry, and the share of the variance
        (count,) along each; the first has the most. Float64, as shares are small differences of large sums.
    """
    centred = rows.double() - rows.double().mean(dim=0)
    variances, directions = torch.linalg.eigh(centred.T @ centred)  # of the least first; directions are columns
    count = min(count, *rows.shape)
    components = directions.T.flip(0)[:count]
    largest = components.gather(1, components.abs().argmax(dim=1, keepdim=True))  # (count, 1)
    total = variances.sum().clamp(min=torch.finfo(variances.dtype).tiny)
    return components * largest.sign(), variances.flip(0)[:count].clamp(min=0) / total
