"""ViT, MSN and I-JEPA of transformers, also as saved by other training code in that layout.

Sources: https://arxiv.org/abs/2010.11929, 2204.07141 and 2301.08243. DeiT, MAE and DINOv2 share the names.
"""

from functools import partial
from typing import Any

from torch import Tensor

from ...model.configuration_hf_vit import HfViTConfig, to_pair
from ..family import Config, Family, Shapes, transformers_fields
from ..key_map import Joined, KeyMap, Made


def block(ours: str, theirs: str) -> KeyMap:
    """Returns the keys of a block, by what stands before the names of its parts."""
    return {
        f"{ours}.norm1": f"{theirs}.layernorm_before",
        f"{ours}.attention.qkv": Joined(
            tuple(f"{theirs}.attention.attention.{name}" for name in ("query", "key", "value"))
        ),
        f"{ours}.attention.projection": f"{theirs}.attention.output.dense",
        f"{ours}.norm2": f"{theirs}.layernorm_after",
        f"{ours}.mlp.fc1": f"{theirs}.intermediate.dense",
        f"{ours}.mlp.fc2": f"{theirs}.output.dense",
    }


BLOCK = block("encoder.layers.*", "encoder.layer.*")
ATTENTION: KeyMap = {name: rule for name, rule in BLOCK.items() if ".attention." in name}
KEYS: KeyMap = {
    "embeddings.cls_token": "embeddings.cls_token",
    "embeddings.mask_token": "embeddings.mask_token",
    "embeddings.position_embeddings": "embeddings.position_embeddings",
    "embeddings.patch_embeddings.projection": "embeddings.patch_embeddings.projection",
    **BLOCK,
    "norm": "layernorm",
    "pooler.dense": "pooler.dense",
    "classifier": "classifier",
}
PIXELS = "decoder.0.weight"
PIXEL_DECODER = {r"decoder\..*": "the decoder of masked image modeling"}


def configure(config: Config, shapes: Shapes, layer_norm_eps: float = 1e-12) -> dict[str, Any]:
    """Returns the fields of a ViTConfig; which parts there are, its config.json does not tell."""
    return {
        **transformers_fields(config, layer_norm_eps=layer_norm_eps),
        "use_pooler": has_pooler(config, shapes),
        "use_mask_token": "embeddings.mask_token" in shapes,
    }


def configure_vit(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of a ViTConfig, with the objective where there is a decoder of pixels."""
    fields = configure(config, shapes)
    return {**fields, "masked_image_modeling_config": {"objective": "simmim"}} if PIXELS in shapes else fields


def adapt(config: Config, ours: HfViTConfig, shapes: Shapes) -> KeyMap:
    """Returns the rule for the decoder of pixels, where it predicts those of one patch: no other can be trained."""
    sides = to_pair(ours.patch_size)
    if shapes.get(PIXELS, (0,))[0] != ours.num_channels * sides[0] * sides[1]:
        return {}
    make = partial(channels_last, ours.num_channels, sides)
    return {"masked_image_modeling_head.simmim.predictor": Made(("decoder.0",), make)}


def channels_last(num_channels: int, sides: tuple[int, int], rows: Tensor) -> Tensor:
    """Returns weights (C·p·q, D, 1, 1) or biases (C·p·q,) of pixels as (p·q·C, D) or (p·q·C,)."""
    return rows.reshape(num_channels, *sides, *rows.shape[1:2]).movedim(0, 2).flatten(0, 2)


def has_pooler(config: Config, shapes: Shapes) -> bool:
    """Returns whether there is a pooler; `ValueError` if it is none of ours."""
    activation = config.get("pooler_act", "tanh")
    sizes = config.get("hidden_size"), config.get("pooler_output_size")
    if "pooler.dense.weight" not in shapes:
        return False
    if activation != "tanh" or sizes[1] not in (None, sizes[0]):
        raise ValueError(
            f"The pooler has pooler_act={activation!r} and pooler_output_size={sizes[1]}, but only 'tanh' and "
            f"hidden_size={sizes[0]} are known here. Save the model without it (add_pooling_layer=False)."
        )
    return True


def configure_ijepa(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of an IJepaConfig, whose classifier takes the mean of the patches."""
    return {
        **transformers_fields(config, layer_norm_eps=1e-12),
        "use_cls_token": False,
        "pooling": "mean",
        "use_mask_token": "embeddings.mask_token" in shapes,
    }


VIT = Family(
    name="ViT",
    model_types=("vit",),
    keys=KEYS,
    adapt=adapt,
    configure=configure_vit,
    prefixes=("vit.",),
    dropped=PIXEL_DECODER,
    outputs="hidden states, pooled, logits, pixels of masked patches",
)
VIT_MSN = Family(
    name="MSN",
    model_types=("vit_msn",),
    keys=KEYS,
    configure=partial(configure, layer_norm_eps=1e-6),
    prefixes=("vit.",),
    outputs="hidden states, logits",
)
IJEPA = Family(
    name="I-JEPA",
    model_types=("ijepa",),
    keys={name: rule for name, rule in KEYS.items() if not name.startswith("pooler")},  # theirs takes the first patch
    configure=configure_ijepa,
    prefixes=("ijepa.",),
    outputs="hidden states, logits",
)
