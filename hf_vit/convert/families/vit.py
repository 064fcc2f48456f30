"""ViT of transformers (https://arxiv.org/abs/2010.11929), also as saved by other training code in that layout."""

from typing import Any

from ..family import Config, Family, Shapes, transformers_fields
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


VIT = Family(
    name="ViT",
    source="transformers `vit`",
    model_types=("vit",),
    keys=KEYS,
    configure=configure,
    prefixes=("vit.",),
    dropped={r"decoder\..*": "the decoder of masked image modelling"},
    outputs="hidden states, pooled, logits",
)
