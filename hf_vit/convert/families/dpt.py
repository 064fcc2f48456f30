"""DPT with a plain ViT and Depth Anything with DINOv2, in the layout of transformers, for relative and metric depth.

Sources: https://arxiv.org/abs/2103.13413, 2401.10891 and 2406.09414.
"""

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from ...model.configuration_hf_vit import HfViTConfig
from ..family import Config, Family, Shapes, check_backbone, given_fields, transformers_fields
from ..key_map import KeyMap, parts
from . import dino, vit


HEAD = "depth_head.dpt"
# Key map entries that DPT and Depth Anything have in common
NECK: KeyMap = {
    **parts(f"{HEAD}.reassemble.*", "neck.reassemble_stage.layers.*", "projection resize"),
    **parts(HEAD, "neck", "convs.* fusions.*.projection=fusion_stage.layers.*.projection"),
    **{
        f"{HEAD}.fusions.*.residual{i}.conv{k}": f"neck.fusion_stage.layers.*.residual_layer{i}.convolution{k}"
        for i, k in product((1, 2), repeat=2)
    },
}
NECK_OPTIONS = ("neck_hidden_sizes", "reassemble_factors", "readout_type", "fusion_hidden_size", "head_hidden_size")
DROPPED = {r"neck\.fusion_stage\.layers\.0\.residual_layer1\..*": "unused, as the coarsest level has no input to fuse"}
KEYS: KeyMap = {
    **vit.KEYS,
    **NECK,
    f"{HEAD}.reassemble.*.readout": "neck.reassemble_stage.readout_projects.*.0",
    **parts(HEAD, "head.head", "conv1=0 conv2=2 predictor=4"),
}
DEPTH_ANYTHING_KEYS: KeyMap = {**dino.KEYS_2, **NECK, **parts(HEAD, "head", "conv1 conv2 predictor=conv3")}
# Default backbone of DepthAnythingConfig, for files without a backbone_config
BACKBONE = {"image_size": 518, "hidden_size": 384, "num_attention_heads": 6, "out_indices": [9, 10, 11, 12]}


configure_encoder = partial(
    transformers_fields, image_size=384, layer_norm_eps=1e-12, position_interpolation="bilinear"
)


def configure(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of `HfViTConfig` for a DPTConfig. DPTConfig counts blocks from 0, `HfViTConfig` from 1."""
    blocks = config.get("backbone_out_indices") or (2, 5, 8, 11)
    return {
        **configure_encoder(config, shapes),
        "apply_layernorm": False,
        "depth_config": {
            "out_indices": [block + 1 for block in sorted(blocks)],
            "depth_estimation_type": "relative",
            "doubles_resolution": True,
            **given_fields(config, NECK_OPTIONS),
        },
    }


def configure_depth_anything(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of `HfViTConfig` for a DepthAnythingConfig and its nested Dinov2Config."""
    theirs = config.get("backbone_config") or BACKBONE
    check_backbone(theirs, "Depth Anything", "dinov2")
    kind, max_depth = config.get("depth_estimation_type", "relative"), config.get("max_depth")
    if kind == "relative" and max_depth not in (None, 1):
        raise ValueError(f"max_depth={max_depth} is not supported for relative depth, which has no unit. Set it to 1.")
    backbone = dino.configure_2(theirs, shapes) | {"reshape_hidden_states": True}
    return {
        **backbone,
        "depth_config": {
            "out_indices": HfViTConfig(**backbone).out_indices,
            "depth_estimation_type": kind,
            "max_depth": max_depth if kind == "metric" else None,
            "readout_type": "ignore",
            **given_fields(config, NECK_OPTIONS, neck_hidden_sizes=[48, 96, 192, 384], fusion_hidden_size=64),
        },
    }


DPT = Family(
    name="DPT",
    model_types=("dpt",),
    keys=KEYS,
    configure=configure,
    prefixes=("dpt.",),
    dropped=DROPPED,
    # In DPT, hidden_act also applies to the readout projection. The readout projection in hf_vit uses GELU.
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
    keys=vit.KEYS,
    configure=configure_encoder,
    dropped={r"(neck|head|auxiliary_head)\..*": "the segmentation head, which is not supported"},
    outputs="hidden states (the head is not converted)",
)
DEPTH_ANYTHING = Family(
    name="Depth Anything",
    model_types=("depth_anything",),
    keys=DEPTH_ANYTHING_KEYS,
    configure=configure_depth_anything,
    prefixes=("backbone.",),
    dropped=DROPPED,
    fixed={"head_in_index": -1, "backbone": None},
    outputs="hidden states, relative or metric depth",
)
