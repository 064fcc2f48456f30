"""DPT of transformers on its own ViT (https://arxiv.org/abs/2103.13413)."""

from dataclasses import replace
from typing import Any

from ..family import Config, Family, Shapes, transformers_fields
from ..key_map import KeyMap
from .vit import KEYS as VIT_KEYS
from .vit import has_pooler


HEAD = "depth_head.dpt"
# What Depth Anything shares
NECK: KeyMap = {
    f"{HEAD}.reassemble.*.projection": "neck.reassemble_stage.layers.*.projection",
    f"{HEAD}.reassemble.*.resize": "neck.reassemble_stage.layers.*.resize",
    f"{HEAD}.convs.*": "neck.convs.*",
    f"{HEAD}.fusions.*.residual1.conv1": "neck.fusion_stage.layers.*.residual_layer1.convolution1",
    f"{HEAD}.fusions.*.residual1.conv2": "neck.fusion_stage.layers.*.residual_layer1.convolution2",
    f"{HEAD}.fusions.*.residual2.conv1": "neck.fusion_stage.layers.*.residual_layer2.convolution1",
    f"{HEAD}.fusions.*.residual2.conv2": "neck.fusion_stage.layers.*.residual_layer2.convolution2",
    f"{HEAD}.fusions.*.projection": "neck.fusion_stage.layers.*.projection",
}
DROPPED = {r"neck\.fusion_stage\.layers\.0\.residual_layer1\..*": "for a coarser level, which the first one has not"}
KEYS: KeyMap = {
    **VIT_KEYS,
    **NECK,
    f"{HEAD}.reassemble.*.readout": "neck.reassemble_stage.readout_projects.*.0",
    f"{HEAD}.conv1": "head.head.0",
    f"{HEAD}.conv2": "head.head.2",
    f"{HEAD}.predictor": "head.head.4",
}


def configure_encoder(config: Config, shapes: Shapes) -> dict[str, Any]:
    """DPTConfig without its head."""
    return {
        **transformers_fields(config, image_size=384, layer_norm_eps=1e-12),
        "use_pooler": has_pooler(config, shapes),
        "position_interpolation": "bilinear",
    }


def configure(config: Config, shapes: Shapes) -> dict[str, Any]:
    """DPTConfig; its levels are blocks counted from 0, not normalized."""
    blocks = config.get("backbone_out_indices") or (2, 5, 8, 11)
    return {
        **configure_encoder(config, shapes),
        "apply_layernorm": False,
        "depth_config": {
            "out_indices": [block + 1 for block in sorted(blocks)],
            "depth_estimation_type": "relative",
            "doubles_resolution": True,
            **neck_options(config),
        },
    }


def neck_options(config: Config, **defaults: Any) -> dict[str, Any]:
    """Returns the options of the head that have their names; `defaults` as in their class where ours differ."""
    names = ("neck_hidden_sizes", "reassemble_factors", "readout_type", "fusion_hidden_size", "head_hidden_size")
    return {**defaults, **{name: config[name] for name in names if config.get(name) is not None}}


DPT = Family(
    name="DPT",
    source="transformers `dpt`",
    model_types=("dpt",),
    keys=KEYS,
    configure=configure,
    prefixes=("dpt.",),
    dropped=DROPPED,
    # The activation is that of the readout too, where ours has no other.
    fixed={
        "hidden_act": "gelu",
        "is_hybrid": False,
        "backbone_config": None,
        "backbone": None,
        "add_projection": False,
        "head_in_index": -1,
        "use_batch_norm_in_fusion_residual": False,
    },
    outputs="hidden states, relative depth",
)
DPT_SEGMENTATION = replace(
    DPT,
    name="DPT for segmentation",
    reads=lambda config: "DPTForSemanticSegmentation" in (config.get("architectures") or ()),
    keys=VIT_KEYS,
    configure=configure_encoder,
    dropped={r"(neck|head|auxiliary_head)\..*": "its head, which has no counterpart"},
    outputs="hidden states; without its head",
)
