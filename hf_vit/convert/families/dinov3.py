"""DINOv3 of transformers (https://arxiv.org/abs/2508.10104)."""

from typing import Any

from ..family import Config, Family, Shapes, transformers_fields
from ..key_map import KeyMap, join_qkv


def keys(layer: str) -> KeyMap:
    """Returns the keys of the encoder without its norm, by what stands before the names of the parts of a block."""
    ours = "encoder.layers.*"
    return {
        "embeddings.cls_token": "embeddings.cls_token",
        "embeddings.register_tokens": "embeddings.register_tokens",
        "embeddings.patch_embeddings.projection": "embeddings.patch_embeddings",
        f"{ours}.norm1": f"{layer}.norm1",
        f"{ours}.attention.qkv": join_qkv(f"{layer}.attention."),
        f"{ours}.attention.query_bias": f"{layer}.attention.q_proj.bias",
        f"{ours}.attention.value_bias": f"{layer}.attention.v_proj.bias",
        f"{ours}.attention.projection": f"{layer}.attention.o_proj",
        f"{ours}.layer_scale1.scale": f"{layer}.layer_scale1.lambda1",
        f"{ours}.norm2": f"{layer}.norm2",
        f"{ours}.mlp.fc1": f"{layer}.mlp.up_proj",
        f"{ours}.mlp.fc2": f"{layer}.mlp.down_proj",
        f"{ours}.mlp.gate": f"{layer}.mlp.gate_proj",
        f"{ours}.mlp.up": f"{layer}.mlp.up_proj",
        f"{ours}.mlp.down": f"{layer}.mlp.down_proj",
        f"{ours}.layer_scale2.scale": f"{layer}.layer_scale2.lambda1",
    }


KEYS: KeyMap = {**keys("layer.*"), "embeddings.mask_token": "embeddings.mask_token", "norm": "norm"}
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
        "qkv_bias": biases["query_bias"],
        "position_embedding_type": "rotary",
        "use_mask_token": "embeddings.mask_token" in shapes,
    }


DINOV3 = Family(
    name="DINOv3",
    model_types=("dinov3_vit",),
    keys=KEYS,
    configure=configure,
    dropped={r"rope_embeddings\..*": "computed from the configuration"},
    # DINOv3ViTBackbone normalizes the last map in any case, and leaves the prefix out of sequences.
    fixed={"apply_layernorm": True, "reshape_hidden_states": True, "return_class_token": False},
    outputs="hidden states, pooled, feature maps",
)
