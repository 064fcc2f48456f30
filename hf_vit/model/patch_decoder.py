"""Functions that convert images to patches and back, and a transformer that predicts the pixels of patches.

Shapes: B batch, C channels, H W pixels, p q patch height and width, h w patch grid, N = h·w patches, K
visible patches, P prefix tokens, E hidden size of the decoder.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .adapt_inputs import HfViTInputSized, as_parameter
from .configuration_hf_vit import HfViTConfig, to_pair
from .embeddings import Grid, positions_of_batch, resample_to_grid, sincos_position_embeddings
from .encoder import HfViTLayer, make_norm, share_attention_implementation
from .layers import HfViTInitialized


class HfViTPixelPredictor(nn.Linear, HfViTInputSized):
    """Last layer of a decoder, which predicts the pixels of a patch from its token."""

    def __init__(self, size: int, config: HfViTConfig) -> None:
        super().__init__(size, math.prod(to_pair(config.patch_size)) * config.num_channels)

    @torch.no_grad()
    def adapt_inputs(self, old: HfViTConfig, new: HfViTConfig) -> None:
        """Resizes the weights to a new patch size or number of channels."""
        sizes = to_pair(old.patch_size), to_pair(new.patch_size)
        if (sizes[0], old.num_channels) == (sizes[1], new.num_channels):
            return

        def resize(rows: Tensor) -> Tensor:
            pixels = rows.unflatten(0, (*sizes[0], old.num_channels)).permute(3, 2, 0, 1)  # (E, C, p, q)
            pixels = F.interpolate(pixels.float(), size=sizes[1], mode="bicubic", antialias=True)
            if new.num_channels == 1:
                pixels = pixels.mean(dim=1, keepdim=True)
            in_turn = torch.arange(new.num_channels, device=rows.device) % pixels.shape[1]
            return pixels[:, in_turn].permute(2, 3, 1, 0).flatten(0, 2).to(rows.dtype)  # (p·q·C, E)

        weight, bias = self.weight, self.bias
        self.weight = as_parameter(resize(weight), weight)
        self.bias = as_parameter(resize(bias[:, None])[:, 0], bias)
        self.out_features = len(self.bias)


class HfViTMaeDecoder(HfViTInitialized, HfViTInputSized):
    """Decoder of MAE, a small ViT with mask tokens in place of masked patches (https://arxiv.org/abs/2111.06377)."""

    # The decoder always has plain blocks and fixed positions, unlike some encoders. Prefix tokens have no position.

    position_embeddings: Tensor

    def __init__(self, config: HfViTConfig, options: Any, input_size: int | None = None) -> None:
        # `options` has the fields `decoder_*`. If `input_size`, the width of the input tokens, is given, no patches
        # are masked.
        super().__init__()
        self.config = config
        own = HfViTConfig(
            hidden_size=options.decoder_hidden_size,
            num_hidden_layers=options.decoder_num_hidden_layers,
            num_attention_heads=options.decoder_num_attention_heads,
            intermediate_size=options.decoder_intermediate_size,
            hidden_act=config.hidden_act,
            hidden_dropout_prob=config.hidden_dropout_prob,
            layer_norm_eps=config.layer_norm_eps,
            qkv_bias=config.qkv_bias,
        )
        self.hidden_size = own.hidden_size
        self.embedding = nn.Linear(input_size or config.hidden_size, own.hidden_size)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, own.hidden_size)) if input_size is None else None
        # The position table is saved with the weights: if the grid changes, the table used in training is resampled.
        self.register_buffer("position_embeddings", self.sincos_table())
        self.layers = nn.ModuleList(HfViTLayer(own, index) for index in range(own.num_hidden_layers))
        share_attention_implementation(config, self.layers)
        self.norm = make_norm(own, own.hidden_size)
        self.predictor = HfViTPixelPredictor(own.hidden_size, config)

    def initialize(self, std: float) -> None:
        """Draws the mask token from a normal distribution and computes the fixed positions."""
        if self.mask_token is not None:
            init.normal_(self.mask_token, mean=0.0, std=std)
        init.copy_(self.position_embeddings, self.sincos_table())

    def adapt_inputs(self, old: HfViTConfig, new: HfViTConfig) -> None:
        """Resamples the position table to another grid."""
        self.position_embeddings = resample_to_grid(self.position_embeddings, old, new.grid_size, num_prefix=0)

    def sincos_table(self) -> Tensor:
        """Returns the fixed position table (1, N, E) at the native grid."""
        return sincos_position_embeddings(self.config.grid_size, self.hidden_size, 0)

    def forward(
        self,
        hidden_states: Tensor,
        grid: Grid,
        index: Tensor,
        seen: Tensor | None = None,
        patch_attention_mask: Tensor | None = None,
        attention_mask: Any = None,
    ) -> Tensor:
        """Predicts the pixels (B, N, p·q·C) of all patches from the encoded prefix tokens and visible patches.

        Args:
            hidden_states: Encoded tokens (B, P + K, D).
            grid: Rows and columns (h, w) of patches.
            index: Indices (B, K) of the visible patches; see `visible_patches`.
            seen: (B, K) bool, False for indices that are only padding, or None; see `visible_patches`.
            patch_attention_mask: (B, h, w) bool, False for padding, or None.
            attention_mask: Padding mask of prefix tokens and patches in the format of the attention implementation.
        """
        num_prefix = self.config.num_prefix_tokens
        hidden_states = self.embedding(hidden_states)  # (B, P + K, E)
        prefix, visible = hidden_states.tensor_split((num_prefix,), dim=1)
        assert self.mask_token is not None
        mask_token = self.mask_token.to(hidden_states.dtype)
        if seen is not None:
            visible = torch.where(seen[..., None], visible, mask_token)
        patches = mask_token.expand(index.shape[0], grid[0] * grid[1], -1)
        patches = patches.scatter(1, index[..., None].expand_as(visible), visible)  # (B, N, E)
        return self.decode(prefix, patches, grid, patch_attention_mask, attention_mask)

    def decode(
        self, prefix: Tensor, patches: Tensor, grid: Grid, patch_attention_mask: Tensor | None, attention_mask: Any
    ) -> Tensor:
        """Predicts pixels (B, N, p·q·C) from embedded prefix tokens (B, P, E) and patches (B, N, E); see `forward`."""
        patches = patches + self.positions(grid, patch_attention_mask)
        hidden_states = torch.cat((prefix, patches), dim=1)  # (B, P + N, E)
        for layer in self.layers:
            hidden_states = layer(hidden_states, None, attention_mask)
        return self.predictor(self.norm(hidden_states[:, prefix.shape[1] :]))

    def positions(self, grid: Grid, patch_attention_mask: Tensor | None = None) -> Tensor:
        """Returns the positions to add to the patches: (1, N, E), or (B, N, E) with a mask."""
        resample = partial(resample_to_grid, self.position_embeddings, self.config, num_prefix=0)
        positions = positions_of_batch(resample, grid, patch_attention_mask, 0).flatten(0, -3)
        return positions.to(self.embedding.weight.dtype)  # the table is float32 even in half-precision models


def patchify(images: Tensor, patch_size: Grid) -> Tensor:
    """Splits images (B, C, H, W) into patches (B, N, p·q·C). Patches and pixels are in row order, channels last."""
    height, width = patch_size
    cut = images.unflatten(3, (-1, width)).unflatten(2, (-1, height))  # (B, C, h, p, w, q)
    return cut.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def unpatchify(patches: Tensor, grid: Grid, patch_size: Grid) -> Tensor:
    """Joins patches (B, N, p·q·C) of a grid (h, w) into images (B, C, H, W)."""
    cut = patches.unflatten(2, (*patch_size, -1)).unflatten(1, grid)  # (B, h, w, p, q, C)
    return cut.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)
