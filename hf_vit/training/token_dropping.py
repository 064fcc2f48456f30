"""Fewer patches in training than the image has.

Shapes: B batch, h w patch grid, N = h·w patches, K kept ones.
"""

from typing import Any

import torch

from ..configuration_hf_vit import HfViTConfig, to_pair


class DropTokens:
    """A `BatchChange`: of each image drops as many patches, drawn at random, which the blocks then never see.

    What is kept keeps its place, and tokens that are no patches are always kept. A step takes less time and memory.

    Source: PatchDropout, https://arxiv.org/abs/2208.07220.
    """

    def __init__(self, rate: float, config: HfViTConfig) -> None:
        """Begins.

        Args:
            rate: Share of the patches that is dropped, in [0, 1). At least one is kept.
            config: That of the model.

        Raises:
            ValueError: if the model looks within windows.
        """
        if config.window_size is not None:
            raise ValueError(
                f"token_drop_rate={rate} leaves holes in the patch grid, where window_size={config.window_size} finds "
                "no windows. Set token_drop_rate 0, or window_size null."
            )
        self.rate = rate
        self.patch_size = to_pair(config.patch_size)

    def __call__(self, batch: dict[str, Any], progress: float) -> dict[str, Any]:
        """Returns the batch with `kept_patches` (B, K) int64, the numbers of the patches kept; padding goes first."""
        images, mask = batch["pixel_values"], batch.get("patch_attention_mask")
        (height, width), (rows, columns) = images.shape[-2:], self.patch_size
        num_patches = (height // rows) * (width // columns)
        num_kept = max(1, round((1 - self.rate) * num_patches))
        noise = torch.rand(len(images), num_patches).to(images.device)  # (B, N)
        if mask is not None:
            noise = noise.masked_fill(~mask.flatten(1).bool(), 1.0)
        kept = noise.argsort(dim=1)[:, :num_kept].sort(dim=1).values  # (B, K)
        return {**batch, "kept_patches": kept}
