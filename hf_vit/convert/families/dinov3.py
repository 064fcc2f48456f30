"""DINOv3 of transformers (https://arxiv.org/abs/2508.10104)."""

from typing import Any

from ..family import Config, Family, Shapes, transformers_fields
from ..key_map import KeyMap, join_qkv


KEYS: KeyMap = {
    "embeddings.cls_token": "embeddings.cls_token",
    "embeddings.mask_token": "embeddings.mask_token",
    "embeddings.register_tokens": "embeddings.register_tokens",
    "embeddings.patch_embeddings.projection": "embeddings.patch_embeddings",
    "encoder.layers.*.norm1": "layer.*.norm1",
    "encoder.layers.*.attention.qkv": join_qkv("layer.*.attention."),
    "encoder.layers.*.attention.query_bias": "layer.*.attention.q_proj.bias",
    "encoder.layers.*.attention.value_bias": "layer.*.attention.v_proj.bias",
    "encoder.layers.*.attention.projection": "layer.*.attention.o_proj",
    "encoder.layers.*.layer_scale1.scale": "layer.*.layer_scale1.lambda1",
    "encoder.layers.*.norm2": "layer.*.norm2",
    "encoder.layers.*.mlp.fc1": "layer.*.mlp.up_proj",
    "encoder.layers.*.mlp.fc2": "layer.*.mlp.down_proj",
    "encoder.layers.*.mlp.gate": "layer.*.mlp.gate_proj",
    "encoder.layers.*.mlp.up": "layer.*.mlp.up_proj",
    "encoder.layers.*.mlp.down": "layer.*.mlp.down_proj",
    "encoder.layers.*.layer_scale2.scale": "layer.*.layer_scale2.lambda1",
    "norm": "norm",
}
DEFAULTS = {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_attention_heads": 6,
    "layer_norm_eps": 1e-5,
    "key_bias": False,
    "layerscale_value": 1.0,
}


def configure(config: Config, shapes: Shapes, **defaults: Any) -> dict[str, Any]:
    """Returns the fields of a DINOv3ViTConfig.

    `defaults` are those of a class for fields that config.json leaves out, where they differ from DINOv3ViTConfig.
    """
    biases = {name: config.get(name, name != "key_bias") for name in ("query_bias", "key_bias", "value_bias")}
    if biases["query_bias"] != biases["value_bias"] or biases["key_bias"] > biases["query_bias"]:
        raise ValueError(
            f"{biases}: query and value must both have a bias or neither, and the key only with them. Open the model "
            "with transformers."
        )
    return {
        **transformers_fields(config, **{**DEFAULTS, **defaults}),
        "attention_probs_dropout_prob": config.get("attention_dropout", 0.0),
        "qkv_bias": biases["query_bias"],
        "position_embedding_type": "rotary",
        "use_mask_token": "embeddings.mask_token" in shapes,
    }


DINOV3 = Family(
    name="DINOv3",
    source="transformers `dinov3_vit`",
    model_types=("dinov3_vit",),
    keys=KEYS,
    configure=configure,
    dropped={r"rope_embeddings\..*": "computed from the configuration"},
    # DINOv3ViTBackbone normalizes the last map in any case, and leaves the prefix out of sequences.
    fixed={"apply_layernorm": True, "reshape_hidden_states": True, "return_class_token": False},
    outputs="hidden states, pooled, feature maps",
)
