"""DINOv2 with and without registers, DINOv3, and EoMT with either backbone, in the layout of transformers.

Sources: https://arxiv.org/abs/2304.07193, 2309.16588, 2508.10104 and 2503.19108.
"""

from dataclasses import fields as fields_of
from dataclasses import replace
from functools import partial
from typing import Any

from transformers import DINOv3ViTConfig

from ...model.task_configurations import HfViTUniversalSegmentationConfig
from ..family import Config, Family, Shapes, given_fields, is_classifier, transformers_fields
from ..key_map import KeyMap, Reshaped, block_keys, gated_mlp_keys, join_qkv, parts
from . import vit


BLOCK, SCALES = "encoder.layers.*", ("layer_scale1.lambda1", "layer_scale2.lambda1")
PARTS_2 = ("norm1", vit.QKV, "attention.output.dense", "norm2", "mlp.fc1", "mlp.fc2", *SCALES)
KEYS_2: KeyMap = {
    **vit.EMBEDDINGS,
    "embeddings.mask_token": Reshaped(("embeddings.mask_token",), back=(1, -1)),
    **block_keys(BLOCK, "encoder.layer.*", PARTS_2),
    **gated_mlp_keys("encoder.layer.*.mlp", "weights_in", "weights_out"),
    **parts("", "", "embeddings.register_tokens norm=layernorm classifier"),
}


def configure_2(config: Config, shapes: Shapes, **defaults: Any) -> dict[str, Any]:
    """Returns the fields of `HfViTConfig` for a Dinov2Config.

    Classifiers use the CLS token and the mean of the patch tokens. `defaults` replace the defaults of Dinov2Config
    for fields that config.json omits.
    """
    fields = transformers_fields(config, shapes, **{"patch_size": 14, "layerscale_value": 1.0, **defaults})
    intermediate_size = int(fields.get("hidden_size", 768) * config.get("mlp_ratio", 4))
    if config.get("use_swiglu_ffn", False):
        intermediate_size = (int(intermediate_size * 2 / 3) + 7) // 8 * 8
        fields |= {"use_gated_mlp": True, "hidden_act": "silu"}
    pooling = "cls_mean" if is_classifier(shapes) else "cls"
    return {**fields, "intermediate_size": intermediate_size, "pooling": pooling}


DINOV2 = Family(
    name="DINOv2",
    model_types=("dinov2",),
    keys=KEYS_2,
    configure=configure_2,
    prefixes=("dinov2.",),
    outputs="hidden states, pooled, logits, feature maps",
)
DINOV2_WITH_REGISTERS = replace(
    DINOV2,
    name="DINOv2 with registers",
    model_types=("dinov2_with_registers",),
    configure=partial(configure_2, patch_size=16, num_register_tokens=4, position_antialias=True),
    prefixes=("dinov2_with_registers.",),
)


def encoder_keys_3(layer: str) -> KeyMap:
    """Returns the key map entries of DINOv3's embeddings and blocks; `layer` is the name of a block in the source."""
    qkv = join_qkv("attention.")
    rules = ("norm1", qkv, "attention.o_proj", "norm2", "mlp.up_proj", "mlp.down_proj", *SCALES)
    return {
        **parts("embeddings", "embeddings", "cls_token register_tokens patch_embeddings.projection=patch_embeddings"),
        **block_keys(BLOCK, layer, rules),
        **parts(f"{BLOCK}.attention", f"{layer}.attention", "query_bias=q_proj.bias value_bias=v_proj.bias"),
        **parts(f"{BLOCK}.mlp", f"{layer}.mlp", "gate=gate_proj up=up_proj down=down_proj"),
    }


KEYS_3: KeyMap = {**encoder_keys_3("layer.*"), **parts("", "", "embeddings.mask_token norm")}
DEFAULTS_3 = given_fields(
    DINOv3ViTConfig().to_dict(),
    ("hidden_size", "intermediate_size", "num_attention_heads", "layer_norm_eps", "key_bias", "layerscale_value"),
)


def configure_3(config: Config, shapes: Shapes, **defaults: Any) -> dict[str, Any]:
    """Returns the fields of `HfViTConfig` for a DINOv3ViTConfig.

    `defaults` replace the defaults of DINOv3ViTConfig for fields that config.json omits.
    """
    biases = {name: config.get(name, name != "key_bias") for name in ("query_bias", "key_bias", "value_bias")}
    if biases["query_bias"] != biases["value_bias"] or biases["key_bias"] > biases["query_bias"]:
        raise ValueError(
            f"{biases} is not supported. Only query and value, or query, key and value, or none of them may have a "
            "bias. Use transformers for this checkpoint."
        )
    fields = transformers_fields(config, shapes, **{**DEFAULTS_3, **defaults})
    return {**fields, "qkv_bias": biases["query_bias"], "position_embedding_type": "rotary"}


DINOV3 = Family(
    name="DINOv3",
    model_types=("dinov3_vit",),
    keys=KEYS_3,
    configure=configure_3,
    dropped={r"rope_embeddings\..*": "computed from the configuration"},
    # DINOv3ViTBackbone always applies the final norm to feature maps and never returns prefix tokens.
    fixed={"apply_layernorm": True, "reshape_hidden_states": True, "return_class_token": False},
    outputs="hidden states, pooled, feature maps",
)

HEAD = "universal_segmentation_head"
EOMT_DINOV3_KEYS: KeyMap = {
    **encoder_keys_3("layers.*"),
    "norm": "layernorm",
    **parts(HEAD, "", "mask_probabilities=attn_mask_probs queries=query classifier=class_predictor"),
    **parts(f"{HEAD}.mask_embedding", "mask_head", "fc1 fc2 fc3"),
    **parts(f"{HEAD}.upscale.*", "upscale_block.block.*", "upsample=conv1 depthwise=conv2 norm=layernorm2d"),
}
EOMT_KEYS: KeyMap = {
    **EOMT_DINOV3_KEYS,
    "embeddings.position_embeddings": Reshaped(("embeddings.position_embeddings.weight",)),
    **parts("", "", "embeddings.patch_embeddings.projection"),
    **parts(BLOCK, "layers.*", "attention.projection=attention.out_proj mlp.fc1 mlp.fc2"),
}
# Key map entries for files saved by transformers before 5.20, which store gate and up projection in one layer
JOINT_GATED_MLP_KEYS = gated_mlp_keys("layers.*.mlp", "weights_in", "weights_out")
OPTIONS = tuple(field.name for field in fields_of(HfViTUniversalSegmentationConfig))
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "image_size": 640}


def head_fields(config: Config) -> dict[str, Any]:
    """Returns the number of registers and the head options of an EomtConfig or EomtDinov3Config."""
    return {
        "num_register_tokens": config.get("num_register_tokens", 4),
        "universal_segmentation_config": {"num_blocks": 4, **given_fields(config, OPTIONS)},
    }


def configure_eomt(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of `HfViTConfig` for an EomtConfig."""
    # Position embeddings are resampled as in DINOv2 with registers, the backbone of EoMT.
    constants = {"prefix_has_position": False, "position_antialias": True}
    return {**configure_2(config, shapes, **LARGE, patch_size=16, **constants), **head_fields(config)}


def configure_eomt_dinov3(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of `HfViTConfig` for an EomtDinov3Config, with `rope_theta` from `rope_parameters`."""
    return {
        **configure_3(config, shapes, **LARGE, intermediate_size=4096, layer_norm_eps=1e-6),
        "rope_theta": (config.get("rope_parameters") or {}).get("rope_theta", 100.0),
        **head_fields(config),
    }


EOMT = Family(
    name="EoMT",
    model_types=("eomt",),
    keys=EOMT_KEYS,
    adapt=lambda config, ours, shapes: JOINT_GATED_MLP_KEYS if "layers.0.mlp.weights_in.weight" in shapes else {},
    configure=configure_eomt,
    dropped={r"criterion\..*": "weights of the loss, which are in the configuration"},
    fixed={"hidden_act": "gelu"},  # In EoMT, hidden_act also applies to the head. The head in hf_vit uses GELU.
    outputs="hidden states, classes and masks of the queries",
)
EOMT_DINOV3 = replace(
    EOMT, name="EoMT on DINOv3", model_types=("eomt_dinov3",), keys=EOMT_DINOV3_KEYS, configure=configure_eomt_dinov3
)
