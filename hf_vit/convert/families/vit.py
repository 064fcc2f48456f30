"""ViT of transformers (https://arxiv.org/abs/2010.11929), also as saved by other training code in that layout."""

from typing import Any

from ...configuration_hf_vit import HfViTConfig
from ..family import Config, Family, Shapes, shared_fields, transformers_fields
from ..key_map import Joined, KeyMap


BLOCK: KeyMap = {
    "encoder.layers.*.norm1": "encoder.layer.*.layernorm_before",
    "encoder.layers.*.attention.qkv": Joined(
        (
            "encoder.layer.*.attention.attention.query",
            "encoder.layer.*.attention.attention.key",
            "encoder.layer.*.attention.attention.value",
        )
    ),
    "encoder.layers.*.attention.projection": "encoder.layer.*.attention.output.dense",
    "encoder.layers.*.norm2": "encoder.layer.*.layernorm_after",
    "encoder.layers.*.mlp.fc1": "encoder.layer.*.intermediate.dense",
    "encoder.layers.*.mlp.fc2": "encoder.layer.*.output.dense",
}
KEYS: KeyMap = {
    "embeddings.cls_token": "embeddings.cls_token",
    "embeddings.mask_token": "embeddings.mask_token",
    "embeddings.position_embeddings": "embeddings.position_embeddings",
    "embeddings.patch_embeddings.projection": "embeddings.patch_embeddings.projection",
    **BLOCK,
    "norm": "layernorm",
    "pooler.dense": "pooler.dense",
    "classifier": "classifier",
}


def configure(config: Config, shapes: Shapes) -> dict[str, Any]:
    """ViTConfig; the pooler is in a plain ViTModel only, and its config.json does not tell."""
    return {
        **transformers_fields(config, layer_norm_eps=1e-12),
        "use_pooler": "pooler.dense.weight" in shapes,
        "use_mask_token": "embeddings.mask_token" in shapes,
    }


def restore(config: HfViTConfig, has_head: bool) -> dict[str, Any]:
    """The config.json of a ViTModel, or of a ViTForImageClassification."""
    return {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification" if has_head else "ViTModel"],
        **shared_fields(config),
        "qkv_bias": config.qkv_bias,
    }


VIT = Family(
    name="ViT",
    source="transformers `vit`",
    model_types=("vit",),
    keys=KEYS,
    configure=configure,
    prefixes=("vit.",),
    dropped={r"decoder\..*": "the decoder of masked image modelling"},
    outputs="hidden states, pooled, logits",
    restore=restore,
    head_prefix="vit.",
)
