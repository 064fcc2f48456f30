"""ViT of transformers (https://arxiv.org/abs/2010.11929), also as saved by other training code in that layout.

DeiT, MAE, MSN, I-JEPA and DINOv2 of transformers share its names.
"""

from typing import Any

from ..family import Config, Family, Shapes, transformers_fields
from ..key_map import Joined, KeyMap


ATTENTION: KeyMap = {
    "encoder.layers.*.attention.qkv": Joined(
        (
            "encoder.layer.*.attention.attention.query",
            "encoder.layer.*.attention.attention.key",
            "encoder.layer.*.attention.attention.value",
        )
    ),
    "encoder.layers.*.attention.projection": "encoder.layer.*.attention.output.dense",
}
KEYS: KeyMap = {
    "embeddings.cls_token": "embeddings.cls_token",
    "embeddings.mask_token": "embeddings.mask_token",
    "embeddings.position_embeddings": "embeddings.position_embeddings",
    "embeddings.patch_embeddings.projection": "embeddings.patch_embeddings.projection",
    "encoder.layers.*.norm1": "encoder.layer.*.layernorm_before",
    **ATTENTION,
    "encoder.layers.*.norm2": "encoder.layer.*.layernorm_after",
    "encoder.layers.*.mlp.fc1": "encoder.layer.*.intermediate.dense",
    "encoder.layers.*.mlp.fc2": "encoder.layer.*.output.dense",
    "norm": "layernorm",
    "pooler.dense": "pooler.dense",
    "classifier": "classifier",
}
PIXEL_DECODER = {r"decoder\..*": "the decoder of masked image modelling"}


def configure(config: Config, shapes: Shapes) -> dict[str, Any]:
    """ViTConfig; which parts there are, its config.json does not tell."""
    return {
        **transformers_fields(config, layer_norm_eps=1e-12),
        "use_pooler": has_pooler(config, shapes),
        "use_mask_token": "embeddings.mask_token" in shapes,
    }


def has_pooler(config: Config, shapes: Shapes) -> bool:
    """Whether there is a pooler.

    Raises:
        ValueError: if it is none of ours.
    """
    activation = config.get("pooler_act", "tanh")
    sizes = config.get("hidden_size"), config.get("pooler_output_size")
    if "pooler.dense.weight" not in shapes:
        return False
    if activation != "tanh" or sizes[1] not in (None, sizes[0]):
        raise ValueError(
            f"The pooler has pooler_act={activation!r} and pooler_output_size={sizes[1]}, but only 'tanh' and "
            f"hidden_size={sizes[0]} are known here. Save the model without it (add_pooling_layer=False)."
        )
    return True


VIT = Family(
    name="ViT",
    source="transformers `vit`",
    model_types=("vit",),
    keys=KEYS,
    configure=configure,
    prefixes=("vit.",),
    dropped=PIXEL_DECODER,
    outputs="hidden states, pooled, logits",
)
