"""What a model sees in patches before all blocks."""

import torch
from torch import Tensor

from ..pretrained_hf_vit import HfViTPreTrainedModel
from .principal_components import principal_components


@torch.no_grad()
def patch_filters(model: HfViTPreTrainedModel, count: int = 28) -> Tensor:
    """Returns the principal components of the kernels that patches are projected by.

    Args:
        model: A model of any task.
        count: How many of them; there are no more than the model has kernels, or a patch has pixels and channels.

    Returns:
        (count, height of a patch, its width, C) float64, the most important first; each of length 1, its sign chance.

    Source: figure 7 of https://arxiv.org/abs/2010.11929.
    """
    kernels = model.base_model.embeddings.patch_embeddings.projection.weight.movedim(1, -1)  # (D, p, q, C)
    components, _ = principal_components(kernels.flatten(1), count)
    return components.unflatten(1, kernels.shape[1:])
