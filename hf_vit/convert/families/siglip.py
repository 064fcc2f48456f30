"""The image tower of SigLIP and SigLIP 2 of transformers (https://arxiv.org/abs/2303.15343, 2502.14786)."""

import math
from typing import Any

from ..family import Config, Family, Shapes, is_classifier, label_fields
from ..key_map import KeyMap, Reshaped, Rows
from .clip import BLOCK, OTHER_PARTS, tower_fields, tower_of


KEYS: KeyMap = {
    "embeddings.position_embeddings": Reshaped(("embeddings.position_embedding.weight",)),
    "embeddings.patch_embeddings.projection": "embeddings.patch_embedding",
    **BLOCK,
    "norm": "post_layernorm",
    "attention_pooling.probe": "head.probe",
    "attention_pooling.query.weight": Rows(("head.attention.in_proj_weight",), 0, 1, 3),
    "attention_pooling.query.bias": Rows(("head.attention.in_proj_bias",), 0, 1, 3),
    "attention_pooling.key_value.weight": Rows(("head.attention.in_proj_weight",), 1, 3, 3),
    "attention_pooling.key_value.bias": Rows(("head.attention.in_proj_bias",), 1, 3, 3),
    "attention_pooling.projection": "head.attention.out_proj",
    "attention_pooling.norm": "head.layernorm",
    "attention_pooling.mlp.fc1": "head.mlp.fc1",
    "attention_pooling.mlp.fc2": "head.mlp.fc2",
    "classifier": "classifier",
}
# Their patches are flattened with the channels last.
KEYS_2: KeyMap = {
    **KEYS,
    "embeddings.patch_embeddings.projection.weight": Reshaped(("embeddings.patch_embedding.weight",), (0, 2, 3, 1)),
}
DROPPED = {**OTHER_PARTS, r"head\..*": "the classifier does without the attention pooling"}


def configure(config: Config, shapes: Shapes) -> dict[str, Any]:
    """SiglipConfig or SiglipVisionConfig; their classifier takes the mean of the patches."""
    has_attention = tower_of(config).get("vision_use_head", True) and not is_classifier(shapes)
    return {
        **tower_fields(config, hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-6),
        **label_fields(config),
        "use_cls_token": False,
        "pooling": "attention" if has_attention else "mean",
    }


def configure_2(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Siglip2Config or Siglip2VisionConfig: any size goes in, and the table is made for a square of patches."""
    fields = configure(config, shapes)
    return {
        **fields,
        "image_size": math.isqrt(tower_of(config).get("num_patches", 256)) * fields.get("patch_size", 16),
        "position_interpolation": "bilinear",
        "position_antialias": True,
    }


SIGLIP = Family(
    name="SigLIP",
    source="transformers `siglip`, `siglip_vision_model`",
    model_types=("siglip", "siglip_vision_model"),
    keys=KEYS,
    configure=configure,
    prefixes=("vision_model.",),
    dropped=DROPPED,
    outputs="hidden states, pooled, logits",
)
SIGLIP_2 = Family(
    name="SigLIP 2, any size",
    source="transformers `siglip2`, `siglip2_vision_model`",
    model_types=("siglip2", "siglip2_vision_model"),
    keys=KEYS_2,
    configure=configure_2,
    prefixes=("vision_model.",),
    dropped=DROPPED,
    outputs="hidden states, pooled",
)
