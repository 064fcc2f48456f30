"""What tells a student from its teacher.

Shapes: B batch, K classes, n tokens, D width of the teacher, h w and h' w' patch grids.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def hard_loss(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Returns the cross-entropy against the teacher's answers, the mean over images.

    Args:
        logits: (B, K) of the student.
        teacher_logits: (B, K), of the same classes in the same order.

    Source: DeiT, https://arxiv.org/abs/2012.12877.
    """
    return F.cross_entropy(precise(logits), teacher_logits.argmax(dim=1))


def soft_loss(logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """Returns the divergence (Kullback-Leibler) from the teacher's probabilities, the mean over images.

    It is multiplied by the square of the temperature, so that its gradient does not shrink with it. DeiT's code also
    divides it by K, its paper does not.

    Args:
        logits: (B, K) of the student.
        teacher_logits: (B, K), of the same classes in the same order.
        temperature: What the logits of both are divided by; above 1, unlikely classes count more.

    Source: https://arxiv.org/abs/1503.02531, as in DeiT.
    """
    ours, theirs = ((precise(values) / temperature).log_softmax(dim=1) for values in (logits, teacher_logits))
    return F.kl_div(ours, theirs, reduction="batchmean", log_target=True) * temperature**2


def cosine_loss(tokens: Tensor, targets: Tensor, visible: Tensor | None = None) -> Tensor:
    """Returns 1 - cosine, the mean over images of the mean over the tokens of each.

    Args:
        tokens: (B, n, D) of the student.
        targets: (B, n, D) of the teacher.
        visible: (B, n) bool, False for tokens that do not count; None if all do.
    """
    losses = 1 - F.cosine_similarity(precise(tokens), precise(targets), dim=-1)  # (B, n)
    if visible is None:
        return losses.mean()
    return (torch.where(visible, losses, 0).sum(dim=1) / visible.sum(dim=1)).mean()


def resample_patches(patches: Tensor, grid: tuple[int, int]) -> Tensor:
    """Brings patches to another grid, bilinearly; where that is coarser, each new one is a mean of old ones.

    Args:
        patches: (B, D, h', w').
        grid: Rows and columns (h, w) wanted.

    Returns:
        (B, D, h, w).
    """
    if patches.shape[-2:] == grid:
        return patches
    return F.interpolate(precise(patches), grid, mode="bilinear", align_corners=False, antialias=True)


def precise(values: Tensor) -> Tensor:
    """Returns values in float32 at least: a loss in half precision loses the digits that matter."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
