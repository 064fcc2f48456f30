"""ViT, MSN, I-JEPA, DeiT, MAE and YOLOS in the layout of transformers.

Sources: https://arxiv.org/abs/2010.11929, 2204.07141, 2301.08243, 2012.12877, 2111.06377 and 2106.00666.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from ...model.configuration_hf_vit import HfViTConfig, to_pair
from ...model.task_configurations import HfViTMaskedImageModelingConfig
from ..family import Config, Family, Shapes, given_fields, transformers_fields
from ..key_map import KeyMap, Made, block_keys, join_qkv, parts
from .block_layout import add_positions, without_rows


QKV = join_qkv("attention.attention.", ("query", "key", "value"))
BLOCK = ("layernorm_before", QKV, "attention.output.dense", "layernorm_after", "intermediate.dense", "output.dense")
TABLE = "embeddings.position_embeddings"
EMBEDDINGS = parts("embeddings", "embeddings", "cls_token mask_token position_embeddings patch_embeddings.projection")
KEYS: KeyMap = {
    **EMBEDDINGS,
    **block_keys("encoder.layers.*", "encoder.layer.*", BLOCK),
    **parts("", "", "norm=layernorm pooler.dense classifier"),
}
PIXELS = "decoder.0.weight"
PIXEL_DECODER = {r"decoder\..*": "the decoder of masked image modeling"}


def configure(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of `HfViTConfig` for a ViTConfig. A pixel decoder implies the training objective "simmim"."""
    fields = transformers_fields(config, shapes, layer_norm_eps=1e-12)
    return {**fields, "masked_image_modeling_config": {"objective": "simmim"}} if PIXELS in shapes else fields


def adapt(config: Config, ours: HfViTConfig, shapes: Shapes) -> KeyMap:
    """Returns the rule for the pixel decoder. It is left out unless the decoder predicts one patch per token."""
    sides = to_pair(ours.patch_size)
    if shapes.get(PIXELS, (0,))[0] != ours.num_channels * sides[0] * sides[1]:
        return {}
    make = partial(channels_last, ours.num_channels, sides)
    return {"masked_image_modeling_head.simmim.predictor": Made(("decoder.0",), make)}


def channels_last(num_channels: int, sides: tuple[int, int], rows: Tensor) -> Tensor:
    """Reorders weights (C·p·q, D, 1, 1) or biases (C·p·q,) of a pixel decoder to (p·q·C, D) or (p·q·C,)."""
    return rows.reshape(num_channels, *sides, *rows.shape[1:2]).movedim(0, 2).flatten(0, 2)


VIT = Family(
    name="ViT",
    model_types=("vit",),
    keys=KEYS,
    adapt=adapt,
    configure=configure,
    prefixes=("vit.",),
    dropped=PIXEL_DECODER,
    outputs="hidden states, pooled, logits, pixels of masked patches",
)
VIT_MSN = Family(
    name="MSN",
    model_types=("vit_msn",),
    keys=KEYS,
    configure=partial(transformers_fields, layer_norm_eps=1e-6),
    prefixes=("vit.",),
    outputs="hidden states, logits",
)
# I-JEPA's classifier uses the mean of the patch tokens. Its pooler uses the first patch token and is not converted.
IJEPA = Family(
    name="I-JEPA",
    model_types=("ijepa",),
    keys={name: rule for name, rule in KEYS.items() if not name.startswith("pooler")},
    configure=partial(transformers_fields, layer_norm_eps=1e-12, use_cls_token=False, pooling="mean"),
    prefixes=("ijepa.",),
    outputs="hidden states, logits",
)

DISTILLATION_TOKEN = "embeddings.distillation_token"
# Without a distillation head, the distillation token with its position embedding becomes a register token.
DEIT_ONE_HEAD = Family(
    name="DeiT with one head",
    model_types=("deit",),
    reads=lambda config: config.get("architectures") == ["DeiTForImageClassification"],
    keys={
        **KEYS,
        "embeddings.register_tokens": Made((DISTILLATION_TOKEN, TABLE), partial(add_positions, 1)),
        TABLE: Made((TABLE,), partial(without_rows, 1, 2)),
    },
    configure=partial(transformers_fields, layer_norm_eps=1e-12, num_register_tokens=1),
    prefixes=("deit.",),
    outputs="hidden states, logits",
)
DEIT = replace(
    DEIT_ONE_HEAD,
    name="DeiT",
    reads=lambda config: True,
    keys={**KEYS, **parts("", "", f"{DISTILLATION_TOKEN} classifier=cls_classifier distillation_classifier")},
    configure=partial(transformers_fields, layer_norm_eps=1e-12, use_distillation_token=True),
    dropped=PIXEL_DECODER,
    outputs="hidden states, pooled, logits of both heads and their mean",
)

MAE_HEAD = "masked_image_modeling_head.mae"
# Names of the decoder blocks in published files, and in files saved by newer releases of transformers
MAE_BLOCKS = ("decoder.decoder_layers", "decoder.decoder_encoder.layer")


def without_cls(positions: Tensor) -> Tensor:
    """Returns the position table (1, 1 + N, E) of MAE's decoder without its CLS row, which must be zero."""
    if positions[:, 0].any():
        raise ValueError(
            "The position embedding of the CLS token in the decoder of MAE is not zero. The file is damaged."
        )
    return positions[:, 1:]


def adapt_mae(config: Config, ours: HfViTConfig, shapes: Shapes) -> KeyMap:
    """Returns the key map entries of the blocks of MAE's decoder."""
    (theirs,) = [name for name in MAE_BLOCKS if f"{name}.0.layernorm_before.weight" in shapes] or MAE_BLOCKS[:1]
    return block_keys(f"{MAE_HEAD}.layers.*", f"{theirs}.*", BLOCK)


def configure_mae(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of `HfViTConfig` for a ViTMAEConfig."""
    options = given_fields(config, HfViTMaskedImageModelingConfig.options_of("mae"), norm_pix_loss=False)
    ratio = config.get("mask_ratio", 0.75)
    if 0 < ratio < 1:  # A mask ratio of 0 disables masking for feature extraction and is not a training option.
        options["mask_ratio"] = ratio
    fields = transformers_fields(config, shapes, layer_norm_eps=1e-12)
    return {**fields, "masked_image_modeling_config": options}


# Position embeddings of MAE are loaded as learned ones. The type "sincos2d" computes the same values only up to
# rounding, and different values if the embeddings were resampled or trained.
VIT_MAE = Family(
    name="MAE",
    model_types=("vit_mae",),
    keys={
        **KEYS,
        **parts(MAE_HEAD, "decoder", "embedding=decoder_embed mask_token norm=decoder_norm predictor=decoder_pred"),
        f"{MAE_HEAD}.position_embeddings": Made(("decoder.decoder_pos_embed",), without_cls),
    },
    adapt=adapt_mae,
    configure=configure_mae,
    prefixes=("vit.",),
    outputs="hidden states of all patches, or of the visible ones; pixels of masked patches",
)

YOLOS_HEAD, YOLOS_TOKENS = "detection_head", "embeddings.detection_tokens"
# Names of YOLOS's position embeddings between blocks in different releases of transformers
MID_POSITIONS = ("encoder.mid_position_embeddings", "encoder.interpolation.mid_position_embeddings")


def add_last_positions(tokens: Tensor, positions: Tensor) -> Tensor:
    """Returns the queries (Q, D) with their position embeddings (the last Q rows of the position table) added."""
    return (tokens + positions[:, -tokens.shape[1] :])[0]


def adapt_yolos(config: Config, ours: HfViTConfig, shapes: Shapes) -> KeyMap:
    """Returns the rules that split position tables into rows for prefix and patch tokens and rows for queries."""
    num_queries = shapes[YOLOS_TOKENS][1]
    keys: dict[str, Any] = {
        f"{YOLOS_HEAD}.queries.weight": Made((YOLOS_TOKENS, TABLE), add_last_positions),
        TABLE: Made((TABLE,), lambda table: table[:, :-num_queries]),  # (1, P + N + Q, D) to (1, P + N, D)
    }
    for name in MID_POSITIONS:
        if name in shapes:  # (blocks, 1, P + N + Q, D)
            keys[f"{YOLOS_HEAD}.mid_position_embeddings"] = Made((name,), lambda tables: tables[:, 0, :-num_queries])
            keys[f"{YOLOS_HEAD}.mid_query_embeddings"] = Made((name,), lambda tables: tables[:, 0, -num_queries:])
    return keys


def configure_yolos(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of `HfViTConfig` for a YolosConfig."""
    return {
        **transformers_fields(config, shapes, image_size=[512, 864], layer_norm_eps=1e-12),
        "detection_config": {
            "decoder": "queries",
            "num_queries": config.get("num_detection_tokens", 100),
            "use_mid_position_embeddings": any(name in shapes for name in MID_POSITIONS),
            "bbox_weight": config.get("bbox_loss_coefficient", 5),
            "giou_weight": config.get("giou_loss_coefficient", 2),
        },
    }


YOLOS = Family(
    name="YOLOS",
    model_types=("yolos",),
    keys={
        **{name: rule for name, rule in KEYS.items() if name.startswith(("embeddings.", "encoder.", "norm"))},
        f"{YOLOS_HEAD}.classifier.layers.*": "class_labels_classifier.layers.*",
        f"{YOLOS_HEAD}.box_predictor.layers.*": "bbox_predictor.layers.*",
    },
    adapt=adapt_yolos,
    configure=configure_yolos,
    prefixes=("vit.",),
    outputs="hidden states, classes and boxes of the queries",
)
