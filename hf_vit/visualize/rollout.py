"""Where in an image an answer comes from: attention followed through all blocks.

Shapes: B batch, C channels, H W pixels, h w patch grid of an image, L tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..modeling_hf_vit import HfViTForImageClassification
from ..pretrained_hf_vit import HfViTPreTrainedModel
from .attention import Attention, each_image
from .patches import Patch, check_evaluates


def attention_rollout(attention: Attention, patch: Patch | None = None) -> Tensor:
    """Returns how much of each patch reaches one token through all blocks.

    A token of a block is thought to be half itself, by the residual connection, and half what it looks at, by the mean
    of the heads; the shares are multiplied through the blocks.

    Args:
        attention: Of one image.
        patch: Row and column of the patch that is reached; None means what sums the image up, see `record_attention`.

    Returns:
        (h, w). What is missing to a sum of 1 comes from tokens that are no patches.

    Raises:
        ValueError: if there is no such patch.

    Source: https://arxiv.org/abs/2005.00928.
    """
    shares = attention.looker(patch)  # (L,)
    for layer in attention.weights.mean(dim=1).flip(0):  # (L, L), from the last one
        shares = (shares + shares @ layer) / 2
    return attention.to_maps(shares)


def gradient_rollout(
    model: HfViTPreTrainedModel,
    pixel_values: Tensor,
    class_numbers: Sequence[int] | None = None,
    patch_attention_mask: Tensor | None = None,
) -> list[Tensor]:
    """Returns how much each patch speaks for a class.

    The rollout of attention that counts where it raises the score of the class: weight times gradient, where that is
    positive, by the mean of the heads, is added up through the blocks beside the residual connection.

    Args:
        model: A classifier.
        pixel_values: (B, C, H, W).
        class_numbers: A class for each image; None means the likeliest.
        patch_attention_mask: (B, h, w) bool, False for padding on the right and at the bottom.

    Returns:
        One map (h, w) for each image, without padding; 0 means nothing, there is no upper limit.

    Raises:
        ValueError: if the model is no classifier or in training mode, there is no such class, or an input does not fit
            the model.

    Source: https://arxiv.org/abs/2103.15679, what is said there of self-attention.
    """
    check_classifier(model)
    check_evaluates(model)
    with torch.enable_grad():
        # A gradient for the pixels too: of a model whose weights are frozen there would be none at all.
        outputs = model(
            pixel_values.detach().requires_grad_(),
            patch_attention_mask=patch_attention_mask,
            output_attentions=True,
            return_dict=True,
        )
        scores = _scores(outputs.logits, class_numbers)
        gradients = torch.autograd.grad(scores.sum(), outputs.attentions)
    with torch.no_grad():
        speaking = [
            (weights * gradient).clamp(min=0) for weights, gradient in zip(outputs.attentions, gradients, strict=True)
        ]
        images = each_image(model, speaking, pixel_values, patch_attention_mask)
        return [_relevance(image) for image in images]


def check_classifier(model: HfViTPreTrainedModel) -> None:
    """Raises `ValueError` if a model gives images no class."""
    if not isinstance(model, HfViTForImageClassification):
        raise ValueError(
            f"A {type(model).__name__} gives images no class that something could speak for. Open a classifier, "
            "HfViTForImageClassification, or use attention_rollout, which needs none."
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


def _relevance(speaking: Attention) -> Tensor:
    """Follows what speaks for a class through the blocks; returns what looks have brought of each patch, (h, w)."""
    relevance = speaking.pooled  # (L,)
    for layer in speaking.weights.mean(dim=1).flip(0):  # (L, L), from the last one
        relevance = relevance + relevance @ layer
    # Where patches are summed up, each has a share that it brought itself, the same for all.
    return speaking.to_maps(relevance - speaking.pooled)
