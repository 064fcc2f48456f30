"""SigLIP and SigLIP 2 in the files of OpenCLIP, whose image tower is timm's (https://arxiv.org/abs/2303.15343)."""

import re
from dataclasses import replace
from typing import Any

from ...model.configuration_hf_vit import HfViTConfig, to_pair
from ..family import Config, Shapes
from ..key_map import KeyMap
from . import block_layout, open_clip, timm_vit
from .open_clip import check_sizes, foreign_fields
from .siglip import OF_TEXTS, padding_of


TEXT_KEYS: KeyMap = {
    **{ours: rule for ours, rule in open_clip.text_keys("text.").items() if not ours.endswith("projection.weight")},
    "contrastive_head.text_projection": "text.text_projection",
}
# What the towers have for one value only, as in `open_clip`, what they have if it is left out, and what has no effect
FIXED = {"timm_pool": "map", "timm_proj": "none", "timm_proj_bias": None}
LEFT_OUT = {"timm_pool": "avg", "timm_proj": "linear"}
TIMM_FIELDS = ("timm_model_name", "timm_model_pretrained", "timm_drop", "timm_drop_path")
WITHOUT_EFFECT = (*TIMM_FIELDS, *open_clip.DEFAULTS, "mlp_ratio", "patch_dropout")  # the name tells the sizes
TEXT_FIXED = {**open_clip.TEXT_FIXED, "no_causal_mask": True, "proj_bias": True, "pool_type": "last"}
TEXT_LEFT_OUT = {"no_causal_mask": False, "proj_bias": False, "pool_type": "argmax"}
TEXT_READ = ("act_kwargs", "norm_kwargs", *open_clip.TEXT_DEFAULTS, *open_clip.TEXT_WITHOUT_EFFECT)
ACTIVATIONS = {"none": "gelu", "tanh": "gelu_pytorch_tanh"}  # by `approximate`


def reads(config: Config) -> bool:
    """Returns whether open_clip_config.json is of a SigLIP."""
    vision = config.get("model_cfg", {}).get("vision_cfg", {})
    return re.fullmatch(r"vit_.*_siglip_\d+", vision.get("timm_model_name") or "") is not None


def refuse_texts(config: Config, shapes: Shapes) -> str:
    """Returns what keeps the text tower from being opened; empty where nothing does."""
    model = config["model_cfg"]
    text = model.get("text_cfg", {})
    foreign = {name: model[name] for name in model if name not in open_clip.MODEL_FIELDS}
    foreign |= foreign_fields({**TEXT_LEFT_OUT, **text}, TEXT_FIXED, TEXT_READ)
    activation, norm = text.get("act_kwargs") or {}, text.get("norm_kwargs") or {}
    if activation.keys() - {"approximate"} or activation.get("approximate", "none") not in ACTIVATIONS:
        foreign["act_kwargs"] = activation
    if norm.keys() - {"eps"}:
        foreign["norm_kwargs"] = norm
    if "logit_bias" not in shapes:
        foreign["init_logit_bias"] = None
    return f"open_clip_config.json has {foreign}" if foreign else ""


def text_fields(model: Config, shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of the text tower, which attends to padding, and of what compares it with images."""
    text = {**open_clip.TEXT_DEFAULTS, **model["text_cfg"]}
    hidden_act = ACTIVATIONS[(text.get("act_kwargs") or {}).get("approximate", "none")]
    tower = open_clip.text_tower_fields("text.", hidden_act, shapes, text["heads"])
    fields = {
        **tower,
        "layer_norm_eps": (text.get("norm_kwargs") or {}).get("eps", 1e-5),
        **OF_TEXTS,
        "pad_token_id": padding_of(tower["vocab_size"]),
    }
    check_sizes(text, open_clip.TEXT_SIZES, fields)
    return {"text_config": fields, "contrastive_config": {"loss": "sigmoid", "projection_dim": None}}


def configure(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Returns the fields by open_clip_config.json: those of timm's image tower, and of the text tower if it opens."""
    model = config["model_cfg"]
    vision = model["vision_cfg"]
    open_clip.check_image_tower({**LEFT_OUT, **vision}, FIXED, WITHOUT_EFFECT)
    timm = architecture(config) | {"input_size": (3, *to_pair(vision.get("image_size", 224)))}
    fields = timm_vit.configure({**timm, "image_size": config.get("image_size")}, shapes)
    return {**fields, **({} if refuse_texts(config, shapes) else text_fields(model, shapes))}


def architecture(config: Config) -> dict[str, Any]:
    """Returns what timm's config.json would say of the image tower."""
    return {"architecture": config["model_cfg"]["vision_cfg"]["timm_model_name"]}


def adapt(config: Config, ours: HfViTConfig, shapes: Shapes) -> KeyMap:
    """Returns what the architecture of the image tower changes in the key map, and the keys of a text tower."""
    keys = timm_vit.adapt(architecture(config), ours, shapes)
    return keys if ours.text_config is None else {**keys, **TEXT_KEYS}


OPEN_CLIP_SIGLIP = replace(
    open_clip.OPEN_CLIP,
    name="SigLIP",
    reads=reads,
    keys=block_layout.KEYS,
    adapt=adapt,
    configure=configure,
    prefixes=("visual.trunk.",),
    dropped={r"text\..*|logit_.*": "a text tower that is not known here"},
    refuse_texts=refuse_texts,
)
