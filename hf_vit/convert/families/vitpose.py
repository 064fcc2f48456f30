"""ViTPose and ViTPose+ in transformers (https://arxiv.org/abs/2204.12484, https://arxiv.org/abs/2212.04246)."""

from typing import Any

from ...model.configuration_hf_vit import HfViTConfig
from ..family import Config, Family, Shapes, architecture_fields, check_backbone, label_fields
from ..key_map import Joined, KeyMap, Made, block_keys
from . import vit


BLOCK, MLP, HEAD = "encoder.layers.*", "encoder.layer.*.mlp", "keypoint_head"
KEYS: KeyMap = {
    # ViTPose has no CLS token, but its position table (1, 1 + N, D) has a CLS row, which is added to all patch rows.
    "embeddings.position_embeddings": Made(
        ("embeddings.position_embeddings",), lambda table: table[:, 1:] + table[:, :1]
    ),
    "embeddings.patch_embeddings.projection": "embeddings.patch_embeddings.projection",
    **block_keys(BLOCK, "encoder.layer.*", (*vit.BLOCK[:4], "mlp.fc1", "mlp.fc2")),
    "norm": "layernorm",
    **{f"{HEAD}.classic.up{i}.conv": f"head.deconv{i}" for i in (1, 2)},
    **{f"{HEAD}.classic.up{i}.norm": f"head.batchnorm{i}" for i in (1, 2)},
    **{f"{HEAD}.{name}.predictor": "head.conv" for name in ("classic", "simple")},
}


def adapt(config: Config, ours: HfViTConfig, shapes: Shapes) -> KeyMap:
    """Returns the rule that appends the rows of the selected ViTPose+ expert to the shared rows of an MLP."""
    backbone, index = config.get("backbone_config", config), config.get("dataset_index", 0)
    num_experts = backbone.get("num_experts", 1)
    if not 0 <= index < num_experts:
        raise ValueError(
            f"dataset_index={index} is out of range: the checkpoint has {num_experts} experts, 0 to {num_experts - 1}."
        )
    return {f"{BLOCK}.mlp.fc2": Joined((f"{MLP}.fc2", f"{MLP}.experts.{index}"))} if num_experts > 1 else {}


def configure(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of `HfViTConfig` for a VitPoseConfig or VitPoseBackboneConfig."""
    backbone = config.get("backbone_config", config)
    check_backbone(config.get("backbone_config", {}), "ViTPose", "vitpose_backbone")
    fields = architecture_fields(backbone, image_size=[256, 192], patch_size=[16, 16], layer_norm_eps=1e-12)
    num_layers = fields.get("num_hidden_layers", 12)
    stages = backbone.get("out_indices") or [num_layers]
    if "backbone_config" in config and stages[-1] != num_layers:
        raise ValueError(
            f"The head uses out_indices={stages}, but only the output of the last of num_hidden_layers={num_layers} "
            "blocks is supported. Use transformers for this checkpoint."
        )
    return {
        **fields,
        **label_fields(config),
        "intermediate_size": int(fields.get("hidden_size", 768) * backbone.get("mlp_ratio", 4)),
        "patch_padding": 2,
        "use_cls_token": False,
        "pooling": "mean",
        "keypoint_config": options(config),
    }


def options(config: Config) -> dict[str, Any]:
    """Returns the options of the head, with pairs of left and right keypoints inferred from the keypoint names."""
    numbers = {name: int(number) for number, name in (config.get("id2label") or {}).items()}
    others = {name: f"R{name[1:]}" for name in numbers if name.startswith("L_")}  # such as "L_Eye": "R_Eye"
    return {
        "head": "simple" if config.get("use_simple_decoder", True) else "classic",
        "scale_factor": config.get("scale_factor", 4),
        "flip_pairs": [[numbers[name], numbers[other]] for name, other in others.items() if other in numbers],
        "skeleton": config.get("edges") or [],
    }


VITPOSE = Family(
    name="ViTPose, ViTPose+",
    model_types=("vitpose", "vitpose_backbone"),
    keys=KEYS,
    adapt=adapt,
    configure=configure,
    prefixes=("backbone.",),
    dropped={r"encoder\.layer\.\d+\.mlp\.experts\..*": "experts of other datasets"},
    has_experts=True,
    outputs="hidden states, heatmaps; one expert",
)
