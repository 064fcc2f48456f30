"""Plain ViTs of timm (https://github.com/huggingface/pytorch-image-models). Does not require timm."""

import re
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...model.configuration_hf_vit import HfViTConfig
from ..family import Config, Family, Shapes
from ..key_map import KeyMap, Made
from . import block_layout
from .block_layout import BLOCK, KEYS, shape_fields


# Regular expressions of the parts of timm's architecture names. The name is required to convert a model, because
# config.json and tensor shapes do not fully define it.
SIZES = (
    "tiny|wee|xsmall|little|small|small_plus|medium|mediumd|betwixt|base|so150m|so150m2|large|so400m|huge|huge_plus|"
    "giant|giantopt|gigantic|7b"
)
KINDS = (
    "plus|gap|36x1|reg[14]_gap|reg4_map|plus_clip|clip|clip_quickgelu|siglip|siglip_gap|dinov2|reg4_dinov2|"
    "reg1_tipsv2|dinov3|dinov3_qkvb|lingbot|rope|rope_ape|rope_reg[14]_gap"
)
# Suffixes of older architecture names, which newer releases of timm write as tags after a dot
TAGS = "miil|miil_in21k|in21k|sam|dino|clip_laion2b"
# Regular expressions for the names of supported timm architectures
CONVERTED = (
    rf"vit_({SIZES})_patch\d+(_({KINDS}))?(_\d+)?(_({TAGS}))?",
    r"deit_(tiny|small|base)(_distilled)?_patch16_\d+",
    r"deit3_(small|medium|base|large|huge)_patch\d+_\d+",
    r"flexivit_(small|base|large)",
    r"eva_large_patch14_\d+",
    r"test_vit[24]?",
)
# Regular expressions for the names of unsupported timm architectures, with the reason
REFUSED = {
    r".*_rpn_\d+": "its blocks normalize after attention and MLP",
    r".*_18x2_\d+": "its blocks have two parallel attention layers and two parallel MLPs",
    r".*_xp_\d+|vit_d?pwee_.*": "its blocks compute attention and MLP in parallel",
    r"vit_d(wee|little)_.*": "it uses differential attention",
    r"(vit|test_vit)_s?relpos.*": "it uses relative positions, added to the attention scores",
    r"vit_[a-z]+_(r\d*_|r\d+_|resnet|mci).*": "a convolutional network comes before its blocks",
    r".*_rope_mixed.*": "it learns separate rotary frequencies in each block",
    r"vit_pe_.*": "its rotary positions start at one, its pooling has other heads, or it has no final norm",
    r".*_radio_.*|vit_intern300m_.*": "it has no final norm",
    r".*_sapiens2": "LayerScale is on one branch only, and key and value have fewer heads than the query",
    r"test_vit3": "its attention pooling attends to the registers too",
}
# Maps regular expressions of architecture names to the fields of `HfViTConfig` that they imply. Later entries override
# earlier ones; all other fields keep their defaults.
FACTS: tuple[tuple[str, dict[str, Any]], ...] = (
    (r".*_clip_.*", {"layer_norm_eps": 1e-5}),
    (r".*_clip_quickgelu_.*", {"hidden_act": "quick_gelu"}),
    (r".*_(base_patch32|so400m_patch16|giantopt_patch16)_siglip_.*", {"hidden_act": "gelu_pytorch_tanh"}),
    (r".*_large_patch16_siglip_(gap_)?512", {"hidden_act": "gelu_pytorch_tanh"}),
    (r".*_(dinov3|dinov3_qkvb|lingbot)", {"layer_norm_eps": 1e-5, "rope_coordinates": "centered"}),
    (r".*_rope_(ape_)?\d+", {"rope_coordinates": "index"}),
    (r".*_rope_reg[14]_gap_256", {"rope_coordinates": "scaled_index", "rope_grid_size": 16, "rope_theta": 10000.0}),
    (r"vit_(so400m|huge|giant|giantopt|gigantic)_patch.*", {"num_attention_heads": 16}),
    (r"vit_giant_.*_(dinov2|tipsv2|lingbot)", {"num_attention_heads": 24}),
    (r"deit3_huge_.*|vit_base_patch16_gap_224", {"num_attention_heads": 16}),
)
# INTERLEAVED: architectures with rotary positions that rotate pairs of adjacent channels instead of halves of a head.
# COLUMNS_FIRST: architectures in INTERLEAVED whose first half of the channels encodes columns instead of rows.
INTERLEAVED = r".*_rope_.*"
COLUMNS_FIRST = r".*_rope_(ape_)?\d+"
# Channels per head for architectures with a value other than 64, unless `FACTS` contains their number of heads
HEAD_SIZES = ((r"test_vit\d?", 32), (r"vit_7b_.*", 128))
POOLINGS = {"token": "cls", "avg": "mean", "map": "attention"}
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "quick_gelu": "quick_gelu", "silu": "silu"}
# Arguments of timm models that an export writes, and the fields of `HfViTConfig` that correspond to them
ARGUMENTS = (
    "img_size=image_size patch_size in_chans=num_channels embed_dim=hidden_size depth=num_hidden_layers "
    "num_heads=num_attention_heads qkv_bias proj_bias qk_norm=use_qk_norm init_values=layerscale_value "
    "class_token=use_cls_token reg_tokens=num_register_tokens fc_norm=norm_after_pooling"
)
# Maps arguments in timm's config.json (`model_args`) to the fields of `HfViTConfig` that a conversion sets from them
RENAMED_ARGUMENTS = {
    "num_heads": "num_attention_heads",
    "drop_path_rate": "drop_path_rate",
    "attn_drop_rate": "attention_probs_dropout_prob",
    "init_values": "layerscale_value",
    "rope_temperature": "rope_theta",
    "ref_feat_shape": "rope_grid_size",
}
# Arguments of timm models that a conversion ignores: they are inferred from tensors, or used only in training
# fmt: off
IGNORED_ARGUMENTS = (
    "img_size", "patch_size", "in_chans", "num_classes", "global_pool", "embed_dim", "depth", "mlp_ratio",
    "qkv_bias", "qk_norm", "proj_bias", "class_token", "reg_tokens", "num_reg_tokens", "no_embed_class",
    "pre_norm", "use_pre_transformer_norm", "fc_norm", "use_fc_norm", "dynamic_img_size", "dynamic_img_pad",
    "drop_rate", "weight_init", "fix_init", "swiglu_mlp", "swiglu_align_to", "use_abs_pos_emb",
    "pos_drop_rate", "patch_drop_rate", "proj_drop_rate",
)
# fmt: on


def check_architecture(architecture: str) -> None:
    """Raises `ValueError` if an architecture of timm is not supported."""
    for pattern, reason in REFUSED.items():
        if re.fullmatch(pattern, architecture):
            raise ValueError(f"timm's {architecture!r} is not a plain ViT: {reason}. Use timm for it.")
    if not any(re.fullmatch(pattern, architecture) for pattern in CONVERTED):
        raise ValueError(
            f"timm's architecture {architecture!r} is not supported. Supported are the plain ViTs among vit_*, "
            "deit_*, deit3_*, flexivit_* and eva_large_*."
        )


def fields_by_architecture(architecture: str, width: int) -> dict[str, Any]:
    """Returns the fields of `HfViTConfig` that follow from an architecture name, given the hidden size `width`."""
    head_size = next((size for pattern, size in HEAD_SIZES if re.fullmatch(pattern, architecture)), 64)
    fields: dict[str, Any] = {"num_attention_heads": width // head_size}
    for pattern, more in FACTS:
        if re.fullmatch(pattern, architecture):
            fields.update(more)
    return fields


def get_name(config: Config) -> str:
    """Returns the architecture name without the tag of the weights, such as ".augreg_in21k"."""
    return str(config["architecture"]).partition(".")[0]


def configure(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of `HfViTConfig` for a timm model.

    Args:
        config: Content of timm's config.json, and `image_size` if the user gave it.
        shapes: Shapes of the tensors by name.
    """
    architecture = get_name(config)
    check_architecture(architecture)
    given = config.get("model_args") or {}
    published = config.get("pretrained_cfg") or {}
    input_size = published.get("input_size") or config.get("input_size") or (3, None, None)
    image_size = given.get("img_size") or (list(input_size[1:]) if input_size[1] else None)
    fields = shape_fields(shapes, image_size, config.get("image_size"))
    num_classes, depth = shapes.get("head.weight", (0,))[0], fields["num_hidden_layers"]
    report_lines = (("num_classes", config.get("num_classes"), num_classes), ("depth", given.get("depth"), depth))
    for name, number, found in report_lines:
        if number not in (None, found):
            raise ValueError(
                f"config.json has {name}={number}, but the weights have {found}. The files belong to different models."
            )
    fields.update(fields_by_architecture(architecture, fields["hidden_size"]))
    fields.update(argument_fields(architecture, given))
    if "rope_coordinates" in fields:
        has_table = fields["position_embedding_type"] == "learned"
        fields["position_embedding_type"] = "learned+rotary" if has_table else "rotary"
    pool = given.get("global_pool") or config.get("global_pool")
    if not pool:  # default pooling of timm's model class
        is_token = "cls_token" in shapes and "_dinov3" not in architecture and "fc_norm.weight" not in shapes
        pool = "map" if "attn_pool.latent" in shapes else "token" if is_token else "avg"
    if pool not in POOLINGS:
        raise ValueError(f"global_pool={pool!r} is not supported. Set one of {', '.join(POOLINGS)} in config.json.")
    return {**fields, **label_fields(config), "pooling": POOLINGS[pool], "position_antialias": True}


def argument_fields(architecture: str, arguments: Config) -> dict[str, Any]:
    """Returns the fields of `HfViTConfig` that follow from the `model_args` of timm's config.json.

    Raises:
        ValueError: if an argument is not supported.
    """
    fields = {ours: arguments[name] for name, ours in RENAMED_ARGUMENTS.items() if arguments.get(name) is not None}
    unknown = arguments.keys() - RENAMED_ARGUMENTS.keys() - set(IGNORED_ARGUMENTS) - {"act_layer", "norm_layer"}
    activation, norm = arguments.get("act_layer"), arguments.get("norm_layer")
    if unknown or activation not in (None, *ACTIVATIONS) or norm not in (None, "layernorm", "rmsnorm"):
        raise ValueError(
            f"timm's {architecture!r} was built with model_args={dict(arguments)}, of which "
            f"{', '.join(sorted(unknown)) or f'act_layer={activation!r}, norm_layer={norm!r}'} is not supported."
        )
    if "embed_dim" in arguments and "num_heads" not in arguments:
        raise ValueError(
            f"timm's {architecture!r} was built with embed_dim={arguments['embed_dim']} and the default number of "
            "heads of its architecture, which is unknown. Add num_heads to model_args in config.json."
        )
    if activation is not None:
        fields["hidden_act"] = ACTIVATIONS[activation]
    if norm is not None:  # An explicit norm class uses its default epsilon instead of that of the architecture.
        fields["layer_norm_eps"] = 1e-6
    return fields


def label_fields(config: Config) -> dict[str, Any]:
    """Returns the label fields of `HfViTConfig`. Descriptions in config.json take precedence over class names."""
    names = config.get("label_names") or (config.get("pretrained_cfg") or {}).get("label_names")
    if not names:
        return {}
    words = config.get("label_descriptions") or {}
    numbered = names.items() if isinstance(names, dict) else enumerate(names)
    id2label = {int(number): words.get(name, name) for number, name in numbered}
    return {"id2label": id2label, "label2id": {name: number for number, name in id2label.items()}}


def adapt(config: Config, ours: HfViTConfig, shapes: Shapes) -> KeyMap:
    """Returns the key map entries to change for a checkpoint, depending on its tensors and its architecture."""
    keys = dict(block_layout.adapt(ours, shapes))
    architecture = get_name(config)
    if "rotary" in ours.position_embedding_type and re.fullmatch(INTERLEAVED, architecture):
        head_size = ours.hidden_size // ours.num_attention_heads
        order = half_order(head_size, columns_first=bool(re.fullmatch(COLUMNS_FIRST, architecture)))
        turn = partial(reorder_heads, order, ours.hidden_size)
        keys[f"{BLOCK}.attention.qkv"] = Made(("blocks.*.attn.qkv",), turn)
        keys[f"{BLOCK}.attention.query_bias"] = Made(("blocks.*.attn.q_bias",), turn)
    return keys


def half_order(head_size: int, columns_first: bool) -> Tensor:
    """Returns, for each channel of a head in hf_vit, the index of this channel in timm, (d,) int64.

    Rotary positions of hf_vit rotate channels j and j + d/2 together, the first d/4 pairs by row and the others by
    column. Rotary positions of timm rotate channels 2j and 2j + 1 together.
    """
    pairs = torch.arange(0, head_size, 2)  # (d/2,)
    if columns_first:
        pairs = pairs.roll(head_size // 4)
    return torch.cat((pairs, pairs + 1))


def reorder_heads(order: Tensor, width: int, tensor: Tensor) -> Tensor:
    """Reorders the channels of each head in the query and key rows (the first 2·D) of a qkv weight or bias."""
    turned = tensor[: 2 * width].unflatten(0, (-1, len(order)))[:, order].flatten(0, 1)
    return torch.cat((turned, tensor[2 * width :]))


TIMM = Family(
    name="plain ViTs of timm",
    files="timm `vit_*`, `deit*`, `flexivit_*`; files of weights (also of DeiT III) with `architecture=`",
    reads=lambda config: "model_type" not in config and "architecture" in config,
    keys=KEYS,
    adapt=adapt,
    configure=configure,
    dropped={r"attn_pool\..*": "the attention pooling of SigLIP, unused by models that pool the mean"},
    outputs="last hidden state, pooled (distilled: CLS only, not the mean), logits",
)
