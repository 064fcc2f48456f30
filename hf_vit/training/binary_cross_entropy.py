"""The loss of soft labels that asks of each class by itself whether it is there.

Shapes: B batch, K labels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.utils import ModelOutput

from .distillation_losses import precise


class BinaryCrossEntropy:
    """A `compute_loss_func` of the Trainer: binary cross-entropy of soft labels, the mean over classes and images.

    DeiT III (https://arxiv.org/abs/2204.07118) learns ImageNet by it; the same as timm's `BinaryCrossEntropy`. Class
    numbers, which evaluations have, are scored by cross-entropy.
    """

    def __init__(self, target_threshold: float | None = None) -> None:
        """Begins.

        Args:
            target_threshold: Labels above count as 1 and others as 0; with 0, both classes of a mixture are wholly
                there, as in DeiT III. None takes labels as they are.
        """
        self.target_threshold = target_threshold

    def __call__(self, outputs: ModelOutput, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Returns the loss of a batch.

        Args:
            outputs: Has `logits` (B, K).
            labels: (B, K) probabilities, or (B,) int64 class numbers.
            num_items_in_batch: Number of images of all batches of a step on all processes; B if not given.
        """
        logits = precise(outputs.logits)
        if not labels.is_floating_point():
            losses = F.cross_entropy(logits, labels, reduction="none")  # (B,)
        else:
            if self.target_threshold is not None:
                labels = labels > self.target_threshold
            labels = labels.to(logits.dtype)
            losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(dim=1)  # (B,)
        if num_items_in_batch is None:
            return losses.mean()
        # Where one process has several GPUs, there is an entry for each.
        return losses.sum() / torch.as_tensor(num_items_in_batch).sum()
