"""Attention within each image of a batch: maps, rollout and saliency.

Shapes: B batch, C channels, H W pixels, h w patch grid of an image, N = h·w patches, P prefix tokens, Q queries that a
head adds, L = P + N + Q tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..model.configuration_hf_vit import HfViTConfig
from ..model.embeddings import Grid
from ..model.pretrained import HfViTPreTrainedModel
from ..model.task_image_classification import HfViTForImageClassification
from ..model.task_object_detection import HfViTForObjectDetection
from ..model.task_universal_segmentation import HfViTForUniversalSegmentation
from .patches import Patch, check_eval_mode, grids_of, number_of


# Their blocks have queries beside the tokens of the model inside
MODELS_WITH_QUERIES = HfViTForObjectDetection | HfViTForUniversalSegmentation


@dataclass(frozen=True)
class Attention:
    """The attention within one image.

    Args:
        weights: (layers, heads, L, L), a row for each token that attends, a column for each attended token. Before
            queries join the others they attend to themselves alone.
        grid: Rows and columns (h, w) of patches.
        num_prefix: Number P of tokens before the patches.
        pooled: (L,) Weight of each token in the model's summary of the image; 1 together.
    """

    weights: Tensor
    grid: Grid
    num_prefix: int
    pooled: Tensor

    def query(self, patch: Patch | None) -> Tensor:
        """Returns the weight (L,) of each token in what attends: one patch, or with None the image's summary."""
        if patch is None:
            return self.pooled
        number = torch.tensor(self.num_prefix + number_of(patch, self.grid), device=self.pooled.device)
        return F.one_hot(number, len(self.pooled)).to(self.pooled.dtype)

    def to_maps(self, values: Tensor) -> Tensor:
        """Returns the values of patches (..., h, w) among those of all tokens (..., L)."""
        num_patches = self.grid[0] * self.grid[1]
        return values[..., self.num_prefix : self.num_prefix + num_patches].unflatten(-1, self.grid)


@torch.no_grad()
def record_attention(
    model: HfViTPreTrainedModel, pixel_values: Tensor, patch_attention_mask: Tensor | None = None
) -> list[Attention]:
    """Returns the attention within images, in all blocks and heads, whatever `attn_implementation` the model has.

    The weights are those of the model's own forward pass, with the queries that a head adds (EoMT, YOLOS) and within
    its windows. A model of masked images sees the whole image. The summary of an image is the CLS token, with a
    distillation token the mean of both, or, where `config.pooling` is "mean" or "attention", the mean of the patches.

    Args:
        model: A model of any task.
        pixel_values: (B, C, H, W).
        patch_attention_mask: (B, h, w) bool, False for padding on the right and at the bottom.

    Returns:
        One for each image, without padding.

    Raises:
        ValueError: if the model is in training mode, or an input does not fit it.
    """
    check_eval_mode(model)
    runs = model if isinstance(model, MODELS_WITH_QUERIES) else model.base_model
    outputs = runs(pixel_values, patch_attention_mask=patch_attention_mask, output_attentions=True, return_dict=True)
    return _each_image(model, outputs.attentions, pixel_values, patch_attention_mask)


def attention_maps(attention: Attention, patch: Patch | None = None) -> Tensor:
    """Returns the attention of one patch to all patches, in each layer and head.

    Args:
        attention: Of one image.
        patch: Row and column of the patch that attends; None means the image's summary, see `record_attention`.

    Returns:
        (layers, heads, h, w). What is missing to a sum of 1 goes to other tokens.

    Raises:
        ValueError: if there is no such patch.
    """
    return attention.to_maps(attention.query(patch) @ attention.weights)


def _each_image(
    model: HfViTPreTrainedModel, layers: Sequence[Tensor], pixel_values: Tensor, patch_attention_mask: Tensor | None
) -> list[Attention]:
    """Splits weights (B, heads, L, L) of each layer into those of each image, without padding, in float32 at least."""
    # Blocks before a head's queries have Q tokens less.
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
        result.append(Attention(own_weights, grid, num_prefix, pooled))
    return result


def _with_queries(layer: Tensor, num_tokens: int) -> Tensor:
    """Adds to weights (B, heads, ., .) those of queries that attend to themselves alone, (B, heads, L, L)."""
    missing = num_tokens - layer.shape[-1]
    alone = F.pad(layer.new_zeros(layer.shape[-1]), (0, missing), value=1.0)  # (L,)
    return F.pad(layer, (0, missing, 0, missing)) + torch.diag(alone)


def _pooled(config: HfViTConfig, weights: Tensor, num_patches: int) -> Tensor:
    """Returns the weight of each token in the image's summary, (L,)."""
    first, second, patches = weights.new_zeros(3, weights.shape[-1])
    patches[config.num_prefix_tokens : config.num_prefix_tokens + num_patches] = 1 / num_patches
    first[0], second[1] = 1, 1
    pooled = {"cls": first, "cls_mean": (first + patches) / 2}.get(config.pooling, patches)
    return (pooled + second) / 2 if config.use_distillation_token else pooled


def attention_rollout(attention: Attention, patch: Patch | None = None) -> Tensor:
    """Returns the share of each patch that reaches one token through all blocks.

    Each block is taken to give a token half of itself, by the residual connection, and half of what it attends to, by
    the mean of the heads; the shares are multiplied through the blocks.

    Args:
        attention: Of one image.
        patch: Row and column of the patch that is reached; None means the image's summary, see `record_attention`.

    Returns:
        (h, w). What is missing to a sum of 1 comes from other tokens.

    Raises:
        ValueError: if there is no such patch.

    Source: https://arxiv.org/abs/2005.00928.
    """
    shares = attention.query(patch)  # (L,)
    for layer in attention.weights.mean(dim=1).flip(0):  # (L, L), from the last one
        shares = (shares + shares @ layer) / 2
    return attention.to_maps(shares)


def gradient_rollout(
    model: HfViTPreTrainedModel,
    pixel_values: Tensor,
    class_numbers: Sequence[int] | None = None,
    patch_attention_mask: Tensor | None = None,
) -> list[Tensor]:
    """Returns the relevance of each patch for a class.

    Counts attention where it raises the score of the class: weight times gradient, where that is positive, by the mean
    of the heads, is added up through the blocks beside the residual connection.

    Args:
        model: A classifier.
        pixel_values: (B, C, H, W).
        class_numbers: A class for each image; None means the likeliest.
        patch_attention_mask: (B, h, w) bool, False for padding on the right and at the bottom.

    Returns:
        One map (h, w) for each image, without padding; 0 means no relevance, there is no upper limit.

    Raises:
        ValueError: if the model is no classifier or in training mode, there is no such class, or an input does not fit
            the model.

    Source: https://arxiv.org/abs/2103.15679, its rules for self-attention.
    """
    check_classifier(model)
    check_eval_mode(model)
    with torch.enable_grad():
        # A gradient for the pixels too: of a model whose weights are frozen there would be none at all.
        pixels = pixel_values.detach().requires_grad_()
        outputs = model(pixels, patch_attention_mask=patch_attention_mask, output_attentions=True, return_dict=True)
        scores = _scores(outputs.logits, class_numbers)
        gradients = torch.autograd.grad(scores.sum(), outputs.attentions)
    with torch.no_grad():
        products = map(torch.mul, outputs.attentions, gradients)
        raising = [product.clamp(min=0) for product in products]
        return [_relevance(image) for image in _each_image(model, raising, pixel_values, patch_attention_mask)]


def check_classifier(model: HfViTPreTrainedModel) -> None:
    """Raises `ValueError` if a model does not classify images."""
    if not isinstance(model, HfViTForImageClassification):
        raise ValueError(
            f"A {type(model).__name__} gives images no class to explain. Open an HfViTForImageClassification, or use "
            "attention_rollout, which needs none."
        )


def _scores(logits: Tensor, class_numbers: Sequence[int] | None) -> Tensor:
    """Returns the score (B,) of each image for its class, of logits (B, K)."""
    if class_numbers is None:
        return logits.max(dim=1).values
    num_images, num_labels = logits.shape
    if len(class_numbers) != num_images or not all(0 <= number < num_labels for number in class_numbers):
        raise ValueError(
            f"class_numbers={list(class_numbers)} must hold a number from 0 to {num_labels - 1} for each of "
            f"{num_images} images."
        )
    return logits[torch.arange(num_images), list(class_numbers)]


def _relevance(raising: Attention) -> Tensor:
    """Follows the attention that raises a score through the blocks; returns the relevance of each patch, (h, w)."""
    relevance = raising.pooled  # (L,)
    for layer in raising.weights.mean(dim=1).flip(0):  # (L, L), from the last one
        relevance = relevance + relevance @ layer
    # Where patches are pooled, each has a share that it brought itself, the same for all.
    return raising.to_maps(relevance - raising.pooled)
