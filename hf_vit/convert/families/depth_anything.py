"""Depth Anything of transformers, on DINOv2, relative and metric (https://arxiv.org/abs/2401.10891, 2406.09414)."""

from typing import Any

from ...model.configuration_hf_vit import HfViTConfig
from ..family import Config, Family, Shapes
from ..key_map import KeyMap
from . import dinov2
from .dpt import DROPPED, HEAD, NECK, neck_options


KEYS: KeyMap = {
    **dinov2.KEYS,
    **NECK,
    f"{HEAD}.conv1": "head.conv1",
    f"{HEAD}.conv2": "head.conv2",
    f"{HEAD}.predictor": "head.conv3",
}
# What their class assumes where config.json names none
BACKBONE = {"image_size": 518, "hidden_size": 384, "num_attention_heads": 6, "out_indices": [9, 10, 11, 12]}


def configure(config: Config, shapes: Shapes) -> dict[str, Any]:
    """DepthAnythingConfig and the Dinov2Config in it.

    Raises:
        ValueError: if the backbone is another, or relative depth is scaled.
    """
    theirs = config.get("backbone_config") or BACKBONE
    if theirs.get("model_type", "dinov2") != "dinov2":
        raise ValueError(
            f"The backbone_config has model_type={theirs['model_type']!r}; of Depth Anything, only 'dinov2' is known "
            "here. Open it with transformers."
        )
    kind, max_depth = config.get("depth_estimation_type", "relative"), config.get("max_depth")
    if kind == "relative" and max_depth not in (None, 1):
        raise ValueError(f"max_depth={max_depth} scales relative depth, which has no unit here. Set it to 1.")
    backbone = dinov2.configure(theirs, shapes) | {"reshape_hidden_states": True}
    return {
        **backbone,
        "depth_config": {
            "out_indices": HfViTConfig(**backbone).out_indices,
            "depth_estimation_type": kind,
            "max_depth": max_depth if kind == "metric" else None,
            "readout_type": "ignore",
            **neck_options(config, neck_hidden_sizes=[48, 96, 192, 384], fusion_hidden_size=64),
        },
    }


DEPTH_ANYTHING = Family(
    name="Depth Anything",
    source="transformers `depth_anything`",
    model_types=("depth_anything",),
    keys=KEYS,
    configure=configure,
    prefixes=("backbone.",),
    dropped=DROPPED,
    fixed={"head_in_index": -1, "backbone": None},
    outputs="hidden states, relative or metric depth",
)
