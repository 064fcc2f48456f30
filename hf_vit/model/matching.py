"""Predictions matched with targets, and masks compared at points.

Shapes: Q queries, M target masks, R any number of masks, H W pixels, T points.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.utils.import_utils import is_scipy_available

from .layers import at_least_float32


if is_scipy_available():
    from scipy.optimize import linear_sum_assignment


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


def sample_points(maps: Tensor, points: Tensor) -> Tensor:
    """Samples maps (R, H, W) at points (R, T, 2), x and y in [0, 1], bilinearly with zeros around them: (R, T)."""
    return F.grid_sample(maps[:, None], 2 * points[:, None] - 1, align_corners=False)[:, 0, 0]


def grid_points(num_points: int, like: Tensor) -> Tensor:
    """Returns about `num_points` points of a regular grid, (T, 2), x and y in [0, 1]."""
    side = max(1, math.isqrt(num_points))
    centers = (torch.arange(side, device=like.device, dtype=like.dtype) + 0.5) / side
    return torch.cartesian_prod(centers, centers)


@torch.no_grad()
def uncertain_points(logits: Tensor, num_points: int, oversample_ratio: float, importance_ratio: float) -> Tensor:
    """Draws points (R, T, 2), x and y in [0, 1], where masks (R, H, W) of logits are most uncertain."""
    # PointRend (https://arxiv.org/abs/1912.08193): of `oversample_ratio` times as many points the `importance_ratio`
    # of all are chosen; the rest are anywhere.
    num_chosen = int(importance_ratio * num_points)
    candidates = torch.rand(len(logits), int(num_points * oversample_ratio), 2, device=logits.device)
    candidates = candidates.to(logits.dtype)
    certainty = sample_points(logits, candidates).abs()  # (R, oversample_ratio·T)
    chosen = certainty.topk(num_chosen, dim=1, largest=False).indices
    anywhere = torch.rand(len(logits), num_points - num_chosen, 2, device=logits.device).to(logits.dtype)
    return torch.cat((candidates.gather(1, chosen[..., None].expand(-1, -1, 2)), anywhere), dim=1)


def pairwise_mask_costs(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns cross-entropy and Dice loss, each (Q, M), of logits (Q, T) at points with targets (M, T) in [0, 1]."""
    # -log p(1) · t - log p(0) · (1 - t) = softplus(logit) - logit · t, summed over the points by a matrix product
    cross_entropy = (F.softplus(logits).sum(dim=1)[:, None] - logits @ targets.T) / logits.shape[1]  # (Q, M)
    probabilities = logits.sigmoid()
    overlap = 2 * probabilities @ targets.T
    sizes = probabilities.sum(dim=1)[:, None] + targets.sum(dim=1)
    return cross_entropy, 1 - (overlap + 1) / (sizes + 1)


def mask_losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns cross-entropy and Dice loss, each (R,), of each mask with its own target, both (R, T)."""
    cross_entropy = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(dim=1)
    probabilities = logits.sigmoid()
    overlap = 2 * (probabilities * targets).sum(dim=1)
    return cross_entropy, 1 - (overlap + 1) / (probabilities.sum(dim=1) + targets.sum(dim=1) + 1)
