"""Mixtures of the images of a batch, with labels that say what is in them.

Shapes: B batch, C channels, H W pixels, K labels.
"""

from typing import Any

import torch

from ..task_classification import soften_labels


class Mixing:
    """A `BatchChange`: mixes images of a batch, and makes its class numbers probabilities of all classes.

    MixUp (https://arxiv.org/abs/1710.09412) blends each image with its neighbour in the batch, CutMix
    (https://arxiv.org/abs/1905.04899) puts a rectangle of the neighbour into it; one share is drawn for a whole batch.
    Where both are on, either is drawn equally often, as in DeiT. Neighbours are images of one process.
    """

    def __init__(
        self,
        num_labels: int,
        mixup_alpha: float = 0.0,
        cutmix_alpha: float = 0.0,
        probability: float = 1.0,
        off_share: float = 0.0,
        label_smoothing: float = 0.0,
    ) -> None:
        """Begins.

        Args:
            num_labels: Number K of classes.
            mixup_alpha: Both parameters of the beta distribution that MixUp draws the share from; 0 for no MixUp.
            cutmix_alpha: Those of CutMix; 0 for no CutMix.
            probability: Share of the batches that are mixed, in [0, 1].
            off_share: Share of the training at its end in which none is, in [0, 1].
            label_smoothing: Probability mass spread evenly over all classes, in [0, 1); always.
        """
        from torchvision.transforms import v2  # here, as all else in the package does without torchvision

        kinds = ((v2.MixUp, mixup_alpha), (v2.CutMix, cutmix_alpha))
        mixers = [kind(alpha=alpha, num_classes=num_labels) for kind, alpha in kinds if alpha]
        self.mix = v2.RandomChoice(mixers) if mixers else None
        self.num_labels = num_labels
        self.probability = probability
        self.off_share = off_share
        self.label_smoothing = label_smoothing

    def __call__(self, batch: dict[str, Any], progress: float) -> dict[str, Any]:
        """Returns the batch with `pixel_values` (B, C, H, W) mixed and `labels` (B,) int64 as (B, K) float32.

        Raises:
            ValueError: if a class number is out of range.
        """
        images = batch["pixel_values"]
        labels = soften_labels(batch["labels"], self.num_labels, self.label_smoothing)  # (B, K)
        if self.mix is not None and progress < 1 - self.off_share and float(torch.rand(())) < self.probability:
            images, labels = self.mix(images, labels)
        return {**batch, "pixel_values": images, "labels": labels}
