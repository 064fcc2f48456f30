"""Attention maps, attention rollout and class saliency of images.

Shapes: B batch, C channels, H W pixels, h w patch grid of an image, N = h·w patches, P prefix tokens, Q query tokens
of a head, L = P + N + Q tokens.
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
from ..model.task_zero_shot_image_classification import HfViTForZeroShotImageClassification
from .patches import Patch, check_eval_mode, number_of, patch_grids


# Models whose last blocks also process query tokens of the head
MODELS_WITH_QUERIES = HfViTForObjectDetection | HfViTForUniversalSegmentation


@dataclass(frozen=True)
class Attention:
    """Attention weights of one image. In the blocks before query tokens are added, they attend only to themselves."""

    weights: Tensor  # (layers, heads, L, L); rows are attending tokens, and columns are attended tokens
    grid: Grid  # rows and columns (h, w) of patches
    num_prefix: int  # number P of tokens before the patches
    pooled: Tensor  # weight (L,) of each token in the pooled output of the model; the sum of the weights is 1

    def query(self, patch: Patch | None) -> Tensor:
        """Return the weight (L,) of each token: 1 for the given patch, or its weight in the pooled output if None."""
        if patch is None:
            return self.pooled
        number = torch.tensor(self.num_prefix + number_of(patch, self.grid), device=self.pooled.device)
        return F.one_hot(number, len(self.pooled)).to(self.pooled.dtype)

    def to_maps(self, values: Tensor) -> Tensor:
        """Select the values of patches (..., h, w) from the values of all tokens (..., L)."""
        num_patches = self.grid[0] * self.grid[1]
        return values[..., self.num_prefix : self.num_prefix + num_patches].unflatten(-1, self.grid)


@torch.no_grad()
def record_attention(
    model: HfViTPreTrainedModel, pixel_values: Tensor, patch_attention_mask: Tensor | None = None
) -> list[Attention]:
    """Return the attention weights of images in all blocks and heads, for any `attn_implementation` of the model.

    The weights are those of the forward pass, including query tokens of a head (EoMT, YOLOS) and window attention.
    Models for masked image modeling process the image without a mask. The pooled output is the CLS token (with a
    distillation token, the mean of both), or the mean of the patches if `config.pooling` is "mean" or "attention".

    Args:
        model: A model of any task.
        pixel_values: Images (B, C, H, W).
        patch_attention_mask: Mask (B, h, w) bool, False for padding on the right and at the bottom.

    Returns:
        One `Attention` per image, without padding.

    Raises:
        ValueError: if the model is in training mode, or does not accept the inputs.
    """
    check_eval_mode(model)
    runs = model if isinstance(model, MODELS_WITH_QUERIES) else model.base_model
    outputs = runs(pixel_values, patch_attention_mask=patch_attention_mask, output_attentions=True, return_dict=True)
    return _each_image(model, outputs.attentions, pixel_values, patch_attention_mask)


def attention_maps(attention: Attention, patch: Patch | None = None) -> Tensor:
    """Return the attention from one patch to all patches, in each layer and head.

    Args:
        attention: Attention weights of one image.
        patch: Row and column of the attending patch; None means the pooled output, see `record_attention`.

    Returns:
        Attention weights (layers, heads, h, w). The weights of a head add up to at most 1; the rest is attention to
        tokens that are not patches.

    Raises:
        ValueError: if the patch does not exist.
    """
    return attention.to_maps(attention.query(patch) @ attention.weights)


def _each_image(
    model: HfViTPreTrainedModel, layers: Sequence[Tensor], pixel_values: Tensor, patch_attention_mask: Tensor | None
) -> list[Attention]:
    """Split weights (B, heads, L, L) of each layer by image and remove padding; return float32 or float64."""
    # Blocks before the query tokens are added have Q fewer tokens
    num_prefix, num_tokens = model.config.num_prefix_tokens, layers[-1].shape[-1]
    weights = torch.stack([_with_queries(layer, num_tokens) for layer in layers], dim=1)  # (B, layers, heads, L, L)
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
    rows, columns = model.base_model.embeddings.patch_embeddings.grid(pixel_values)
    numbers = torch.arange(num_tokens, device=weights.device)
    prefix, patches, queries = numbers.tensor_split((num_prefix, num_prefix + rows * columns))
    result = []
    for own_weights, grid in zip(weights, patch_grids(model, pixel_values, patch_attention_mask), strict=True):
        inside = patches.view(rows, columns)[: grid[0], : grid[1]].flatten()
        own = torch.cat((prefix, inside, queries))
        own_weights = own_weights[..., own[:, None], own]  # (layers, heads, own L, own L)
        pooled = _pooled(model.config, own_weights, len(inside))
        result.append(Attention(own_weights, grid, num_prefix, pooled))
    return result


def _with_queries(layer: Tensor, num_tokens: int) -> Tensor:
    """Extend square attention matrices to size (L, L) by query tokens that attend only to themselves."""
    missing = num_tokens - layer.shape[-1]
    alone = F.pad(layer.new_zeros(layer.shape[-1]), (0, missing), value=1.0)  # (L,)
    return F.pad(layer, (0, missing, 0, missing)) + torch.diag(alone)


def _pooled(config: HfViTConfig, weights: Tensor, num_patches: int) -> Tensor:
    """Return the weight (L,) of each token in the pooled output."""
    first, second, patches = weights.new_zeros(3, weights.shape[-1])
    patches[config.num_prefix_tokens : config.num_prefix_tokens + num_patches] = 1 / num_patches
    first[0], second[1] = 1, 1
    pooled = {"cls": first, "cls_mean": (first + patches) / 2}.get(config.pooling, patches)
    return (pooled + second) / 2 if config.use_distillation_token else pooled


def attention_rollout(attention: Attention, patch: Patch | None = None) -> Tensor:
    """Return the contribution of each patch to one token through all blocks.

    In each block, half of a token comes from itself through the residual connection, and half from the tokens it
    attends to, averaged over heads. The matrices of all blocks are multiplied.

    Args:
        attention: Attention weights of one image.
        patch: Row and column of the target patch; None means the pooled output, see `record_attention`.

    Returns:
        Contributions (h, w). They add up to at most 1; the rest comes from tokens that are not patches.

    Raises:
        ValueError: if the patch does not exist.

    Source: https://arxiv.org/abs/2005.00928.
    """
    shares = attention.query(patch)  # (L,)
    for layer in attention.weights.mean(dim=1).flip(0):  # (L, L), last block first
        shares = (shares + shares @ layer) / 2
    return attention.to_maps(shares)


def gradient_rollout(
    model: HfViTPreTrainedModel,
    pixel_values: Tensor,
    class_numbers: Sequence[int] | None = None,
    patch_attention_mask: Tensor | None = None,
    text_embeds: Tensor | None = None,
) -> list[Tensor]:
    """Return the relevance of each patch for a class or a text.

    The attention weights are multiplied by their gradients of the score of the class, or of the similarity to the
    text. Positive products, averaged over heads, are propagated through all blocks and residual connections.

    Args:
        model: A classifier, or an image-text model if `text_embeds` is given.
        pixel_values: Images (B, C, H, W).
        class_numbers: Class of each image; None means the most likely class.
        patch_attention_mask: Mask (B, h, w) bool, False for padding on the right and at the bottom.
        text_embeds: Features (B, E) of a text for each image, or of another direction in the space of features.

    Returns:
        One map (h, w) per image, without padding. A value of 0 means no relevance; there is no upper limit.

    Raises:
        ValueError: if the model is not of the required type or is in training mode, a class does not exist, or the
            model does not accept an input.

    Source: https://arxiv.org/abs/2103.15679 (rules for self-attention).
    """
    encode = check_image_text_model(model).get_image_features if text_embeds is not None else check_classifier(model)
    check_eval_mode(model)
    with torch.enable_grad():
        # Pixels require gradients, so that attention has gradients even if all weights are frozen
        pixels = pixel_values.detach().requires_grad_()
        outputs = encode(pixels, patch_attention_mask=patch_attention_mask, output_attentions=True, return_dict=True)
        if text_embeds is None:
            scores = _scores(outputs.logits, class_numbers)
        else:
            scores = (F.normalize(outputs.pooler_output, dim=-1) * text_embeds).sum(dim=-1)
        gradients = torch.autograd.grad(scores.sum(), outputs.attentions)
    with torch.no_grad():
        products = map(torch.mul, outputs.attentions, gradients)
        raising = [product.clamp(min=0) for product in products]
        return [_relevance(image) for image in _each_image(model, raising, pixel_values, patch_attention_mask)]


def check_classifier(model: HfViTPreTrainedModel) -> HfViTForImageClassification:
    """Return the model; raise `ValueError` if it is not an image classifier."""
    if not isinstance(model, HfViTForImageClassification):
        raise ValueError(
            f"A {type(model).__name__} does not predict a class. Use HfViTForImageClassification, or "
            "attention_rollout, which needs no class."
        )
    return model


def check_image_text_model(model: HfViTPreTrainedModel) -> HfViTForZeroShotImageClassification:
    """Return the model; raise `ValueError` if it does not compare images with texts."""
    if not isinstance(model, HfViTForZeroShotImageClassification):
        raise ValueError(
            f"A {type(model).__name__} does not compare images with texts. Use HfViTForZeroShotImageClassification."
        )
    return model


def _scores(logits: Tensor, class_numbers: Sequence[int] | None) -> Tensor:
    """Return the class score (B,) of each image, given logits (B, K)."""
    if class_numbers is None:
        return logits.max(dim=1).values
    num_images, num_labels = logits.shape
    if len(class_numbers) != num_images or not all(0 <= number < num_labels for number in class_numbers):
        raise ValueError(
            f"class_numbers={list(class_numbers)} must have a number from 0 to {num_labels - 1} for each of "
            f"{num_images} images."
        )
    return logits[torch.arange(num_images), list(class_numbers)]


def _relevance(raising: Attention) -> Tensor:
    """Propagate the positive attention products through the blocks; return the relevance of each patch, (h, w)."""
    relevance = raising.pooled  # (L,)
    for layer in raising.weights.mean(dim=1).flip(0):  # (L, L), last block first
        relevance = relevance + relevance @ layer
    # Remove the initial weight of patches in the pooled output, which is equal for all patches
    return raising.to_maps(relevance - raising.pooled)
