"""The image tower in the files of OpenAI's CLIP and of OpenCLIP (https://arxiv.org/abs/2103.00020, 2212.07143)."""

from dataclasses import replace
from typing import Any

from ...model.configuration_hf_vit import to_pair
from ..family import Config, Family, Shapes, Size, shape_of
from ..key_map import KeyMap, Reshaped, Zeros
from .block_layout import as_size, table_size


BLOCK = "visual.transformer.resblocks.*"
KEYS: KeyMap = {
    "embeddings.cls_token": Reshaped(("visual.class_embedding",)),
    "embeddings.position_embeddings": Reshaped(("visual.positional_embedding",)),
    "embeddings.patch_embeddings.projection.weight": "visual.conv1.weight",
    "embeddings.patch_embeddings.projection.bias": Zeros(),
    "pre_norm": "visual.ln_pre",
    "encoder.layers.*.norm1": f"{BLOCK}.ln_1",
    "encoder.layers.*.attention.qkv.weight": f"{BLOCK}.attn.in_proj_weight",
    "encoder.layers.*.attention.qkv.bias": f"{BLOCK}.attn.in_proj_bias",
    "encoder.layers.*.attention.projection": f"{BLOCK}.attn.out_proj",
    "encoder.layers.*.norm2": f"{BLOCK}.ln_2",
    "encoder.layers.*.mlp.fc1": f"{BLOCK}.mlp.c_fc",
    "encoder.layers.*.mlp.fc2": f"{BLOCK}.mlp.c_proj",
    "norm": "visual.ln_post",
}
# What CLIPVisionCfg assumes for fields that are left out, and what they are here
DEFAULTS = {"layers": 12, "width": 768, "head_width": 64, "patch_size": 16, "image_size": 224}
SIZES = {"layers": "num_hidden_layers", "width": "hidden_size", "patch_size": "patch_size"}
# Its fields that we have for one value only; None stands for all that means no.
FIXED = {
    "pool_type": "tok",
    "pos_embed_type": "learnable",
    "timm_model_name": None,
    "attentional_pool": None,
    "global_average_pool": None,
    "final_ln_after_pool": None,
    "no_ln_pre": None,
    "input_patchnorm": None,
    "ls_init_value": None,
    "norm_kwargs": None,
    "act_kwargs": None,
}
# Those that the weights tell, that act in training alone, or that say more about what is fixed above
WITHOUT_EFFECT = (
    "mlp_ratio",
    "patch_dropout",
    "output_tokens",
    "attn_pooler_queries",
    "attn_pooler_heads",
    "n_queries",
    "timm_model_pretrained",
    "timm_pool",
    "timm_proj",
    "timm_proj_bias",
    "timm_drop",
    "timm_drop_path",
)
# Heads by width, where they are not 64 wide.
HEADS = {1280: 16, 1408: 16, 1664: 16}


def fields_of(hidden_act: str, given: Config, shapes: Shapes, native: Size | None = None) -> dict[str, Any]:
    """Returns the fields that shapes and the user tell; `native` is the image size of a configuration, if any."""
    width, channels, *patch = shapes["visual.conv1.weight"]
    rows = shape_of(shapes, "visual.positional_embedding")[0]
    image_size, _ = table_size(rows, (1,), patch, native, given.get("image_size"))
    block = BLOCK.replace("*", "0")
    return {
        "hidden_size": width,
        "num_hidden_layers": len({name.split(".")[3] for name in shapes if name.startswith(BLOCK.rstrip("*"))}),
        "num_attention_heads": given.get("num_attention_heads", HEADS.get(width, width // 64)),
        "intermediate_size": shape_of(shapes, f"{block}.mlp.c_fc.weight")[0],
        "hidden_act": hidden_act,
        "layer_norm_eps": 1e-5,
        "image_size": image_size,
        "patch_size": as_size(patch),
        "num_channels": channels,
        "use_pre_layernorm": True,
    }


def configure(given: Config, shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of a lone file, which does not tell its activation."""
    if "hidden_act" not in given:
        raise ValueError(
            "A file of CLIP does not tell its activation. Give hidden_act: 'quick_gelu' for OpenAI's weights and for "
            "those that OpenCLIP lists with -quickgelu, 'gelu' for the others; or put open_clip_config.json beside it."
        )
    return fields_of(given["hidden_act"], given, shapes)


def configure_open_clip(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Returns the fields by open_clip_config.json, whose sizes are checked against the weights."""
    model = config["model_cfg"]
    tower = {**DEFAULTS, **model["vision_cfg"]}
    known = {*DEFAULTS, *FIXED, *WITHOUT_EFFECT}
    foreign = {
        name: value
        for name, value in tower.items()
        if name not in known or (name in FIXED and (value or None) != FIXED[name])
    }
    if foreign:
        raise ValueError(
            f"The image tower in open_clip_config.json has {foreign}, of which nothing is known here. Open it with "
            "OpenCLIP."
        )
    if "visual.class_embedding" not in shapes:
        raise ValueError(f"The image tower {tower} is no plain ViT of OpenCLIP's own (visual.class_embedding).")
    heads = {"num_attention_heads": tower["width"] // tower["head_width"]}
    fields = fields_of("quick_gelu" if model.get("quick_gelu") else "gelu", heads, shapes, tower["image_size"])
    wrong = [
        f"{theirs}={tower[theirs]}, but the weights {fields[ours]}"
        for theirs, ours in SIZES.items()
        if to_pair(tower[theirs]) != to_pair(fields[ours])
    ]
    if wrong:
        raise ValueError(f"open_clip_config.json says {'; '.join(wrong)}. The files are of two models, or incomplete.")
    return fields


CLIP_FILE = Family(
    name="CLIP",
    source="state dict of OpenAI's and OpenCLIP's models",
    marks=("visual.conv1.weight", "visual.transformer.resblocks.0.ln_1.weight"),
    keys=KEYS,
    configure=configure,
    prefixes=("module.",),
    dropped={
        r"(text|transformer|token_embedding|ln_final)\..*|positional_embedding": "the text tower",
        r"visual\.proj|text_projection|logit_.*": "of the comparison with text",
        r"input_resolution|context_length|vocab_size|attn_mask": "constants",
    },
    images="clip",
    outputs="last hidden state, pooled",
)
OPEN_CLIP = replace(
    CLIP_FILE,
    source="OpenCLIP, with open_clip_config.json",
    marks=(),
    reads=lambda config: "model_cfg" in config,
    configure=configure_open_clip,
)
