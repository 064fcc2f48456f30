"""What a model knows about places."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..pretrained_hf_vit import HfViTPreTrainedModel


@torch.no_grad()
def position_similarity(model: HfViTPreTrainedModel) -> Tensor:
    """Returns how alike the position embeddings of all patches are, at the native size of the model.

    Args:
        model: A model with a table of positions, learned or fixed; rotary ones beside it have no part in this.

    Returns:
        (h, w, h, w) cosines, from -1 to 1: of a row and column with every row and column.

    Raises:
        ValueError: if it has no table.

    Source: figure 7 of https://arxiv.org/abs/2010.11929.
    """
    table = model.get_position_embeddings()
    if table is None:
        raise ValueError(
            f"A model with position_embedding_type={model.config.position_embedding_type!r} adds no positions to its "
            "patches, so there are none to compare. Those of 'learned', 'sincos2d' and 'learned+rotary' do."
        )
    table = table.to(torch.promote_types(table.dtype, torch.float32))
    directions = F.normalize(table[0, model.config.num_prefix_positions :], dim=-1)  # (N, D)
    grid = model.config.grid_size
    return (directions @ directions.T).unflatten(1, grid).unflatten(0, grid)
