"""Attention within windows of the patch grid: how tokens are cut apart, attend, and are put together again.

Shapes: B batch, h w patch grid, N = h·w patches, P prefix tokens, O tokens that are no patches (prefix and queries at
the end), L = N + O, W windows of S patches, n heads, d head size.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .configuration_hf_vit import HfViTConfig, to_pair
from .embeddings_hf_vit import Grid


class Windows(NamedTuple):
    """Windows of one batch, in the place of the attention mask of the blocks that look within them.

    Args:
        grid: Rows and columns (h, w) of patches.
        size: Rows and columns of a window. The last ones are filled up where the grid is no multiple of them.
        num_prefix: Number P of tokens before the patches.
        mask: What the patches of a window see, in the form that the attention implementation takes: first the O
            tokens that are no patches, then those of the window. None where there is nothing to hide.
        others_mask: (B, 1, 1, L) bool, what the other tokens see; None where that is everything.
    """

    grid: Grid
    size: Grid
    num_prefix: int
    mask: Any = None
    others_mask: Tensor | None = None

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
        """Patches look within their window and at all tokens that are no patches; those look at everything.

        Args:
            query: (B, n, L, d), as `key` and `value`.
            key: See `query`.
            value: See `query`.
            attend: Attention of query, key and value under a mask; returns (B, L, n, d) first.
            scaling: Factor on the scores.
            dropout: Dropout rate of the weights.

        Returns:
            (B, L, n, d).
        """
        (other_query, own_query), (other_key, own_key), (other_value, own_value) = map(
            self._split, (query, key, value)
        )
        batch, num_windows = own_query.shape[:2]
        keys, values = (
            torch.cat((others[:, None].expand(-1, num_windows, -1, -1, -1), own), dim=3).flatten(0, 1)
            for others, own in ((other_key, own_key), (other_value, own_value))
        )  # (B·W, n, O + S, d)
        attended, _ = attend(own_query.flatten(0, 1), keys, values, self.mask)  # (B·W, S, n, d)
        patches = self._join(attended.unflatten(0, (batch, num_windows)))  # (B, N, n, d)
        if not other_query.shape[2]:
            return patches
        # Few tokens, with other lengths of query and key: not worth the choice of an implementation.
        others = F.scaled_dot_product_attention(
            other_query, key, value, self.others_mask, dropout_p=dropout, scale=scaling
        ).transpose(1, 2)  # (B, O, n, d)
        before, after = others.split([self.num_prefix, others.shape[1] - self.num_prefix], dim=1)
        return torch.cat((before, patches, after), dim=1)

    def _split(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """(B, n, L, d) as tokens that are no patches (B, n, O, d) and windows of patches (B, W, n, S, d)."""
        num_patches = self.grid[0] * self.grid[1]
        num_queries = states.shape[2] - self.num_prefix - num_patches
        before, patches, after = states.split([self.num_prefix, num_patches, num_queries], dim=2)
        return torch.cat((before, after), dim=2), cut(patches.unflatten(2, self.grid), self.size)

    def _join(self, windows: Tensor) -> Tensor:
        """(B, W, S, n, d) as patches (B, N, n, d)."""
        height, width = self.grid
        windows = windows.unflatten(2, self.size).unflatten(1, (-1, -(width // -self.size[1])))
        maps = windows.transpose(2, 3).flatten(3, 4).flatten(1, 2)  # (B, filled up h, filled up w, n, d)
        return maps[:, :height, :width].flatten(1, 2)


def cut(maps: Tensor, size: Grid) -> Tensor:
    """Maps (B, n, h, w, d) as windows (B, W, n, S, d), filled up with zeros to whole ones."""
    missing = [-length % side for length, side in zip(maps.shape[2:4], size, strict=True)]
    if any(missing):
        maps = F.pad(maps, (0, 0, 0, missing[1], 0, missing[0]))
    windows = maps.unflatten(3, (-1, size[1])).unflatten(2, (-1, size[0]))  # (B, n, rows, ., columns, ., d)
    return windows.permute(0, 2, 4, 1, 3, 5, 6).flatten(4, 5).flatten(1, 2)


def visible_in_windows(visible: Tensor, size: Grid, num_others: int) -> Tensor:
    """Tells which tokens the patches of each window see.

    Args:
        visible: (B, h, w) bool, False for padding.
        size: Rows and columns of a window.
        num_others: Number O of tokens that are no patches.

    Returns:
        (B·W, O + S) bool.
    """
    windows = cut(visible[:, None, :, :, None], size).flatten(2).flatten(0, 1)  # (B·W, S)
    if not num_others:  # a window of padding looks at itself: the mean of nothing is no number
        windows = windows | ~windows.any(dim=1, keepdim=True)
    return F.pad(windows, (num_others, 0), value=True)


def dense_window_mask(grid: Grid, size: Grid, num_prefix: int, num_queries: int, device: torch.device) -> Tensor:
    """The mask (1, 1, L, L) bool under which attention to all tokens is that within windows; see `Windows`."""
    rows, columns = (
        torch.arange(length, device=device) // side for length, side in zip(grid, size, strict=True)
    )  # (h,) and (w,)
    window = (rows[:, None] * grid[1] + columns).flatten()  # (N,)
    allowed = window[:, None] == window
    return F.pad(allowed, (num_prefix, num_queries) * 2, value=True)[None, None]


def window_size(config: HfViTConfig, grid: Grid) -> Grid | None:
    """Returns rows and columns of the windows on a patch grid; None where one window would hold all."""
    if config.window_size is None:
        return None
    rows, columns = (min(side, length) for side, length in zip(to_pair(config.window_size), grid, strict=True))
    return None if (rows, columns) == grid else (rows, columns)
