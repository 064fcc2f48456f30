"""How much a model computes.

Shapes: N patches, P prefix tokens, L = P + N, D hidden size; of windows W of S patches each.
"""

import torch

from ..configuration_hf_vit import HfViTConfig, to_pair
from ..embeddings_hf_vit import Grid, HfViTPatchEmbeddings
from ..windows_hf_vit import window_size


def forward_flops(config: HfViTConfig, height: int, width: int) -> int:
    """Counts the floating-point operations of `HfViTModel` on one image, on which the heads of all tasks stand.

    A product that is added counts as two. Only matrix products and convolutions count, as is usual; heads come on top
    (that of a classifier takes 2 · D · number of labels). Forward and backward together take three times as many.

    Args:
        config: The model.
        height: Of the image in pixels.
        width: Of the image in pixels.

    Raises:
        ValueError: if the image does not fit the model.
    """
    with torch.device("meta"):
        grid = HfViTPatchEmbeddings(config).grid(torch.empty(1, config.num_channels, height, width))
    patch_height, patch_width = to_pair(config.patch_size)
    num_patches, hidden = grid[0] * grid[1], config.hidden_size
    num_tokens = num_patches + config.num_prefix_tokens
    embeddings = num_patches * hidden * config.num_channels * patch_height * patch_width
    projections = num_tokens * 4 * hidden**2  # query, key, value and what follows the attention
    mlp = num_tokens * (3 if config.use_gated_mlp else 2) * hidden * config.intermediate_size
    layers = config.num_hidden_layers * (projections + mlp)
    return 2 * (embeddings + layers + attention_products(config, grid) + pooling_products(config, num_patches))


def attention_products(config: HfViTConfig, grid: Grid) -> int:
    """Counts the products of queries with keys, and of weights with values, in all blocks on a patch grid."""
    num_prefix = config.num_prefix_tokens
    num_tokens = num_prefix + grid[0] * grid[1]
    pairs = num_tokens**2
    windows = window_size(config, grid)
    if windows is None:
        return config.num_hidden_layers * 2 * pairs * config.hidden_size
    rows, columns = (-(length // -side) for length, side in zip(grid, windows, strict=True))
    in_window = windows[0] * windows[1]  # the last ones are filled up
    pairs_in_windows = rows * columns * in_window * (num_prefix + in_window) + num_prefix * num_tokens
    num_global = len(set(config.global_attention_layers))
    all_pairs = num_global * pairs + (config.num_hidden_layers - num_global) * pairs_in_windows
    return 2 * all_pairs * config.hidden_size


def pooling_products(config: HfViTConfig, num_patches: int) -> int:
    """Counts the products of what sums up the tokens as one vector."""
    hidden, products = config.hidden_size, 0
    if config.pooling == "attention":
        keys_and_values, pairs = 2 * num_patches * hidden**2, num_patches
        mlp = 2 * hidden * config.intermediate_size
        products += keys_and_values + 2 * hidden**2 + 2 * pairs * hidden + mlp
    if config.use_pooler:
        products += (2 if config.pooling == "cls_mean" else 1) * hidden**2
    return products
