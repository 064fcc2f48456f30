"""The encoder and its parts: attention, window attention, MLP and transformer block.

Shapes: B batch, h w patch grid, N = h·w patches, P prefix tokens, O non-patch tokens (prefix tokens and the
queries at the end), L = N + O tokens, D hidden size, n heads, d head size, W windows of S patches.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_hf_vit import HfViTConfig, to_pair
from .embeddings import Grid, Rotary, is_symbolic
from .layers import HfViTInitialized, HfViTRecorded


class Windows(NamedTuple):
    """Attention windows of one batch, which replace the attention mask in blocks with window attention."""

    grid: Grid  # rows and columns (h, w) of patches
    size: Grid  # rows and columns of a window; the last windows are padded if the grid is not a multiple of the size
    num_prefix: int  # number P of prefix tokens
    # Attention mask for the patches of each window, in the format of the attention implementation. Its columns are the
    # O non-patch tokens, followed by the S patches of the window. None if nothing is masked.
    mask: Any = None
    others_mask: Tensor | None = None  # (B, 1, 1, L) bool, mask for the non-patch tokens; None if nothing is masked

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attend: Callable[[Tensor, Tensor, Tensor, Any], tuple[Tensor, Any]],
        *,
        scaling: float,
        dropout: float,
    ) -> Tensor:
        """Computes window attention.

        A patch attends to its window and to all non-patch tokens. Non-patch tokens attend to all tokens.
        """
        # The argument `attend` is an attention function of query, key and value (B, n, L, d) and a mask. It returns a
        # pair, of which the first element is the output (B, L, n, d).
        states = (query, key, value)
        (other_query, own_query), (other_key, own_key), (other_value, own_value) = map(self._split, states)
        batch, num_windows = own_query.shape[:2]
        keys, values = (
            torch.cat((others[:, None].expand(-1, num_windows, -1, -1, -1), own), dim=3).flatten(0, 1)
            for others, own in ((other_key, own_key), (other_value, own_value))
        )  # (B·W, n, O + S, d)
        attended, _ = attend(own_query.flatten(0, 1), keys, values, self.mask)  # (B·W, S, n, d)
        patches = self._join(attended.unflatten(0, (batch, num_windows)))  # (B, N, n, d)
        if not other_query.shape[2]:
            return patches
        # SDPA is always used: with so few non-patch tokens, the choice of attention implementation does not affect
        # speed.
        others = F.scaled_dot_product_attention(
            other_query, key, value, self.others_mask, dropout_p=dropout, scale=scaling
        ).transpose(1, 2)  # (B, O, n, d)
        before, after = others.split([self.num_prefix, others.shape[1] - self.num_prefix], dim=1)
        return torch.cat((before, patches, after), dim=1)

    def _split(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Splits states (B, n, L, d) into non-patch tokens (B, n, O, d) and windows of patches (B, W, n, S, d)."""
        num_patches = self.grid[0] * self.grid[1]
        num_queries = states.shape[2] - self.num_prefix - num_patches
        before, patches, after = states.split([self.num_prefix, num_patches, num_queries], dim=2)
        return torch.cat((before, after), dim=2), split_windows(patches.unflatten(2, self.grid), self.size)

    def _join(self, windows: Tensor) -> Tensor:
        """Joins windows (B, W, S, n, d) into patches (B, N, n, d) and removes the padding."""
        windows = windows.unflatten(2, self.size).unflatten(1, count_windows(self.grid, self.size))
        maps = windows.transpose(2, 3).flatten(3, 4).flatten(1, 2)  # (B, padded h, padded w, n, d)
        height, width = self.grid
        if is_symbolic(height, width):  # a slice would restrict the exported program to one grid size
            for dim, side in enumerate(self.grid, start=1):
                maps = maps.index_select(dim, torch.arange(side, device=maps.device))
            return maps.flatten(1, 2)
        return maps[:, :height, :width].flatten(1, 2)


def split_windows(maps: Tensor, size: Grid) -> Tensor:
    """Splits maps (B, n, h, w, d) into windows (B, W, n, S, d), padded with zeros to whole windows."""
    height, width = maps.shape[2:4]
    rows, columns = count_windows((height, width), size)
    missing = rows * size[0] - height, columns * size[1] - width
    if is_symbolic(height, width) or any(missing):
        maps = F.pad(maps, (0, 0, 0, missing[1], 0, missing[0]))
    windows = maps.unflatten(3, (columns, size[1])).unflatten(2, (rows, size[0]))  # (B, n, rows, ., columns, ., d)
    return windows.permute(0, 2, 4, 1, 3, 5, 6).flatten(4, 5).flatten(1, 2)


def count_windows(grid: Grid, size: Grid) -> Grid:
    """Returns the numbers of rows and columns of windows that cover a grid."""
    rows, columns = ((length + side - 1) // side for length, side in zip(grid, size, strict=True))
    return rows, columns


def make_window_mask(visible: Tensor, size: Grid, num_others: int) -> Tensor:
    """Converts a padding mask (B, h, w) to a mask (B·W, O + S) bool of the tokens that each window attends to."""
    windows = split_windows(visible[:, None, :, :, None], size).flatten(2).flatten(0, 1)  # (B·W, S)
    if not num_others:  # windows with only padding attend to themselves, to avoid NaN
        windows = windows | ~windows.any(dim=1, keepdim=True)
    return F.pad(windows, (num_others, 0), value=True)


def dense_window_mask(grid: Grid, size: Grid, num_prefix: int, num_queries: int, device: torch.device) -> Tensor:
    """Returns a mask (1, 1, L, L) bool that turns full attention into window attention; see `Windows`."""
    rows, columns = (
        torch.arange(length, device=device) // side for length, side in zip(grid, size, strict=True)
    )  # (h,) and (w,)
    window = (rows[:, None] * grid[1] + columns).flatten()  # (N,)
    allowed = window[:, None] == window
    return F.pad(allowed, (num_prefix, num_queries) * 2, value=True)[None, None]


def window_size(config: HfViTConfig, grid: Grid) -> Grid | None:
    """Returns the rows and columns of an attention window, or None if no windows are needed to cover the grid."""
    if config.window_size is None:
        return None
    if is_symbolic(*grid):  # a program exported for any grid size always uses windows
        return to_pair(config.window_size)
    rows, columns = (min(side, length) for side, length in zip(to_pair(config.window_size), grid, strict=True))
    return None if (rows, columns) == grid else (rows, columns)


def make_norm(config: HfViTConfig, size: int) -> nn.Module:
    """Returns a norm of type `config.norm_type` over the last dimension, which has `size` elements."""
    norm = nn.RMSNorm if config.norm_type == "rmsnorm" else nn.LayerNorm
    return norm(size, eps=config.layer_norm_eps)


def make_dropout(config: HfViTConfig) -> nn.Module:
    """Returns the dropout layer after attention and MLP. For a rate of 0, it is an identity, which is faster."""
    return nn.Dropout(config.hidden_dropout_prob) if config.hidden_dropout_prob else nn.Identity()


def apply_rotary(states: Tensor, rotary: Rotary) -> Tensor:
    """Rotates queries or keys (B, n, L, d) by rotary cosines and sines, which must broadcast to (B, n, L, d)."""
    cosine, sine = (table.to(states.dtype) for table in rotary)
    first, second = states.chunk(2, dim=-1)
    return states * cosine + torch.cat((-second, first), dim=-1) * sine


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[Tensor, Tensor]:
    """Returns the attention output (B, L, n, d) and weights (B, n, L, L) of query, key and value (B, n, L, d)."""
    # The mask must broadcast to the attention weights. A bool mask is True where a query may attend to a key. A float
    # mask is added to the scores.
    scores = query * scaling @ key.transpose(2, 3)  # (B, n, L, L)
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(dim=-1).to(query.dtype)  # softmax uses float32 internally for half precision
    weights = F.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2), weights  # (B, L, n, d)


class HfViTAttention(HfViTRecorded, HfViTInitialized):
    """Multi-head self-attention with one projection for query, key and value."""

    def __init__(self, config: HfViTConfig) -> None:
        super().__init__()
        self.config = config
        self.num_heads = config.num_attention_heads
        self.head_size = config.hidden_size // config.num_attention_heads
        self.scaling = self.head_size**-0.5
        # The attention functions in transformers read these attributes. Reading a missing one is slow.
        self.is_causal, self.num_key_value_groups = False, 1
        width = config.hidden_size
        self.qkv = nn.Linear(width, 3 * width, bias=config.qkv_bias and config.key_bias)
        has_split_bias = config.qkv_bias and not config.key_bias
        self.query_bias = nn.Parameter(torch.zeros(width)) if has_split_bias else None
        self.value_bias = nn.Parameter(torch.zeros(width)) if has_split_bias else None
        self.query_norm = make_norm(config, self.head_size) if config.use_qk_norm else None
        self.key_norm = make_norm(config, self.head_size) if config.use_qk_norm else None
        self.projection = nn.Linear(width, width, bias=config.proj_bias)
        self.dropout = make_dropout(config)

    def initialize(self, std: float) -> None:
        """Sets the biases of query and value to zero."""
        for bias in (self.query_bias, self.value_bias):
            if bias is not None:
                init.zeros_(bias)

    def forward(
        self,
        hidden_states: Tensor,
        rotary: Rotary | None = None,
        attention_mask: Tensor | Windows | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Maps tokens (B, L, D) to outputs (B, L, D) and attention weights (B, n, L, L), or None if not computed."""
        qkv = self.qkv(hidden_states)  # (B, L, 3·D)
        if self.query_bias is not None and self.value_bias is not None:
            bias = torch.cat((self.query_bias, torch.zeros_like(self.query_bias), self.value_bias))
            qkv = qkv + bias.to(qkv.dtype)
        heads = qkv.unflatten(-1, (3, self.num_heads, self.head_size))  # (B, L, 3, n, d)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)  # three tensors (B, n, L, d)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if rotary is not None:
            query, key = apply_rotary(query, rotary), apply_rotary(key, rotary)
        implementation = "eager" if output_attentions else self.config._attn_implementation
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        dropout = self.config.attention_probs_dropout_prob if self.training else 0.0
        options = {"scaling": self.scaling, "dropout": dropout}
        weights = None
        if isinstance(attention_mask, Windows):
            attended = attention_mask.attend(query, key, value, partial(attend, self, **options), **options)
        else:
            attended, weights = attend(self, query, key, value, attention_mask, **options)  # (B, L, n, d)
        return self.dropout(self.projection(attended.flatten(2))), weights


def share_attention_implementation(config: HfViTConfig, blocks: nn.Module, is_causal: bool = False) -> None:
    """Makes `blocks` use the attention implementation of `config`, even if it is changed later."""
    for module in blocks.modules():
        if isinstance(module, HfViTAttention):
            module.config, module.is_causal = config, is_causal


class HfViTMLP(nn.Module):
    """MLP of two linear layers with an activation in between."""

    def __init__(self, config: HfViTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.activation = ACT2FN[config.hidden_act]
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.dropout = make_dropout(config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Maps tokens (B, L, D) to (B, L, D)."""
        return self.dropout(self.fc2(self.activation(self.fc1(hidden_states))))


class HfViTGatedMLP(nn.Module):
    """SwiGLU, an MLP in which a branch with an activation gates a linear branch (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, config: HfViTConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.activation = ACT2FN[config.hidden_act]
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.dropout = make_dropout(config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Maps tokens (B, L, D) to (B, L, D)."""
        return self.dropout(self.down(self.activation(self.gate(hidden_states)) * self.up(hidden_states)))


class HfViTAttentionPooling(HfViTInitialized):
    """Pools tokens by attention with a learned query, followed by a residual MLP."""

    # Source: SigLIP (https://arxiv.org/abs/2303.15343), based on Set Transformer (https://arxiv.org/abs/1810.00825).

    def __init__(self, config: HfViTConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.probe = nn.Parameter(torch.zeros(1, 1, width))
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.projection = nn.Linear(width, width)
        self.norm = make_norm(config, width)
        self.mlp = HfViTMLP(config)

    def initialize(self, std: float) -> None:
        """Draws the learned query from a truncated normal."""
        init.trunc_normal_(self.probe, mean=0.0, std=std)

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> Tensor:
        """Pools tokens (B, L, D) to (B, D); `mask` is (B, L) bool, False for padding."""
        query = self.query(self.probe.expand(hidden_states.shape[0], -1, -1))  # (B, 1, D)
        query, key, value = (
            states.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for states in (query, *self.key_value(hidden_states).chunk(2, dim=-1))
        )  # (B, n, 1, d) and twice (B, n, L, d)
        # SDPA is always used: with one query per image, the choice of attention implementation does not affect speed.
        allowed = None if mask is None else mask[:, None, None, :]  # (B, 1, 1, L)
        pooled = F.scaled_dot_product_attention(query, key, value, allowed)  # (B, n, 1, d)
        pooled = self.projection(pooled.flatten(1))  # (B, D)
        return pooled + self.mlp(self.norm(pooled))


class HfViTLayerScale(HfViTInitialized):
    """Scales each channel of a residual branch by a learned factor (https://arxiv.org/abs/2103.17239)."""

    def __init__(self, hidden_size: int, initial_value: float) -> None:
        super().__init__()
        self.initial_value = initial_value
        self.scale = nn.Parameter(torch.full((hidden_size,), float(initial_value)))

    def initialize(self, std: float) -> None:
        """Sets all factors to the initial value of LayerScale."""
        init.constant_(self.scale, self.initial_value)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Scales a residual branch (B, L, D)."""
        return hidden_states * self.scale


class HfViTDropPath(nn.Module):
    """Stochastic depth: drops the residual branch of random images in training (https://arxiv.org/abs/1603.09382)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, hidden_states: Tensor) -> Tensor:
        """In training, zeroes a residual branch (B, L, D) for random images and scales the rest by 1 / (1 - rate)."""
        if not self.training:
            return hidden_states
        kept = hidden_states.new_empty(len(hidden_states), 1, 1).bernoulli_(1 - self.rate)
        return hidden_states * kept.div_(1 - self.rate)


def scale_and_drop(branch: Tensor, layer_scale: HfViTLayerScale | None, drop_path: HfViTDropPath) -> Tensor:
    """Applies LayerScale and stochastic depth to a residual branch (B, L, D)."""
    # Modules without effect are skipped, because calling them takes a tenth of the Python overhead of a block.
    scaled = branch if layer_scale is None else layer_scale(branch)
    return drop_path(scaled) if drop_path.rate else scaled


class HfViTLayer(HfViTRecorded, GradientCheckpointingLayer):
    """A pre-norm transformer block."""

    def __init__(self, config: HfViTConfig, layer_index: int) -> None:
        super().__init__()

        def layer_scale() -> HfViTLayerScale | None:
            value = config.layerscale_value
            return None if value is None else HfViTLayerScale(config.hidden_size, value)

        # The rate is a Python float, because transformers builds models on the meta device, where tensors have no
        # values.
        rate = config.drop_path_rate * layer_index / max(config.num_hidden_layers - 1, 1)
        self.norm1 = make_norm(config, config.hidden_size)
        self.attention = HfViTAttention(config)
        self.layer_scale1 = layer_scale()
        self.drop_path1 = HfViTDropPath(rate)
        self.norm2 = make_norm(config, config.hidden_size)
        self.mlp = HfViTGatedMLP(config) if config.use_gated_mlp else HfViTMLP(config)
        self.layer_scale2 = layer_scale()
        self.drop_path2 = HfViTDropPath(rate)

    def forward(
        self,
        hidden_states: Tensor,
        rotary: Rotary | None = None,
        attention_mask: Tensor | Windows | None = None,
        output_attentions: bool = False,
    ) -> Tensor:
        """Maps tokens (B, L, D) to (B, L, D)."""
        # Branch outputs are not assigned to variables, so that their memory is free for the next branch.
        context = rotary, attention_mask, output_attentions
        hidden_states = hidden_states + scale_and_drop(
            self.attention(self.norm1(hidden_states), *context)[0], self.layer_scale1, self.drop_path1
        )
        return hidden_states + scale_and_drop(self.mlp(self.norm2(hidden_states)), self.layer_scale2, self.drop_path2)


class HfViTEncoder(nn.Module):
    """The stack of transformer blocks."""

    def __init__(self, config: HfViTConfig, num_layers: int | None = None) -> None:
        super().__init__()
        self.global_layers = frozenset(config.global_attention_layers)
        if not self.global_layers <= set(range(config.num_hidden_layers)):
            raise ValueError(
                f"global_attention_layers={list(config.global_attention_layers)} must list blocks from 0 to "
                f"{config.num_hidden_layers - 1}, because num_hidden_layers={config.num_hidden_layers}."
            )
        num_layers = config.num_hidden_layers if num_layers is None else num_layers
        self.layers = nn.ModuleList(HfViTLayer(config, index) for index in range(num_layers))

    def forward(
        self,
        hidden_states: Tensor,
        *,
        rotary: Rotary | None = None,
        attention_mask: Tensor | None = None,
        windows: Windows | Tensor | None = None,
        start: int = 0,
        stop: int | None = None,
        output_attentions: bool = False,
    ) -> Tensor:
        """Runs the blocks from `start` to `stop` - 1.

        Args:
            hidden_states: Tokens (B, L, D): prefix tokens, patch tokens and, if there are any, queries.
            rotary: Rotary cosines and sines of prefix and patch tokens. Queries are not rotated.
            attention_mask: Mask in the format of the attention implementation.
            windows: Attention windows from `HfViTBlockRunner.masks`. They replace the mask in all blocks except
                `config.global_attention_layers`. None means that every block attends to the whole image.
            start: Index of the first block.
            stop: Index after the last block, as in a slice. None runs all blocks from `start`.
            output_attentions: Whether to use eager attention, so that attention weights can be recorded.

        Returns:
            Tokens (B, L, D), without the final norm.
        """
        if rotary is not None:
            cosine, sine = rotary
            queries_at_end = (0, 0, 0, hidden_states.shape[-2] - cosine.shape[-2])
            rotary = F.pad(cosine, queries_at_end, value=1.0), F.pad(sine, queries_at_end)
        # A slice of a `ModuleList` would be a new module, which takes longer to create than a list.
        for number, layer in enumerate([*self.layers][start:stop], start):
            mask = attention_mask if windows is None or number in self.global_layers else windows
            hidden_states = layer(hidden_states, rotary, mask, output_attentions)
        return hidden_states
