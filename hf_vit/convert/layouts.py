"""The layouts of other libraries that our models are exported to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..model.configuration_hf_vit import HfViTConfig, to_pair
from .families import DEIT, DINOV2, DINOV2_WITH_REGISTERS, TIMM, VIT
from .families.timm_vit import ACTIVATIONS, POOLINGS
from .family import Family, common_fields
from .key_map import KeyMap


Weights = Mapping[str, Tensor]
TIMM_POOLINGS = {ours: theirs for theirs, ours in POOLINGS.items()}
TIMM_ACTIVATIONS = {ours: theirs for theirs, ours in ACTIVATIONS.items()}


@dataclass(frozen=True)
class Layout:
    """A layout to export to.

    Args:
        family: What reads it back.
        configure: Their config.json from our configuration; the second argument tells whether there is a classifier.
        head_prefix: What stands before the names of the base model in a model with a classifier.
        adapt: What our configuration changes in the key map.
        complete: Gives the weights in their names what they need beyond the key map.
        has_mask_token: Whether there is a place for one; without, it is left out.
        requires: Fields that must have these values, beyond what reading the result back tells.
    """

    family: Family
    configure: Callable[[HfViTConfig, bool], dict[str, Any]]
    head_prefix: str = ""
    adapt: Callable[[HfViTConfig], KeyMap] = lambda config: {}
    complete: Callable[[HfViTConfig, Weights], Weights] = lambda config, weights: weights
    has_mask_token: bool = False
    requires: Mapping[str, Any] = field(default_factory=dict)


def configure_vit(model_type: str, model: str, classifier: str, /, config: HfViTConfig, is_classifier: bool) -> Any:
    """Returns the config.json of a ViT or DeiT, whose classes are `model` and `classifier`."""
    name = classifier if is_classifier else model
    return {"model_type": model_type, "architectures": [name], **common_fields(config)}


def configure_dinov2(config: HfViTConfig, is_classifier: bool) -> dict[str, Any]:
    """Returns the config.json of a DINOv2; `ValueError` if image or patch is not square, which that class needs."""
    for name, size in (("image_size", config.image_size), ("patch_size", config.patch_size)):
        height, width = to_pair(size)
        if height != width:
            raise ValueError(
                f"The DINOv2 classes of transformers fail with {name}={size}, which is not square. Export another "
                f"layout, or load the model with {name}={width} first, which resamples its weights."
            )
    fields = common_fields(config)
    # Of SwiGLU they take two thirds, rounded up to a multiple of 8.
    factor = 1.5 if config.use_gated_mlp else 1
    fields["mlp_ratio"] = round(factor * fields.pop("intermediate_size") / config.hidden_size)
    return {
        "model_type": "dinov2",
        "architectures": ["Dinov2ForImageClassification" if is_classifier else "Dinov2Model"],
        **fields,
        # Dinov2Config takes the activation of the plain MLP only.
        "hidden_act": "gelu" if config.use_gated_mlp else config.hidden_act,
        "use_swiglu_ffn": config.use_gated_mlp,
        "layerscale_value": config.layerscale_value,
        "drop_path_rate": config.drop_path_rate,
        "use_mask_token": config.use_mask_token,
    }


def configure_dinov2_with_registers(config: HfViTConfig, is_classifier: bool) -> dict[str, Any]:
    """Returns the config.json of a DINOv2 with registers."""
    fields = configure_dinov2(config, is_classifier)
    name = fields["architectures"][0].replace("Dinov2", "Dinov2WithRegisters")
    changed = {"model_type": "dinov2_with_registers", "architectures": [name]}
    return {**fields, **changed, "num_register_tokens": config.num_register_tokens}


def configure_timm(config: HfViTConfig, is_classifier: bool) -> dict[str, Any]:
    """Returns timm's config.json of a model of its plain class, with every argument given."""
    if config.use_distillation_token:
        check_distilled(config, is_classifier)
    if config.proj_bias != config.mlp_bias:
        raise ValueError(f"timm cannot express proj_bias={config.proj_bias} with mlp_bias={config.mlp_bias}.")
    pool = TIMM_POOLINGS.get(config.pooling, config.pooling)
    distilled = config.use_distillation_token
    arguments = {
        "img_size": config.image_size,
        "patch_size": config.patch_size,
        "in_chans": config.num_channels,
        "embed_dim": config.hidden_size,
        "depth": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "mlp_ratio": config.intermediate_size / config.hidden_size,
        "qkv_bias": config.qkv_bias,
        "proj_bias": config.proj_bias,
        "qk_norm": config.use_qk_norm,
        "init_values": config.layerscale_value,
        "class_token": config.use_cls_token,
        "no_embed_class": config.num_prefix_positions == 0,
        "reg_tokens": config.num_register_tokens,
        "global_pool": pool,
        "fc_norm": config.norm_after_pooling,
        "act_layer": TIMM_ACTIVATIONS.get(config.hidden_act),
        "norm_layer": "rmsnorm" if config.norm_type == "rmsnorm" else None,
    }
    names = list((config.id2label or {}).values())
    return {
        "architecture": "deit_base_distilled_patch16_224" if distilled else "vit_base_patch16_224",
        "num_classes": config.num_labels if is_classifier else 0,
        "num_features": config.hidden_size,
        "global_pool": pool,
        "model_args": {name: value for name, value in arguments.items() if value is not None},
        "pretrained_cfg": {"input_size": [config.num_channels, *to_pair(config.image_size)]},
        **({"label_names": names} if is_classifier and names else {}),
    }


def check_distilled(config: HfViTConfig, is_classifier: bool) -> None:
    """Raises `ValueError` unless timm's class with a distillation token computes what ours does."""
    for name, value in {"num_register_tokens": 0, "prefix_has_position": True, "pooling": "cls"}.items():
        if vars(config)[name] != value:
            raise ValueError(
                f"timm cannot express {name}={vars(config)[name]!r} with use_distillation_token=True, only {value!r}."
            )
    if not is_classifier:
        raise ValueError(
            "timm cannot express use_distillation_token=True without classifiers: its output is then the mean of both "
            "tokens, not pooler_output. Export an HfViTForImageClassification."
        )


def complete_timm(config: HfViTConfig, weights: Weights) -> Weights:
    """Adds zeros as positions of the registers, which timm has where CLS has a position."""
    first = config.num_prefix_positions
    if first == 0 or config.num_register_tokens == 0:
        return weights
    before, patches = weights["pos_embed"].tensor_split((first,), dim=1)
    nothing = patches.new_zeros(1, config.num_register_tokens, config.hidden_size)
    return {**weights, "pos_embed": torch.cat((before, nothing, patches), dim=1)}


def adapt_timm(config: HfViTConfig) -> KeyMap:
    """Returns the name of the last norm of timm."""
    return {"norm": "fc_norm"} if config.norm_after_pooling else {}


LAYOUTS = {
    "vit": Layout(VIT, partial(configure_vit, "vit", "ViTModel", "ViTForImageClassification"), "vit."),
    "deit": Layout(
        DEIT, partial(configure_vit, "deit", "DeiTModel", "DeiTForImageClassificationWithTeacher"), "deit."
    ),
    "dinov2": Layout(DINOV2, configure_dinov2, head_prefix="dinov2.", has_mask_token=True),
    "dinov2_with_registers": Layout(
        DINOV2_WITH_REGISTERS,
        configure_dinov2_with_registers,
        head_prefix="dinov2_with_registers.",
        has_mask_token=True,
    ),
    "timm": Layout(
        TIMM,
        configure_timm,
        adapt=adapt_timm,
        complete=complete_timm,
        # Its plain class has no argument for the others, or, for the norm before the blocks, no bias in the patches.
        requires={"position_embedding_type": "learned", "use_pre_layernorm": False, "key_bias": True},
    ),
}
