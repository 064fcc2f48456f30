"""LW-DETR checkpoints in transformers (https://arxiv.org/abs/2406.03459): a ViT with windows and a deformable decoder.

LW-DETR defines windows by their number per image side, hf_vit by their size in patches. For example, 4 windows per
side of 640 pixels are windows of 10 patches of 16 pixels. Both definitions agree at the image size of the checkpoint's
image processor. For larger images, the windows of LW-DETR become larger. In hf_vit, the number of windows increases,
which is faster and keeps the window size used in training.
"""

from functools import partial
from math import isqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LwDetrConfig

from ...model.configuration_hf_vit import HfViTConfig, to_pair
from ...model.deformable_decoder import MAX_INTERMEDIATE_SIZE, MAX_UPSAMPLED
from ..family import Config, Family, Shapes, architecture_fields, check_backbone, label_fields
from ..key_map import KeyMap, Made, block_keys, join_qkv, parts


BLOCK, THEIRS = "encoder.layers.*", "backbone.backbone.encoder.layer.*"
HEAD, LAYER = "detection_head", "decoder.layers.*"
SCALE, THEIR_SCALE = f"{HEAD}.projector.scales.*", "backbone.projector.scale_layers.*"
RESAMPLING = f"{THEIR_SCALE}.sampling_layers.*.layers"
PROPOSALS, QUERIES = f"{HEAD}.proposal_heads.*", f"{HEAD}.blocks.*"
POSITIONS = "backbone.backbone.embeddings.position_embeddings"
KEYS: KeyMap = {
    "embeddings.patch_embeddings.projection": "backbone.backbone.embeddings.projection",
    **parts(f"{SCALE}.resamplings.*.convs.*", f"{RESAMPLING}.*", "conv norm"),
    **parts(SCALE, f"{THEIR_SCALE}.projector_layer", "conv1.conv conv1.norm conv2.conv conv2.norm"),
    **parts(f"{SCALE}.bottlenecks.*", f"{THEIR_SCALE}.projector_layer.bottlenecks.*", "conv1.conv conv1.norm"),
    **parts(f"{SCALE}.bottlenecks.*", f"{THEIR_SCALE}.projector_layer.bottlenecks.*", "conv2.conv conv2.norm"),
    f"{SCALE}.norm": f"{THEIR_SCALE}.layer_norm",
    **parts(PROPOSALS, "", "linear=enc_output.* norm=enc_output_norm.* class_head.layers.*=enc_out_class_embed.*"),
    f"{PROPOSALS}.box_head.layers.*": "enc_out_bbox_embed.*.layers.*",
    **parts(f"{QUERIES}.attention", f"{LAYER}.self_attn", "query=q_proj key=k_proj value=v_proj projection=o_proj"),
    **parts(f"{QUERIES}.deformable", f"{LAYER}.cross_attn", "offsets=sampling_offsets weights=attention_weights"),
    **parts(f"{QUERIES}.deformable", f"{LAYER}.cross_attn", "value=value_proj projection=output_proj"),
    **parts(QUERIES, LAYER, "norm1=self_attn_layer_norm norm2=cross_attn_layer_norm norm3=layer_norm"),
    **parts(QUERIES, f"{LAYER}.mlp", "fc1 fc2"),
    **parts(HEAD, "", "query_features=query_feat query_boxes=reference_point_embed norm=decoder.layernorm"),
    **parts(HEAD, "decoder.ref_point_head.layers", "position_fc1=0 position_fc2=1"),
    **parts(HEAD, "", "class_head.layers.*=class_embed box_head.layers.*=bbox_embed.layers.*"),
}
# Maps the options of decoder and losses in hf_vit to their names in LwDetrConfig
DECODER = parts(
    *("", ""),
    "num_queries num_layers=decoder_layers hidden_size=d_model num_attention_heads=decoder_self_attention_heads "
    "num_points=decoder_n_points num_groups=group_detr bbox_weight=bbox_loss_coefficient "
    "giou_weight=giou_loss_coefficient",
)


def adapt(config: Config, ours: HfViTConfig, shapes: Shapes) -> KeyMap:
    """Returns conversion rules that depend on model sizes or on the transformers release that saved the weights."""
    is_of_files = "backbone.backbone.encoder.layer.0.attention.output.weight" in shapes
    qkv = ("attention.query", "attention.key", "attention.value") if is_of_files else ("q_proj", "k_proj", "v_proj")
    projection = "attention.output" if is_of_files else "attention.o_proj"
    mlp, scales = ("intermediate.fc1", "intermediate.fc2"), ("gamma_1", "gamma_2")
    rules = ("layernorm_before", join_qkv("attention.", qkv), projection, "layernorm_after", *mlp, *scales)
    upsample = 1 if ours.hidden_size > MAX_UPSAMPLED else 0
    return {
        **block_keys(BLOCK, THEIRS, rules),
        f"{BLOCK}.attention.query_bias": f"{THEIRS}.attention.{qkv[0]}.bias",
        f"{BLOCK}.attention.value_bias": f"{THEIRS}.attention.{qkv[2]}.bias",
        "embeddings.position_embeddings": Made((POSITIONS,), partial(resample, ours.grid_size)),
        f"{SCALE}.resamplings.*.upsample": f"{RESAMPLING}.{upsample}",
    }


def resample(grid: tuple[int, int], table: Tensor) -> Tensor:
    """Resamples a position table (1, 1 + side · side, D) to `grid`. The first row, which is unused, is dropped."""
    side, precision = isqrt(table.shape[1] - 1), torch.promote_types(table.dtype, torch.float32)
    maps = table[:, 1:].to(precision).unflatten(1, (side, side)).permute(0, 3, 1, 2)
    if grid != (side, side):
        maps = F.interpolate(maps, size=grid, mode="bicubic", align_corners=False)
    return maps.flatten(2).transpose(1, 2).to(table.dtype)


def configure(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of `HfViTConfig` for a LwDetrConfig and its backbone.

    The image size is that of the image processor or, if it has no fixed size, that of the backbone.
    """
    backbone = config.get("backbone_config") or LwDetrConfig().backbone_config.to_dict()
    check_backbone(backbone, "LW-DETR", "lw_detr_vit")
    size = config.get("image_processor", {}).get("size") or {}
    image_size = [size["height"], size["width"]] if {"height", "width"} <= size.keys() else backbone["image_size"]
    fields = architecture_fields({**backbone, "image_size": image_size}, image_size=256)
    has_positions = backbone.get("use_absolute_position_embeddings", True)
    return {
        **fields,
        **label_fields(config),
        "intermediate_size": backbone.get("mlp_ratio", 4) * fields.get("hidden_size", 768),
        "hidden_dropout_prob": backbone.get("dropout_prob", 0.0),
        "attention_probs_dropout_prob": backbone.get("dropout_prob", 0.0),
        "key_bias": False,
        "layerscale_value": backbone.get("cae_init_values", 0.1),
        "use_cls_token": False,
        "position_embedding_type": "learned" if has_positions else "none",
        "pooling": "mean",
        "norm_after_pooling": True,  # The encoder of LW-DETR has no final norm.
        **windows(backbone, fields),
        "detection_config": decoder_options(config, HfViTConfig(**fields).out_indices),
    }


def windows(backbone: Config, fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the window options of `HfViTConfig` that are equivalent to those of the source at its image size.

    Args:
        backbone: Configuration of the source backbone.
        fields: Fields of `HfViTConfig`, including the image and patch size.

    Raises:
        ValueError: if windows do not consist of whole patches at this image size.
    """
    windowed = backbone.get("window_block_indices") or ()
    side = isqrt(backbone.get("num_windows", 16))
    image, patch = to_pair(fields["image_size"]), to_pair(fields.get("patch_size", 16))
    if any(length % (side * part) for length, part in zip(image, patch, strict=True)):
        raise ValueError(
            f"Images of {image[0]}x{image[1]} pixels cannot be divided into {side} windows per side that consist of "
            f"whole patches of {patch[0]}x{patch[1]} pixels. Set a suitable size in preprocessor_config.json."
        )
    if not windowed:
        return {}
    blocks = range(fields.get("num_hidden_layers", 12))
    return {
        "window_size": [length // part // side for length, part in zip(image, patch, strict=True)],
        "global_attention_layers": [block for block in blocks if block not in windowed],
    }


def decoder_options(config: Config, out_indices: list[int]) -> dict[str, Any]:
    """Returns the `detection_config` (options of projector, decoder and losses) for a LwDetrConfig."""
    defaults = LwDetrConfig().to_dict()

    def known(name: str) -> Any:
        return defaults[name] if config.get(name) is None else config[name]

    options = {name: known(str(theirs)) for name, theirs in DECODER.items()}
    width, heads = options["hidden_size"], options["num_attention_heads"]
    derived = {"decoder_cross_attention_heads": 2 * heads, "decoder_ffn_dim": min(8 * width, MAX_INTERMEDIATE_SIZE)}
    for name, ours in derived.items():
        if (found := known(name)) != ours:
            raise ValueError(
                f"{name}={found} is not supported: with d_model={width} and decoder_self_attention_heads={heads}, it "
                f"must be {ours}. Use transformers for this checkpoint."
            )
    return {
        **options,
        "decoder": "deformable",
        "scale_factors": config.get("projector_scale_factors") or [1.0],
        "out_indices": out_indices,
        "projector_norm": "batch",
    }


LW_DETR = Family(
    name="LW-DETR",
    model_types=("lw_detr",),
    keys=KEYS,
    adapt=adapt,
    configure=configure,
    prefixes=("model.",),
    fixed={
        "hidden_expansion": 0.5,
        "c2f_num_blocks": 3,
        "activation_function": "silu",
        "batch_norm_eps": 1e-5,
        "decoder_activation_function": "relu",
        "attention_bias": True,
        # The decoder of hf_vit has no dropout.
        **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0),
    },
    is_sized_by_images=True,
    outputs="hidden states, classes and boxes of the queries, at the size of its images",
)
