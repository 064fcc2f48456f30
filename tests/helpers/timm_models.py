"""Helpers that compare small timm models with the converted models."""

import copy
from collections.abc import Callable
from functools import partial

import torch
from timm.layers.pos_embed_sincos import RotaryEmbeddingDinoV3
from torch import nn

from hf_vit import HfViTForImageClassification
from hf_vit.model.pretrained import HfViTPreTrainedModel

from .references import assert_close


SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 5}
SMALL["dynamic_img_size"] = True


def in_precision(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy of `model` in `dtype`, including its rotary position embeddings."""
    model = copy.deepcopy(model).to(dtype).eval()
    rope = getattr(model, "rope", None)
    if rope is not None:
        rope.get_embed = partial(type(rope).get_embed, rope, dtype=dtype)
    return model


def assert_equals_timm(
    theirs: nn.Module, open_ours: Callable[[torch.dtype], HfViTPreTrainedModel], resampled: bool = True
) -> None:
    """Assert that tokens and outputs are equal in float64 and float32, at the native image size.

    If `resampled`, the models are also compared at other image sizes.
    """
    height, width = theirs.patch_embed.img_size
    sizes = ((height, width), (height - 8, 2 * width), (16, 16)) if resampled else ((height, width),)
    # For DINOv3, timm rounds rotary angles to float32 at a different step of the computation than our model.
    rounding = 1e-6 if isinstance(getattr(theirs, "rope", None), RotaryEmbeddingDinoV3) else 1e-9
    for dtype, tolerance in ((torch.float64, rounding), (torch.float32, 1e-5)):
        reference, ours = in_precision(theirs, dtype), open_ours(dtype).eval()
        is_classifier = isinstance(ours, HfViTForImageClassification)
        base = ours.model if is_classifier else ours
        for size in sizes:
            images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1)).to(dtype)
            with torch.no_grad():
                tokens, expected = reference.forward_features(images), reference(images)
                actual = ours(images).logits if is_classifier else base(images).pooler_output
                assert tokens.std() >= 0.1
                assert_close(base(images).last_hidden_state, tokens, tolerance, f"tokens at {size}")
                assert_close(actual, expected, tolerance, f"output at {size}")
