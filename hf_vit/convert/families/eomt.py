"""EoMT of transformers, on DINOv2 and on DINOv3 (https://arxiv.org/abs/2503.19108)."""

from dataclasses import fields as fields_of
from dataclasses import replace
from typing import Any

from ...model.task_configurations import HfViTUniversalSegmentationConfig
from ..family import Config, Family, Shapes, given_fields
from ..key_map import KeyMap, Reshaped, Rows
from . import dinov2, dinov3


BLOCK, HEAD = "encoder.layers.*", "universal_segmentation_head"
EOMT_DINOV3_KEYS: KeyMap = {
    **dinov3.keys("layers.*"),
    "norm": "layernorm",
    f"{HEAD}.mask_probabilities": "attn_mask_probs",
    f"{HEAD}.queries": "query",
    f"{HEAD}.mask_embedding.fc1": "mask_head.fc1",
    f"{HEAD}.mask_embedding.fc2": "mask_head.fc2",
    f"{HEAD}.mask_embedding.fc3": "mask_head.fc3",
    f"{HEAD}.upscale.*.upsample": "upscale_block.block.*.conv1",
    f"{HEAD}.upscale.*.depthwise": "upscale_block.block.*.conv2",
    f"{HEAD}.upscale.*.norm": "upscale_block.block.*.layernorm2d",
    f"{HEAD}.classifier": "class_predictor",
}
EOMT_KEYS: KeyMap = {
    **EOMT_DINOV3_KEYS,
    "embeddings.position_embeddings": Reshaped(("embeddings.position_embeddings.weight",)),
    "embeddings.patch_embeddings.projection": "embeddings.patch_embeddings.projection",
    f"{BLOCK}.attention.projection": "layers.*.attention.out_proj",
    f"{BLOCK}.mlp.fc1": "layers.*.mlp.fc1",
    f"{BLOCK}.mlp.fc2": "layers.*.mlp.fc2",
}
# Files of transformers before 5.20 have both branches of a gated MLP in one.
IN_ONE: KeyMap = {
    f"{BLOCK}.mlp.gate": Rows(("layers.*.mlp.weights_in",), 0, 1, 2),
    f"{BLOCK}.mlp.up": Rows(("layers.*.mlp.weights_in",), 1, 2, 2),
    f"{BLOCK}.mlp.down": "layers.*.mlp.weights_out",
}
OPTIONS = tuple(field.name for field in fields_of(HfViTUniversalSegmentationConfig))
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "image_size": 640}


def head_fields(config: Config) -> dict[str, Any]:
    """Returns what both configurations say of the head, and of the registers."""
    return {
        "num_register_tokens": config.get("num_register_tokens", 4),
        "universal_segmentation_config": {"num_blocks": 4, **given_fields(config, OPTIONS)},
    }


def configure(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of an EomtConfig, whose prefix has no positions."""
    return {
        **dinov2.configure(config, shapes, **LARGE, patch_size=16),
        **head_fields(config),
        "prefix_has_position": False,
        "position_antialias": True,  # as in the backbone that it was trained from
    }


def configure_dinov3(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of an EomtDinov3Config, whose `rope_theta` stands in `rope_parameters`."""
    large = LARGE | {"intermediate_size": 4096, "layer_norm_eps": 1e-6}
    return {
        **dinov3.configure(config, shapes, **large),
        "rope_theta": (config.get("rope_parameters") or {}).get("rope_theta", 100.0),
        **head_fields(config),
    }


EOMT = Family(
    name="EoMT",
    model_types=("eomt",),
    keys=EOMT_KEYS,
    adapt=lambda config, ours, shapes: IN_ONE if "layers.0.mlp.weights_in.weight" in shapes else {},
    configure=configure,
    dropped={r"criterion\..*": "weights of the loss, which are in the configuration"},
    fixed={"hidden_act": "gelu"},  # of the head too, where ours has no other
    outputs="hidden states, classes and masks of the queries",
)
EOMT_DINOV3 = replace(
    EOMT,
    name="EoMT on DINOv3",
    model_types=("eomt_dinov3",),
    keys=EOMT_DINOV3_KEYS,
    configure=configure_dinov3,
)
