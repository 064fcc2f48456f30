"""Who looks at whom: the attention within each image of a batch, without its padding.

Shapes: B batch, C channels, H W pixels, h w patch grid of an image, N = h·w patches, P prefix tokens, Q queries that a
head adds, L = P + N + Q.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..configuration_hf_vit import HfViTConfig
from ..embeddings_hf_vit import Grid
from ..modeling_detection_hf_vit import HfViTForObjectDetection
from ..modeling_hf_vit import HfViTForUniversalSegmentation
from ..pretrained_hf_vit import HfViTPreTrainedModel
from .patches import Patch, check_evaluates, grids_of, number_of, patch_size_of


# Those whose blocks have other tokens than the model inside has by itself
MODELS_WITH_QUERIES = HfViTForObjectDetection | HfViTForUniversalSegmentation


@dataclass(frozen=True)
class Attention:
    """How much each token of one image looks at each other.

    Args:
        weights: (layers, heads, L, L), a row for each token that looks, a column for each that is looked at. Before
            queries join the others they look at themselves alone.
        grid: Rows and columns (h, w) of patches.
        patch_size: Height and width of a patch in pixels.
        num_prefix: Number P of tokens before the patches.
        pooled: (L,) How much each token counts in what the model sums the image up by; 1 together.
    """

    weights: Tensor
    grid: Grid
    patch_size: tuple[int, int]
    num_prefix: int
    pooled: Tensor

    def looker(self, patch: Patch | None) -> Tensor:
        """Returns the share (L,) of each token in who looks: one patch, or with None what sums the image up.

        Raises:
            ValueError: if there is no such patch.
        """
        if patch is None:
            return self.pooled
        return F.one_hot(
            torch.tensor(self.num_prefix + number_of(patch, self.grid), device=self.pooled.device), len(self.pooled)
        ).to(self.pooled.dtype)

    def to_maps(self, values: Tensor) -> Tensor:
        """Returns those of values (..., L) of tokens that are of patches, (..., h, w)."""
        num_patches = self.grid[0] * self.grid[1]
        return values[..., self.num_prefix : self.num_prefix + num_patches].unflatten(-1, self.grid)


@torch.no_grad()
def record_attention(
    model: HfViTPreTrainedModel, pixel_values: Tensor, patch_attention_mask: Tensor | None = None
) -> list[Attention]:
    """Returns the attention within images, in all blocks and heads, whatever `attn_implementation` the model has.

    The weights are those of the model's own run, with the queries that a head adds (EoMT, YOLOS) and within its
    windows. A model of masked images sees the whole image. What sums an image up is the CLS token, with a distillation
    token the mean of both, or, where `config.pooling` is "mean" or "attention", the mean of the patches.

    Args:
        model: A model of any task.
        pixel_values: (B, C, H, W).
        patch_attention_mask: (B, h, w) bool, False for padding on the right and at the bottom.

    Returns:
        One for each image, without padding.

    Raises:
        ValueError: if the model is in training mode, or an input does not fit it.
    """
    check_evaluates(model)
    runs = model if isinstance(model, MODELS_WITH_QUERIES) else model.base_model
    outputs = runs(pixel_values, patch_attention_mask=patch_attention_mask, output_attentions=True, return_dict=True)
    return each_image(model, outputs.attentions, pixel_values, patch_attention_mask)


def attention_maps(attention: Attention, patch: Patch | None = None) -> Tensor:
    """Returns how much one patch looks at all patches, in each layer and head.

    Args:
        attention: Of one image.
        patch: Row and column of the patch that looks; None means what sums the image up, see `record_attention`.

    Returns:
        (layers, heads, h, w). What is missing to a sum of 1 goes to tokens that are no patches.

    Raises:
        ValueError: if there is no such patch.
    """
    return attention.to_maps(attention.looker(patch) @ attention.weights)


def each_image(
    model: HfViTPreTrainedModel,
    layers: Sequence[Tensor],
    pixel_values: Tensor,
    patch_attention_mask: Tensor | None = None,
) -> list[Attention]:
    """Takes the weights of a batch apart.

    Args:
        model: Whose they are.
        layers: (B, heads, L, L) of each; blocks before a head's queries have Q tokens less.
        pixel_values: (B, C, H, W).
        patch_attention_mask: (B, h, w) bool or None.

    Returns:
        One for each image, without padding, in float32 at least.
    """
    num_prefix, num_tokens = model.config.num_prefix_tokens, layers[-1].shape[-1]
    weights = torch.stack([_with_queries(layer, num_tokens) for layer in layers], dim=1)  # (B, layers, heads, L, L)
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
    rows, columns = model.base_model.embeddings.patch_embeddings.grid(pixel_values)
    numbers = torch.arange(num_tokens, device=weights.device)
    prefix, patches, queries = numbers.tensor_split((num_prefix, num_prefix + rows * columns))
    result = []
    for own_weights, grid in zip(weights, grids_of(model, pixel_values, patch_attention_mask), strict=True):
        inside = patches.view(rows, columns)[: grid[0], : grid[1]].flatten()
        own = torch.cat((prefix, inside, queries))
        own_weights = own_weights[..., own[:, None], own]  # (layers, heads, own L, own L)
        pooled = _pooled(model.config, own_weights, len(inside))
        result.append(Attention(own_weights, grid, patch_size_of(model), num_prefix, pooled))
    return result


def _with_queries(layer: Tensor, num_tokens: int) -> Tensor:
    """Adds to weights (B, heads, ., .) those of queries that look at themselves alone, (B, heads, L, L)."""
    missing = num_tokens - layer.shape[-1]
    alone = torch.arange(num_tokens, device=layer.device) >= layer.shape[-1]  # (L,)
    return F.pad(layer, (0, missing, 0, missing)) + torch.diag(alone.to(layer.dtype))


def _pooled(config: HfViTConfig, weights: Tensor, num_patches: int) -> Tensor:
    """Returns how much each token counts in what the model sums an image up by, (L,)."""
    first, second, patches = weights.new_zeros(3, weights.shape[-1])
    patches[config.num_prefix_tokens : config.num_prefix_tokens + num_patches] = 1 / num_patches
    first[0], second[1] = 1, 1
    pooled = {"cls": first, "cls_mean": (first + patches) / 2}.get(config.pooling, patches)
    return (pooled + second) / 2 if config.use_distillation_token else pooled
