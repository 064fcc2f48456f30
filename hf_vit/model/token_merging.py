"""Token merging: between blocks, tokens that are alike become one, so that later blocks have fewer to compute.

Shapes: B batch, P prefix tokens, E and O patches at even and odd places, L tokens, N tokens at the start, D hidden
size, R merged tokens.
"""

# Source: ToMe (https://arxiv.org/abs/2210.09461): bipartite soft matching, with attention in proportion to the number
# of patches in a token. Unlike there, tokens are compared by their states rather than their keys, and merged after a
# block rather than within it, so that every block runs as it is; at the end each patch gets the state of its token.

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .encoder import HfViTEncoder


class Tokens(NamedTuple):
    """Tokens of a batch, some of them merged."""

    states: Tensor  # (B, L, D)
    sizes: Tensor  # (B, L, 1), number of patches in each
    places: Tensor  # (B, N) int64, in which token each of the first ones is


class MergingEncoder(nn.Module):
    """The blocks of an encoder, with tokens merged after each but the last one.

    Args:
        encoder: Attends to the whole image, and has no rotary positions.
        num_merged: Tokens that each block merges into others, at most half of the patches.
        num_prefix: Tokens before the patches, which are never merged.
    """

    def __init__(self, encoder: HfViTEncoder, num_merged: int, num_prefix: int) -> None:
        super().__init__()
        self.layers, self.num_merged, self.num_prefix = encoder.layers, num_merged, num_prefix

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        """Runs all blocks: (B, N, D) to (B, N, D), where patches of one token have the same state."""
        if any(options.pop(name, None) is not None for name in ("rotary", "attention_mask", "windows")):
            raise ValueError("Tokens of padded images or with rotary positions cannot be merged. Leave both out.")
        sizes = torch.ones_like(hidden_states[..., :1])
        places = torch.arange(hidden_states.shape[1], device=hidden_states.device)
        tokens = Tokens(hidden_states, sizes, places.expand(hidden_states.shape[0], -1))
        for number, layer in enumerate(self.layers):
            # The first block has nothing merged: without a mask attention takes its fastest path.
            mask = tokens.sizes.log().transpose(1, 2)[:, None] if number and self.num_merged else None  # (B, 1, 1, L)
            tokens = tokens._replace(states=layer(tokens.states, None, mask, **options))
            if number < len(self.layers) - 1:
                tokens = merge_tokens(tokens, self.num_merged, self.num_prefix)
        return take(tokens.states, tokens.places)


def merge_tokens(tokens: Tokens, num_merged: int, num_prefix: int) -> Tokens:
    """Merges those patches at even places that are most like one at an odd place into it, weighted by their sizes."""
    num_merged = min(num_merged, (tokens.states.shape[1] - num_prefix) // 2)
    if num_merged <= 0:
        return tokens
    prefix, patches = tokens.states.tensor_split((num_prefix,), dim=1)
    prefix_sizes, sizes = tokens.sizes.tensor_split((num_prefix,), dim=1)
    directions = F.normalize(patches, dim=-1)
    likeness, partners = (directions[:, ::2] @ directions[:, 1::2].transpose(1, 2)).max(dim=-1)  # (B, E)
    ranks = likeness.argsort(dim=-1, descending=True).argsort(dim=-1)  # (B, E)
    order = ranks.argsort(dim=-1)
    merged, kept = order[:, :num_merged], order[:, num_merged:]  # (B, R) and (B, E - R)
    num_kept, num_odd = kept.shape[1], patches.shape[1] // 2

    odd = torch.arange(num_odd, device=partners.device)
    joins = (partners.gather(1, merged)[..., None] == odd).to(patches.dtype).transpose(1, 2)  # (B, O, R)
    even, weighted = patches[:, ::2], patches[:, ::2] * sizes[:, ::2]
    new_sizes = sizes[:, 1::2] + joins @ take(sizes[:, ::2], merged)  # (B, O, 1)
    means = (patches[:, 1::2] * sizes[:, 1::2] + joins @ take(weighted, merged)) / new_sizes  # (B, O, D)

    even_places = torch.where(ranks < num_merged, num_kept + partners, ranks - num_merged)  # (B, E)
    moved = torch.empty_like(tokens.places[:, :1]).expand(-1, patches.shape[1]).contiguous()
    moved[:, ::2], moved[:, 1::2] = even_places, num_kept + odd
    before = torch.arange(num_prefix, device=odd.device).expand(moved.shape[0], -1)
    return Tokens(
        torch.cat((prefix, take(even, kept), means), dim=1),
        torch.cat((prefix_sizes, take(sizes[:, ::2], kept), new_sizes), dim=1),
        torch.cat((before, num_prefix + moved), dim=1).gather(1, tokens.places),
    )


def take(states: Tensor, numbers: Tensor) -> Tensor:
    """Returns of tokens (B, L, D) those with the numbers (B, K): (B, K, D)."""
    return states.gather(1, numbers[..., None].expand(-1, -1, states.shape[-1]))
