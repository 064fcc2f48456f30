"""The layout with tensor names such as `blocks.0.attn.qkv`, shared by timm, DINO, DeiT, MAE, DINOv2 and DINOv3."""

from collections.abc import Mapping, Sequence
from functools import partial
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from ...model.configuration_hf_vit import HfViTConfig, to_pair
from ..family import Shapes, Size, shape_of
from ..key_map import KeyMap, Made, Reshaped, Rows, Zeros, block_keys, gated_mlp_keys, parts


BLOCK = "encoder.layers.*"
KEYS: KeyMap = {
    **parts("embeddings", "", "cls_token distillation_token=dist_token register_tokens=reg_token"),
    **parts("embeddings", "", "position_embeddings=pos_embed patch_embeddings.projection=patch_embed.proj"),
    "embeddings.mask_token": Reshaped(("mask_token",)),
    **block_keys(
        BLOCK, "blocks.*", ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2", "ls1.gamma", "ls2.gamma")
    ),
    **parts(
        f"{BLOCK}.attention", "blocks.*.attn", "query_bias=q_bias value_bias=v_bias query_norm=q_norm key_norm=k_norm"
    ),
    **parts("attention_pooling", "attn_pool", "probe=latent query=q key_value=kv projection=proj norm"),
    **parts("attention_pooling", "attn_pool", "mlp.fc1 mlp.fc2"),
    **parts("", "", "pre_norm=norm_pre norm classifier=head distillation_classifier=head_dist"),
}
# Maps the name of a source tensor to changes of the key map that apply to files with this tensor. Entries for tensors
# that the model does not have are ignored.
DIALECTS: Mapping[str, KeyMap] = {
    "fc_norm.weight": {"norm": "fc_norm"},
    "register_tokens": {"embeddings.register_tokens": "register_tokens"},
    "storage_tokens": {"embeddings.register_tokens": "storage_tokens"},
    "blocks.0.gamma_1": parts(BLOCK, "blocks.*", "layer_scale1.scale=gamma_1 layer_scale2.scale=gamma_2"),
    # The tensor bias_mask sets the key bias to zero, so the key part of the qkv bias is not read.
    "blocks.0.attn.qkv.bias_mask": {
        f"{BLOCK}.attention.query_bias": Rows(("blocks.*.attn.qkv.bias",), 0, 1, 3),
        f"{BLOCK}.attention.value_bias": Rows(("blocks.*.attn.qkv.bias",), 2, 3, 3),
    },
    "blocks.0.mlp.fc1.weight": gated_mlp_keys("blocks.*.mlp", "fc1", "fc2"),
    "blocks.0.mlp.fc1_g.weight": parts(f"{BLOCK}.mlp", "blocks.*.mlp", "gate=fc1_g up=fc1_x down=fc2"),
    "blocks.0.mlp.w12.weight": gated_mlp_keys("blocks.*.mlp", "w12", "w3"),
    "blocks.0.mlp.w1.weight": parts(f"{BLOCK}.mlp", "blocks.*.mlp", "gate=w1 up=w2 down=w3"),
}
REGISTERS = ("reg_token", "register_tokens", "storage_tokens")


def adapt(config: HfViTConfig, shapes: Shapes) -> KeyMap:
    """Returns the key map entries to change for a checkpoint, depending on the tensors that it contains."""
    keys: dict[str, Any] = {}
    for name, dialect in DIALECTS.items():
        if name in shapes:
            keys.update(dialect)
    # The patch embedding of hf_vit always has a bias. If the source has none, it is filled with zeros.
    if config.use_pre_layernorm and "patch_embed.proj.bias" not in shapes:
        keys["embeddings.patch_embeddings.projection.bias"] = Zeros()
    if has_register_positions(shapes, config.grid_size):
        first = config.num_prefix_positions
        stop = first + config.num_register_tokens
        keys["embeddings.register_tokens"] = Made(("reg_token", "pos_embed"), partial(add_positions, first))
        keys["embeddings.position_embeddings"] = Made(("pos_embed",), partial(without_rows, first, stop))
    return keys


def add_positions(first: int, tokens: Tensor, positions: Tensor) -> Tensor:
    """Returns the register tokens with their position embeddings (from row `first` of the position table) added."""
    return tokens + positions[:, first : first + tokens.shape[1]]


def without_rows(first: int, stop: int, positions: Tensor) -> Tensor:
    """Returns a position table (1, rows, D) without the rows `first` to `stop` - 1."""
    return torch.cat((positions[:, :first], positions[:, stop:]), dim=1)


def has_register_positions(shapes: Shapes, grid: tuple[int, int]) -> bool:
    """Returns whether the position table has rows for register tokens."""
    if "pos_embed" not in shapes or "reg_token" not in shapes:
        return False
    return shapes["pos_embed"][1] - grid[0] * grid[1] == _num_tokens(shapes) + shapes["reg_token"][1]


def _num_tokens(shapes: Shapes) -> int:
    return ("cls_token" in shapes) + ("dist_token" in shapes)


def shape_fields(shapes: Shapes, native: Size | None = None, wanted: Size | None = None) -> dict[str, Any]:
    """Returns the fields of `HfViTConfig` that can be inferred from the shapes of the source tensors.

    Args:
        shapes: Shapes of the source tensors by name.
        native: Native image size in pixels from config.json; None if unknown.
        wanted: Image size in pixels given by the user; see `table_size`.
    """
    width, channels, *patch = shape_of(shapes, "patch_embed.proj.weight")
    down = "w3" if "blocks.0.mlp.w3.weight" in shapes else "fc2"
    intermediate = shape_of(shapes, f"blocks.0.mlp.{down}.weight")[1]
    up = shapes.get("blocks.0.mlp.fc1.weight", (0,))[0]
    gated = up != intermediate
    is_layer_norm = "blocks.0.norm1.bias" in shapes
    has_split_bias = "blocks.0.attn.q_bias" in shapes or "blocks.0.attn.qkv.bias_mask" in shapes
    fields = {
        "hidden_size": width,
        "num_channels": channels,
        "patch_size": as_size(patch),
        "num_hidden_layers": 1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("blocks.")),
        "intermediate_size": intermediate,
        "use_gated_mlp": gated,
        "hidden_act": "silu" if gated else "gelu",
        "mlp_bias": f"blocks.0.mlp.{down}.bias" in shapes,
        "qkv_bias": has_split_bias or "blocks.0.attn.qkv.bias" in shapes,
        "key_bias": not has_split_bias,
        "proj_bias": "blocks.0.attn.proj.bias" in shapes,
        "use_qk_norm": "blocks.0.attn.q_norm.weight" in shapes,
        "norm_type": "layernorm" if is_layer_norm else "rmsnorm",
        "layerscale_value": 1e-5 if {"blocks.0.ls1.gamma", "blocks.0.gamma_1"} & shapes.keys() else None,
        "use_pre_layernorm": "norm_pre.weight" in shapes,
        "norm_after_pooling": "fc_norm.weight" in shapes,
        "use_cls_token": "cls_token" in shapes,
        "use_distillation_token": "dist_token" in shapes,
        "num_register_tokens": next((shapes[name][1] for name in REGISTERS if name in shapes), 0),
    }
    if "head.weight" in shapes:
        fields["num_labels"] = shapes["head.weight"][0]
    if "pos_embed" not in shapes:
        return {**fields, "position_embedding_type": "none", "image_size": native or wanted or 224}
    tokens = _num_tokens(shapes)
    counts = (0, tokens, tokens + shapes.get("reg_token", (1, 0))[1])
    image_size, extra = table_size(shapes["pos_embed"][1], counts, patch, native, wanted)
    return {**fields, "position_embedding_type": "learned", "image_size": image_size, "prefix_has_position": extra > 0}


def table_size(
    rows: int, counts: Sequence[int], patch: Sequence[int], native: Size | None = None, wanted: Size | None = None
) -> tuple[Size, int]:
    """Infers the native image size of a position table from its number of rows.

    Candidates are, in this order, `native`, a square, and `wanted`; the first that matches the number of rows is used.
    `wanted` is last, because it may be the new size of the loaded model and match the table only by chance.

    Args:
        rows: Number of rows of the table.
        counts: Possible numbers of rows for prefix tokens, which precede the rows for patches.
        patch: Height and width of a patch in pixels.
        native: Image size in pixels from the configuration.
        wanted: Image size in pixels given by the user.

    Returns:
        The image size in pixels, a multiple of the patch size, and the number of rows for prefix tokens.

    Raises:
        ValueError: if no image size matches.
    """
    # Grids are rounded down, because published models ignore incomplete patches (384 pixels with 14-pixel patches).
    first, last = (
        None if size is None else tuple(side // part for side, part in zip(to_pair(size), patch, strict=True))
        for size in (native, wanted)
    )
    squares = [(isqrt(rows - count),) * 2 for count in counts]
    for grid in filter(None, (first, *squares, last)):
        if rows - grid[0] * grid[1] in counts:
            return as_size([grid[0] * patch[0], grid[1] * patch[1]]), rows - grid[0] * grid[1]
    raise ValueError(
        f"The position table has {rows} rows, which match neither a square image nor image_size={native or wanted} "
        f"with patches of {patch[0]} x {patch[1]} pixels. Pass the native image size of the weights as "
        "image_size=(height, width)."
    )


def infer_heads(width: int, published: Mapping[int, int], remedy: str) -> int:
    """Returns the number of attention heads: the number in `published`, or one head per 64 channels.

    Raises:
        ValueError: if the width is not in `published` and not a multiple of 64. The message ends with `remedy`.
    """
    if width % 64 and width not in published:
        raise ValueError(
            f"The number of heads cannot be inferred: no published model has hidden_size={width}. {remedy}"
        )
    return published.get(width, width // 64)


def as_size(pair: Sequence[int]) -> Size:
    """Returns a pair (height, width) as one number if both are equal, else as a list."""
    return pair[0] if pair[0] == pair[1] else list(pair)
