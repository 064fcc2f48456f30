"""CLIP of OpenAI and OpenCLIP with image and text tower, and SigLIP of OpenCLIP with a timm model as image tower.

Sources: https://arxiv.org/abs/2103.00020, 2212.07143 and 2303.15343.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...model.configuration_hf_vit import HfViTConfig, to_pair
from ..family import Config, Family, Shapes, Size, shape_of
from ..key_map import KeyMap, Reshaped, Zeros, parts
from . import block_layout, timm_vit
from .block_layout import as_size, infer_heads, table_size
from .clip import siglip_text_fields


BLOCK = (
    "norm1=ln_1 attention.qkv.weight=attn.in_proj_weight attention.qkv.bias=attn.in_proj_bias "
    "attention.projection=attn.out_proj norm2=ln_2 mlp.fc1=mlp.c_fc mlp.fc2=mlp.c_proj"
)


def blocks(ours: str, theirs: str) -> KeyMap:
    """Returns the key map entries of the blocks of a tower, given its prefixes in hf_vit and in the source."""
    return parts(f"{ours}encoder.layers.*", f"{theirs}transformer.resblocks.*", BLOCK)


KEYS: KeyMap = {
    "embeddings.cls_token": Reshaped(("visual.class_embedding",)),
    "embeddings.position_embeddings": Reshaped(("visual.positional_embedding",)),
    "embeddings.patch_embeddings.projection.bias": Zeros(),
    **parts("", "visual", "embeddings.patch_embeddings.projection.weight=conv1.weight pre_norm=ln_pre norm=ln_post"),
    **blocks("", "visual."),
}


def text_keys(prefix: str) -> KeyMap:
    """Returns the key map entries of the contrastive head and the text tower. Source names have a `prefix`."""
    return {
        "text_model.token_embedding": f"{prefix}token_embedding",
        "text_model.position_embedding.weight": f"{prefix}positional_embedding",
        **blocks("text_model.", prefix),
        "text_model.norm": f"{prefix}ln_final",
        "contrastive_head.image_projection.weight": Reshaped(("visual.proj",), (1, 0)),
        "contrastive_head.text_projection.weight": Reshaped((f"{prefix}text_projection",), (1, 0)),
        "contrastive_head.logit_scale": Reshaped(("logit_scale",)),
        "contrastive_head.logit_bias": Reshaped(("logit_bias",)),
    }


# TEXTS matches the tensor names of any text tower or contrastive head, KNOWN_TEXTS those that `text_keys` supports.
TEXTS = r"(text|transformer|token_embedding|ln_final)\..*|positional_embedding|cls_emb|text_projection.*|logit_.*"
KNOWN_TEXTS = (
    r"(text\.)?(token_embedding\.weight|positional_embedding|ln_final\.(weight|bias)|text_projection|"
    r"transformer\.resblocks\.\d+\.(ln_[12]\.|attn\.in_proj_|attn\.out_proj\.|mlp\.c_(fc|proj)\.)(weight|bias))|"
    r"logit_(scale|bias)"
)
# Defaults of CLIPVisionCfg and CLIPTextCfg. SIZES maps their fields to fields of hf_vit that must have the same value.
DEFAULTS = {"layers": 12, "width": 768, "head_width": 64, "patch_size": 16, "image_size": 224}
TEXT_DEFAULTS = {"layers": 12, "width": 512, "heads": 8, "vocab_size": 49408, "context_length": 77}
SIZES = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "patch_size": "patch_size",
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
}
# Maps regular expressions of field names in OpenCLIP towers to the only supported value. None stands for all falsy
# values.
FIXED_BLOCKS = (
    "ls_init_value|norm_kwargs|act_kwargs|final_ln_after_pool|block_type|qk_norm|scaled_cosine_attn|"
    "scale_(heads|attn_inner|attn|fc)"
)
FIXED = {
    FIXED_BLOCKS: None,
    "timm_model_name|attentional_pool|global_average_pool|no_ln_pre|input_patchnorm": None,
    "pool_type": "tok",
    "pos_embed_type": "learnable",
}
TEXT_FIXED = {FIXED_BLOCKS: None, "hf_model_name|embed_cls|no_causal_mask|proj_bias": None, "proj_type": "linear"}
# Fields that are not checked: they are inferred from the weights, used only in training, or have an effect only
# together with options in `FIXED` and `TEXT_FIXED`, which are rejected
KNOWN = (
    "layers|width|head_width|patch_size|image_size|mlp_ratio|patch_dropout|output_tokens|attn_pooler_(queries|heads)|"
    "n_queries|timm_(model_pretrained|pool|proj|proj_bias|drop|drop_path)"
)
KNOWN_TEXT = (
    "layers|width|heads|vocab_size|context_length|mlp_ratio|output_tokens|pad_id|"
    "hf_(model_pretrained|proj_type|pooler_type|tokenizer_name)|tokenizer_(mode|kwargs)"
)
# Fields of the model configuration that do not affect the text tower
KNOWN_MODEL = (
    "embed_dim|vision_cfg|text_cfg|quick_gelu|custom_text|init_logit_scale|init_logit_bias|nonscalar_logit_scale|"
    "cast_dtype|output_dict"
)
# Maps hidden sizes to the number of heads, for models in which a head does not have 64 channels
HEADS = {1280: 16, 1408: 16, 1664: 16}


def fields_of(hidden_act: str, given: Config, shapes: Shapes, native: Size | None = None) -> dict[str, Any]:
    """Returns the fields of `HfViTConfig` for the image tower, inferred from shapes and user arguments.

    Args:
        hidden_act: Activation of the MLPs.
        given: Fields that the user gave.
        shapes: Shapes of the source tensors by name.
        native: Image size in pixels from the source configuration; None if there is no configuration.
    """
    width, channels, *patch = shapes["visual.conv1.weight"]
    rows = shape_of(shapes, "visual.positional_embedding")[0]
    image_size, _ = table_size(rows, (1,), patch, native, given.get("image_size"))
    heads = given.get("num_attention_heads") or infer_heads(width, HEADS, "Pass num_attention_heads.")
    return {
        "hidden_size": width,
        "num_attention_heads": heads,
        **block_fields("visual.", hidden_act, shapes),
        "image_size": image_size,
        "patch_size": as_size(patch),
        "num_channels": channels,
        "use_pre_layernorm": True,
    }


def block_fields(prefix: str, hidden_act: str, shapes: Shapes) -> dict[str, Any]:
    """Returns the configuration fields for the blocks of a tower. Its tensor names have a `prefix`."""
    block = f"{prefix}transformer.resblocks."
    numbers = {name.removeprefix(block).partition(".")[0] for name in shapes if name.startswith(block)}
    return {
        "num_hidden_layers": len(numbers),
        "intermediate_size": shape_of(shapes, f"{block}0.mlp.c_fc.weight")[0],
        "hidden_act": hidden_act,
        "layer_norm_eps": 1e-5,
    }


def text_prefix(shapes: Shapes) -> str:
    """Returns the prefix of the text tower's tensor names: "text." or, in OpenAI's layout, the empty string."""
    return "text." if any(name.startswith("text.") for name in shapes) else ""


def text_fields(hidden_act: str, shapes: Shapes, heads: int | None = None, eos: int | None = None) -> dict[str, Any]:
    """Returns the options of text tower and contrastive head, inferred from shapes.

    Args:
        hidden_act: Activation of the MLPs.
        shapes: Shapes of the source tensors by name.
        heads: Number of attention heads; None if each head has 64 channels.
        eos: Id of the end token, at which the text is pooled; None for the largest id in the vocabulary.
    """
    text = text_tower_fields(text_prefix(shapes), hidden_act, shapes, heads)
    text["eos_token_id"] = text["vocab_size"] - 1 if eos is None else eos
    loss = "sigmoid" if "logit_bias" in shapes else "softmax"
    compared = {"loss": loss, "projection_dim": shape_of(shapes, "visual.proj")[1]}
    return {"text_config": text, "contrastive_config": compared}


def text_tower_fields(prefix: str, hidden_act: str, shapes: Shapes, heads: int | None) -> dict[str, Any]:
    """Returns the options of a text tower, inferred from shapes. If `heads` is None, heads have 64 channels."""
    vocab_size, width = shape_of(shapes, f"{prefix}token_embedding.weight")
    return {
        "vocab_size": vocab_size,
        "hidden_size": width,
        "num_attention_heads": heads or infer_heads(width, {}, "Put open_clip_config.json next to the file."),
        **block_fields(prefix, hidden_act, shapes),
        "max_position_embeddings": shape_of(shapes, f"{prefix}positional_embedding")[0],
    }


def has_texts(shapes: Shapes) -> bool:
    """Returns whether the weights include a text tower of any kind."""
    return any(re.fullmatch(TEXTS, name) and not name.startswith("logit_") for name in shapes)


def unsupported_tensors_reason(shapes: Shapes) -> str:
    """Returns the reason why `text_keys` does not support the tensors of a text tower, or "" if it supports them."""
    unknown = [name for name in shapes if re.fullmatch(TEXTS, name) and not re.fullmatch(KNOWN_TEXTS, name)]
    missing = {f"{text_prefix(shapes)}text_projection", "logit_scale"} - shapes.keys()
    strange = [*sorted(unknown)[:3], *(f"no {name}" for name in sorted(missing))]
    return f"its tensors are not those of CLIP ({', '.join(strange)})" if strange else ""


def unsupported_text_reason(given: Config, shapes: Shapes) -> str:
    """Returns why the text tower of a file without configuration is not supported, or "" if it is supported."""
    if has_texts(shapes) and text_prefix(shapes):
        return (
            "the attention mask and pooling of a text tower named text.* are unknown without a configuration; put "
            "open_clip_config.json next to the file"
        )
    return unsupported_tensors_reason(shapes) if has_texts(shapes) else ""


def unsupported_open_clip_text_reason(config: Config, shapes: Shapes) -> str:
    """Returns the reason why the text tower of an OpenCLIP model is not supported, or "" if it is supported."""
    if not has_texts(shapes):
        return ""
    model = config["model_cfg"]
    text = model.get("text_cfg")
    if text is None:
        return "open_clip_config.json has no text_cfg"
    foreign = unsupported_fields(model, {}, KNOWN_MODEL) | unsupported_fields(
        text, TEXT_FIXED, f"{KNOWN_TEXT}|pool_type|eos_id"
    )
    if text.get("pool_type", "argmax") not in ("argmax", "eos"):
        foreign["pool_type"] = text["pool_type"]
    elif text.get("pool_type", "argmax") == "argmax" and text.get("hf_tokenizer_name"):
        # argmax pooling requires that the end token has the largest id, which other tokenizers do not guarantee.
        foreign |= {"pool_type": "argmax", "hf_tokenizer_name": text["hf_tokenizer_name"]}
    return f"open_clip_config.json has {foreign}" if foreign else unsupported_tensors_reason(shapes)


def unsupported_fields(tower: Config, fixed: Mapping[str, Any], known: str) -> dict[str, Any]:
    """Returns the unsupported fields of a tower.

    Args:
        tower: Configuration of the tower.
        fixed: Maps regular expressions of field names to the only supported value.
        known: Regular expression of the names of fields that may have any value.
    """
    return {
        name: value
        for name, value in tower.items()
        if not re.fullmatch(known, name)
        and (value or None) not in [only for names, only in fixed.items() if re.fullmatch(names, name)]
    }


def check_image_tower(tower: Config, fixed: Mapping[str, Any], known: str) -> None:
    """Raises `ValueError` if an image tower has unsupported fields; see `unsupported_fields`."""
    if foreign := unsupported_fields(tower, fixed, known):
        raise ValueError(
            f"The image tower in open_clip_config.json has {foreign}, which is not supported. Use OpenCLIP instead."
        )


def configure(given: Config, shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of `HfViTConfig` for a CLIP file without configuration; `given` must have `hidden_act`."""
    if "hidden_act" not in given:
        raise ValueError(
            "The activation of a CLIP file is unknown without a configuration. Give hidden_act: 'quick_gelu' for "
            "OpenAI's weights and OpenCLIP models whose name ends in -quickgelu, 'gelu' for all others; or put "
            "open_clip_config.json next to the file."
        )
    fields = fields_of(given["hidden_act"], given, shapes)
    opens_texts = has_texts(shapes) and not unsupported_text_reason(given, shapes)
    return {**fields, **(text_fields(given["hidden_act"], shapes) if opens_texts else {})}


def configure_open_clip(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of `HfViTConfig` for an open_clip_config.json.

    Raises:
        ValueError: if the image tower is not supported, or sizes in the configuration differ from the weights.
    """
    model = config["model_cfg"]
    tower = {**DEFAULTS, **model["vision_cfg"]}
    check_image_tower(tower, FIXED, KNOWN)
    if "visual.class_embedding" not in shapes:
        raise ValueError(
            f"The image tower {tower} is not OpenCLIP's VisionTransformer: it has no visual.class_embedding. "
            "Use OpenCLIP instead."
        )
    heads = {"num_attention_heads": tower["width"] // tower["head_width"]}
    hidden_act = "quick_gelu" if model.get("quick_gelu") else "gelu"
    fields = fields_of(hidden_act, heads, shapes, tower["image_size"])
    check_sizes(tower, fields)
    if not has_texts(shapes) or unsupported_open_clip_text_reason(config, shapes):
        return fields
    text = {**TEXT_DEFAULTS, **model["text_cfg"]}
    eos = text.get("eos_id", 2) if text.get("pool_type") == "eos" else None
    texts = text_fields(hidden_act, shapes, text["heads"], eos)
    check_sizes(text, texts["text_config"])
    return {**fields, **texts}


def check_sizes(tower: Config, fields: Mapping[str, Any]) -> None:
    """Raises `ValueError` if the sizes in the configuration of a tower differ from those in the weights."""
    wrong = [
        f"{theirs}={tower[theirs]}, but the weights have {fields[ours]}"
        for theirs, ours in SIZES.items()
        if theirs in tower and to_pair(tower[theirs]) != to_pair(fields[ours])
    ]
    if wrong:
        raise ValueError(
            f"open_clip_config.json has {'; '.join(wrong)}. The files are incomplete or belong to two models."
        )


def adapt(config: Config, ours: HfViTConfig, shapes: Shapes) -> KeyMap:
    """Returns the key map entries of the text tower; empty if the text tower is not converted."""
    return {} if ours.text_config is None else text_keys(text_prefix(shapes))


CLIP_FILE = Family(
    name="CLIP",
    files="state dict of OpenAI's and OpenCLIP's models",
    marks=("visual.conv1.weight", "visual.transformer.resblocks.0.ln_1.weight"),
    keys=KEYS,
    adapt=adapt,
    configure=configure,
    prefixes=("module.",),
    dropped={
        TEXTS: "a text tower that is not supported",
        r"visual\.proj": "the image projection of the contrastive head, unused without a text tower",
        r"input_resolution|context_length|vocab_size|attn_mask": "constants",
    },
    unsupported_text_reason=unsupported_text_reason,
    images="clip",
    outputs="last hidden state, pooled; embeddings and logits of images and texts",
)
OPEN_CLIP = replace(
    CLIP_FILE,
    files="OpenCLIP, with open_clip_config.json",
    marks=(),
    reads=lambda config: "model_cfg" in config,
    configure=configure_open_clip,
    unsupported_text_reason=unsupported_open_clip_text_reason,
)

# Supported configuration fields of SigLIP models in OpenCLIP. The sizes of the image tower follow from its timm name.
SIGLIP_FIXED = {"timm_pool": "map", "timm_proj": "none", "timm_proj_bias": None}
SIGLIP_DEFAULTS = {"timm_pool": "avg", "timm_proj": "linear"}
SIGLIP_KNOWN = (
    "timm_(model_name|model_pretrained|drop|drop_path)|layers|width|head_width|patch_size|image_size|mlp_ratio|"
    "patch_dropout"
)
SIGLIP_TEXT_FIXED = {
    FIXED_BLOCKS: None,
    "hf_model_name|embed_cls": None,
    "proj_type": "linear",
    "no_causal_mask|proj_bias": True,
    "pool_type": "last",
}
SIGLIP_TEXT_LEFT_OUT = {"no_causal_mask": False, "proj_bias": False, "pool_type": "argmax"}
ACTIVATIONS = {"none": "gelu", "tanh": "gelu_pytorch_tanh"}  # for each `approximate=` of torch.nn.GELU
SIGLIP_TEXT_KEYS: KeyMap = {
    **{ours: rule for ours, rule in text_keys("text.").items() if not ours.endswith("projection.weight")},
    "contrastive_head.text_projection": "text.text_projection",
}


def reads_siglip(config: Config) -> bool:
    """Returns whether an open_clip_config.json describes a SigLIP model."""
    vision = config.get("model_cfg", {}).get("vision_cfg", {})
    return re.fullmatch(r"vit_.*_siglip_\d+", vision.get("timm_model_name") or "") is not None


def unsupported_siglip_text_reason(config: Config, shapes: Shapes) -> str:
    """Returns why the text tower of a SigLIP model of OpenCLIP is not supported, or "" if it is supported."""
    model = config["model_cfg"]
    text = {**SIGLIP_TEXT_LEFT_OUT, **model.get("text_cfg", {})}
    foreign = unsupported_fields(model, {}, KNOWN_MODEL)
    foreign |= unsupported_fields(text, SIGLIP_TEXT_FIXED, f"{KNOWN_TEXT}|act_kwargs|norm_kwargs")
    activation, norm = text.get("act_kwargs") or {}, text.get("norm_kwargs") or {}
    if activation.keys() - {"approximate"} or activation.get("approximate", "none") not in ACTIVATIONS:
        foreign["act_kwargs"] = activation
    if norm.keys() - {"eps"}:
        foreign["norm_kwargs"] = norm
    if "logit_bias" not in shapes:
        foreign["init_logit_bias"] = None
    return f"open_clip_config.json has {foreign}" if foreign else ""


def configure_siglip(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of `HfViTConfig` for the open_clip_config.json of a SigLIP model.

    The image tower is a timm model. The fields of the text tower are included if it is supported.
    """
    model = config["model_cfg"]
    vision, text = model["vision_cfg"], {**TEXT_DEFAULTS, **model.get("text_cfg", {})}
    check_image_tower({**SIGLIP_DEFAULTS, **vision}, SIGLIP_FIXED, SIGLIP_KNOWN)
    timm = architecture(config) | {"input_size": (3, *to_pair(vision.get("image_size", 224)))}
    fields = timm_vit.configure({**timm, "image_size": config.get("image_size")}, shapes)
    if unsupported_siglip_text_reason(config, shapes):
        return fields
    hidden_act = ACTIVATIONS[(text.get("act_kwargs") or {}).get("approximate", "none")]
    tower = text_tower_fields("text.", hidden_act, shapes, text["heads"])
    tower["layer_norm_eps"] = (text.get("norm_kwargs") or {}).get("eps", 1e-5)
    check_sizes(text, tower)
    return {**fields, **siglip_text_fields({"text_config": tower})}


def architecture(config: Config) -> dict[str, Any]:
    """Returns a dictionary with the timm name of the image tower, in the format of config.json of timm."""
    return {"architecture": config["model_cfg"]["vision_cfg"]["timm_model_name"]}


def adapt_siglip(config: Config, ours: HfViTConfig, shapes: Shapes) -> KeyMap:
    """Returns the key map changes for the image tower's architecture, and the entries of a converted text tower."""
    keys = timm_vit.adapt(architecture(config), ours, shapes)
    return keys if ours.text_config is None else {**keys, **SIGLIP_TEXT_KEYS}


OPEN_CLIP_SIGLIP = replace(
    OPEN_CLIP,
    name="SigLIP",
    reads=reads_siglip,
    keys=block_layout.KEYS,
    adapt=adapt_siglip,
    configure=configure_siglip,
    prefixes=("visual.trunk.",),
    dropped={r"text\..*|logit_.*": "a text tower that is not supported"},
    unsupported_text_reason=unsupported_siglip_text_reason,
)
