"""The original `.pth` files of DINO, DeiT, MAE, DINOv2 and DINOv3.

Files of timm without config.json have the same tensor names, but their activation, epsilon, rotary positions and other
options are unknown. If `architecture=` is given, a file is loaded as a model of timm.

Sources: https://github.com/facebookresearch/dino, deit, mae, dinov2, dinov3.
"""

import math
from dataclasses import replace
from typing import Any

from ...model.configuration_hf_vit import HfViTConfig
from ..family import Config, Family, Shapes, shape_of
from ..key_map import KeyMap, Made, parts
from . import block_layout
from .block_layout import BLOCK, KEYS, infer_heads, shape_fields
from .vit import without_cls


# Maps hidden sizes to the number of heads, for models in which a head does not have 64 channels
HEADS = {1152: 16, 1280: 16, 1408: 16, 1664: 16}
DINOV3_HEADS = {4096: 32}
OFFSET = 0.1  # offset in patches, see https://github.com/facebookresearch/dino/issues/8
MARKS = ("patch_embed.proj.weight", "blocks.0.attn.qkv.weight")
# Tensors that files of facebookresearch do not have, or that files of several timm architectures have. If a file
# contains one of them, the user must give the name of the architecture.
AMBIGUOUS_TENSORS = (
    *("norm_pre.weight", "attn_pool.latent", "reg_token", "blocks.0.attn.q_norm.weight", "blocks.0.attn.q_bias"),
    *("blocks.0.mlp.fc1_g.weight", "blocks.0.gamma_1"),
)
ALWAYS_THERE = ("cls_token", "blocks.0.norm1.bias")
DECODER = "masked_image_modeling_head.mae"
DECODER_HEADS = 16  # Number of heads in the decoders of MAE, for all encoder sizes
DECODER_KEYS: KeyMap = {
    **parts(DECODER, "", "embedding=decoder_embed mask_token norm=decoder_norm predictor=decoder_pred"),
    f"{DECODER}.position_embeddings": Made(("decoder_pos_embed",), without_cls),
    **{
        name.replace(BLOCK, f"{DECODER}.layers.*"): f"decoder_{rule}"
        for name, rule in KEYS.items()
        if name.startswith(BLOCK) and isinstance(rule, str)
    },
}
TRAINING = {
    r"decoder_.*": "a decoder that does not predict pixels of patches",
    r"mask_token": "the mask token of a decoder that does not predict pixels of patches",
    r"(dino_head|ibot_head)\..*|head\.(mlp|last_layer).*": "the projection head of DINO, used in training only",
}


def fields_of(given: Config, shapes: Shapes, heads: dict[int, int]) -> dict[str, Any]:
    """Returns the fields of `HfViTConfig` inferred from shapes and user arguments.

    Args:
        given: Fields that the user gave.
        shapes: Shapes of the source tensors by name.
        heads: Number of heads by hidden size; other hidden sizes have 64 channels per head.
    """
    fields = shape_fields(shapes, wanted=given.get("image_size"))
    width = fields["hidden_size"]
    number = given.get("num_attention_heads") or infer_heads(width, heads, "Pass num_attention_heads.")
    is_decoded = "decoder_embed.weight" in shapes
    return {
        **fields,
        "num_attention_heads": number,
        "use_mask_token": "mask_token" in shapes and not is_decoded,
        "pooling": "mean" if "fc_norm.weight" in shapes else "cls",
    }


def configure(given: Config, shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of `HfViTConfig` for DINO, DeiT, MAE or DINOv2.

    Raises:
        ValueError: if the tensor names do not identify the architecture.
    """
    signs = [name for name in AMBIGUOUS_TENSORS if name in shapes]
    signs += [f"no {name}" for name in ALWAYS_THERE if name not in shapes]
    if signs:
        raise ValueError(
            f"The file has no configuration, and its tensor names ({', '.join(signs)}) are those of timm or DeiT III, "
            "where several architectures have the same names. Give timm's name of the model, such as "
            'architecture="vit_base_patch16_siglip_224" or "deit3_base_patch16_224".'
        )
    fields = {
        **fields_of(given, shapes, HEADS),
        "position_antialias": "register_tokens" in shapes,
        "position_interpolation_offset": OFFSET if has_offset(shapes) else 0.0,
    }
    if has_decoder(shapes):
        fields["masked_image_modeling_config"] = decoder_options(given, shapes)
    return fields


def has_offset(shapes: Shapes) -> bool:
    """Returns whether the original code of a file resamples position embeddings with an offset.

    The offset is used by DINOv2 without registers, identified by its mask token (1, D), and by DINO, identified by
    its projection head. Backbone files of DINO without this head cannot be distinguished from MAE and DeiT, which
    do not resample, so the function returns False for them.
    """
    is_dinov2 = len(shapes.get("mask_token", ())) == 2 and "register_tokens" not in shapes
    return is_dinov2 or any(name.startswith(("head.mlp.", "head.last_layer.")) for name in shapes)


def has_decoder(shapes: Shapes) -> bool:
    """Returns whether the weights include the decoder of MAE, which predicts the pixels of each patch."""
    _, *patch = shapes["patch_embed.proj.weight"]
    parts = ("decoder_embed.weight", "decoder_pos_embed", "decoder_blocks.0.norm1.weight", "decoder_norm.weight")
    return all(name in shapes for name in parts) and shapes.get("decoder_pred.weight", (0,))[0] == math.prod(patch)


def decoder_options(given: Config, shapes: Shapes) -> dict[str, Any]:
    """Returns the options of MAE's decoder. Options of the loss are left out, because files do not contain them."""
    own = given.get("masked_image_modeling_config") or {}
    blocks = [name.split(".")[1] for name in shapes if name.startswith("decoder_blocks.")]
    return {
        "decoder_hidden_size": shapes["decoder_pred.weight"][1],
        "decoder_num_hidden_layers": 1 + max(map(int, blocks)),
        "decoder_num_attention_heads": own.get("decoder_num_attention_heads", DECODER_HEADS),
        "decoder_intermediate_size": shape_of(shapes, "decoder_blocks.0.mlp.fc1.weight")[0],
    }


def configure_dinov3(given: Config, shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of `HfViTConfig` for DINOv3."""
    rotary = {"position_embedding_type": "rotary", "rope_coordinates": "centered", "rope_theta": 100.0}
    return {**fields_of(given, shapes, DINOV3_HEADS), **rotary, "layer_norm_eps": 1e-5}


def adapt(given: Config, ours: HfViTConfig, shapes: Shapes) -> KeyMap:
    """Returns the key map entries to change for a checkpoint, depending on the tensors that it contains."""
    keys = block_layout.adapt(ours, shapes)
    return {**keys, **DECODER_KEYS} if has_decoder(shapes) else keys


META_FILE = Family(
    name="DINO, DeiT, MAE, DINOv2",
    files="`.pth` of facebookresearch",
    marks=(*MARKS, "pos_embed"),
    keys=KEYS,
    adapt=adapt,
    configure=configure,
    prefixes=("module.backbone.", "backbone.", "module."),
    dropped=TRAINING,
    images="dinov2",
    outputs="last hidden state, pooled, logits; MAE: pixels of masked patches",
)
DINOV3_FILE = replace(
    META_FILE,
    name="DINOv3",
    files="`.pth` of facebookresearch/dinov3",
    marks=(*MARKS, "rope_embed.periods"),
    configure=configure_dinov3,
    dropped={
        **TRAINING,
        r"(rope_embed\.periods|.*\.qkv\.bias_mask)": "a constant",
        r"local_cls_norm\..*": "the norm for local crops, used in training only",
    },
    outputs="last hidden state, pooled",
)
