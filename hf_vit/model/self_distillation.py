"""Self-distillation: prototypes, assignments and losses. A model says of each view what its average says of others.

Shapes: B images of a process, V views of an image, G of them global ones, K prototypes, M masked patches, N rows or
patches, D hidden size.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .configuration_hf_vit import HfViTConfig
from .layers import HfViTFanInLinear, gather_rows, in_float32, sum_over_processes
from .task_configurations import HfViTJointEmbeddingConfig


ROUNDS = 3  # of Sinkhorn and Knopp
SMALLEST_DISTANCE = 1e-8  # of which there is a logarithm
Sum = Callable[[Tensor], Tensor]


class HfViTPrototypes(nn.Module):
    """Features to cosines with prototypes, by an MLP of three layers."""

    def __init__(self, config: HfViTConfig, options: HfViTJointEmbeddingConfig) -> None:
        super().__init__()
        size = options.projector_hidden_size
        widths = (config.pooled_size, size, size, options.embedding_size)
        self.inner = nn.ModuleList(HfViTFanInLinear(one, other) for one, other in pairwise(widths))
        self.prototypes = HfViTFanInLinear(options.embedding_size, options.num_prototypes, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """(..., D) to (..., K)."""
        *inner, last = self.inner
        for layer in inner:
            features = F.gelu(layer(features))
        return F.linear(F.normalize(last(features), dim=-1), F.normalize(self.prototypes.weight, dim=-1))


@torch.no_grad()
@in_float32
def assign(logits: Tensor, temperature: float, add: Sum = sum_over_processes) -> Tensor:
    """Returns probabilities (N, K) of prototypes, given cosines (N, K) with them, under which all are used equally.

    It is the algorithm of Sinkhorn and Knopp as in SwAV (https://arxiv.org/abs/2006.09882), over the rows of all
    processes; with another `add`, those that it adds up.
    """
    scores = logits / temperature
    shares = (scores - 1 / temperature).exp()  # cosines are at most 1
    for _ in range(ROUNDS):
        shares = shares / add(shares.sum(dim=0)).clamp_min(torch.finfo(shares.dtype).tiny)
        shares = shares / shares.sum(dim=1, keepdim=True).clamp_min(torch.finfo(shares.dtype).tiny)
    return shares


@in_float32
def between_views(logits: Tensor, assigned: Tensor, temperature: float, add: Sum = sum_over_processes) -> Tensor:
    """Returns the mean cross-entropy of views with cosines (B, V, K) to what global ones (B, G, K) are assigned to.

    Each view is compared with all global ones but itself, as in DINO (https://arxiv.org/abs/2104.14294).
    """
    scores = logits / temperature
    entropies = -torch.einsum("bgk,bvk->gvb", assigned.to(scores.dtype), scores.log_softmax(dim=-1))  # (G, V, B)
    is_other = ~torch.eye(*entropies.shape[:2], dtype=torch.bool, device=logits.device)
    total = add(entropies[is_other].mean(dim=0).sum())
    return total / add(total.new_tensor(float(len(logits))))


@in_float32
def of_patches(logits: Tensor, assigned: Tensor, temperature: float, masks: Tensor) -> Tensor:
    """Returns the cross-entropy of masked patches with cosines (M, K) to what they are assigned to when seen.

    It is the loss of iBOT (https://arxiv.org/abs/2111.07832) as in DINOv2: the mean over the M patches that `masks`
    (V, N) hides in each view, then over the views of all processes, of which those without a masked patch add 0.
    """
    scores = logits / temperature
    entropies = -(assigned.to(scores.dtype) * scores.log_softmax(dim=-1)).sum(dim=-1)  # (M,)
    counts = masks.sum(dim=1, keepdim=True).expand_as(masks)[masks]  # (M,)
    total = sum_over_processes((entropies / counts).sum())
    return total / sum_over_processes(total.new_tensor(float(len(masks))))


@in_float32
def koleo_loss(features: Tensor) -> Tensor:
    """Returns how near pooled features (B, G, D) of one view are to those of another image, summed over views.

    It is KoLeo (https://arxiv.org/abs/1806.03198) as in DINOv2: minus the mean logarithm of the distance between the
    direction of an image and the nearest one of all other images, of all processes; 0 where there is no other.
    """
    own = F.normalize(features, dim=-1)
    (rows,), shares, start = gather_rows(own.flatten(1))
    everything = rows.unflatten(1, own.shape[1:]).transpose(0, 1)  # (G, N, D)
    if len(rows) < 2:
        return rows.sum() * 0
    own = own.transpose(0, 1)
    with torch.no_grad():
        cosines = own @ everything.transpose(1, 2)  # (G, B, N)
        cosines[:, :, start : start + own.shape[1]].diagonal(dim1=1, dim2=2).fill_(-2)
        nearest = cosines.argmax(dim=2)[..., None].expand_as(own)
    distances = (own - everything.gather(1, nearest)).norm(dim=-1)
    return sum_over_processes(-(distances + SMALLEST_DISTANCE).log().sum()) / sum(shares)
