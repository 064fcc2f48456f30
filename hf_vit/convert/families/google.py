"""The `.npz` files of Google's vision_transformer and big_vision (https://arxiv.org/abs/2010.11929).

The original code uses the tanh approximation of GELU, the default of flax. Here, the activation is set as in other
conversions of these files. SigLIP models, identified by their attention pooling, use the tanh approximation, as in
convert_siglip_to_hf.py in transformers. ViTs use the exact GELU, as in transformers and timm. To change the
activation, pass `hidden_act="gelu_pytorch_tanh"` or `"gelu"` at loading.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..family import Config, Family, Shapes, shape_of
from ..key_map import KeyMap, Made
from .block_layout import as_size, table_size


def from_heads(*kernels: Tensor) -> Tensor:
    """Joins k kernels (D, n, d) of n heads to a weight (k·n·d, D), or k biases (n, d) to a bias (k·n·d,)."""
    return torch.cat([kernel.flatten() if kernel.ndim == 2 else kernel.flatten(1).T for kernel in kernels])


def norm(ours: str, theirs: str) -> KeyMap:
    """Returns the key map entries of a LayerNorm."""
    return {f"{ours}.weight": f"{theirs}/scale", f"{ours}.bias": f"{theirs}/bias"}


def linear(ours: str, theirs: str) -> KeyMap:
    """Returns the key map entries of a linear layer. Its source kernel is (in, out) or (heads, head size, out)."""
    weight = Made((f"{theirs}/kernel",), lambda kernel: kernel.flatten(0, -2).T)
    return {f"{ours}.weight": weight, f"{ours}.bias": f"{theirs}/bias"}


def heads(ours: str, theirs: str, parts: tuple[str, ...]) -> KeyMap:
    """Returns the key map entries of an attention projection that concatenates the source projections `parts`."""
    return {
        f"{ours}.{leaf}": Made(tuple(f"{theirs}/{part}/{name}" for part in parts), from_heads)
        for leaf, name in (("weight", "kernel"), ("bias", "bias"))
    }


def block(attention: int, second_norm: int, mlp: int) -> KeyMap:
    """Returns the key map entries of a block. The arguments are the numbers of its modules in the source names."""
    ours, theirs = "encoder.layers.*", "Transformer/encoderblock_*"
    attended = f"{theirs}/MultiHeadDotProductAttention_{attention}"
    return {
        **norm(f"{ours}.norm1", f"{theirs}/LayerNorm_0"),
        **heads(f"{ours}.attention.qkv", attended, ("query", "key", "value")),
        **linear(f"{ours}.attention.projection", f"{attended}/out"),
        **norm(f"{ours}.norm2", f"{theirs}/LayerNorm_{second_norm}"),
        **linear(f"{ours}.mlp.fc1", f"{theirs}/MlpBlock_{mlp}/Dense_0"),
        **linear(f"{ours}.mlp.fc2", f"{theirs}/MlpBlock_{mlp}/Dense_1"),
    }


SHARED: KeyMap = {
    "embeddings.cls_token": "cls",
    # The patch kernel is permuted from (h, w, C, D) to (D, C, h, w).
    "embeddings.patch_embeddings.projection.weight": Made(
        ("embedding/kernel",), lambda kernel: kernel.permute(3, 2, 0, 1)
    ),
    "embeddings.patch_embeddings.projection.bias": "embedding/bias",
    **norm("norm", "Transformer/encoder_norm"),
    **linear("pooler.dense", "pre_logits"),
    **linear("classifier", "head"),
}
POSITIONS = "Transformer/posembed_input/pos_embedding"
KEYS: KeyMap = {**SHARED, **block(1, 2, 3), "embeddings.position_embeddings": POSITIONS}
POOLED = "MAPHead_0/MultiHeadDotProductAttention_0"
BIG_VISION_KEYS: KeyMap = {
    **SHARED,
    **block(0, 1, 0),
    "embeddings.position_embeddings": "pos_embedding",
    "attention_pooling.probe": "MAPHead_0/probe",
    **heads("attention_pooling.query", POOLED, ("query",)),
    **heads("attention_pooling.key_value", POOLED, ("key", "value")),
    **linear("attention_pooling.projection", f"{POOLED}/out"),
    **norm("attention_pooling.norm", "MAPHead_0/LayerNorm_0"),
    **linear("attention_pooling.mlp.fc1", "MAPHead_0/MlpBlock_0/Dense_0"),
    **linear("attention_pooling.mlp.fc2", "MAPHead_0/MlpBlock_0/Dense_1"),
}


def configure(given: Config, shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of `HfViTConfig`, inferred from shapes.

    If the position table is not for a square image, `given` must contain `image_size`.
    """
    if "conv_root/kernel" in shapes:
        raise ValueError(
            "The file is a hybrid model, which is not supported: a ResNet comes before the blocks (conv_root/kernel). "
            "Use timm for it."
        )
    query = next((name for name in shapes if "encoderblock_0/" in name and name.endswith("/query/kernel")), None)
    if query is None:
        raise ValueError(
            "The file stacks the weights of all blocks in single tensors, which is not supported. Save one tensor per "
            "block (Transformer/encoderblock_0/…)."
        )
    width, num_heads, _ = shapes[query]
    blocks = {name.split("/")[1] for name in shapes if name.startswith("Transformer/encoderblock_")}
    height, breadth, channels, _ = shapes["embedding/kernel"]
    is_big_vision = POSITIONS not in shapes
    hidden = shape_of(shapes, f"Transformer/encoderblock_0/MlpBlock_{0 if is_big_vision else 3}/Dense_0/kernel")[1]
    rows = shapes["pos_embedding" if is_big_vision else POSITIONS][1]
    num_positions = int("cls" in shapes and not is_big_vision)  # In big_vision, CLS tokens have no position embedding.
    image_size, _ = table_size(rows, (num_positions,), (height, breadth), wanted=given.get("image_size"))
    fields: dict[str, Any] = {
        "hidden_size": width,
        "num_attention_heads": num_heads,
        "num_hidden_layers": len(blocks),
        "intermediate_size": hidden,
        "hidden_act": "gelu_pytorch_tanh" if "MAPHead_0/probe" in shapes else "gelu",
        "patch_size": as_size((height, breadth)),
        "num_channels": channels,
        "image_size": image_size,
        "use_cls_token": "cls" in shapes,
        "prefix_has_position": num_positions > 0,
        "use_pooler": "pre_logits/kernel" in shapes,
        "pooling": "attention" if "MAPHead_0/probe" in shapes else "cls" if "cls" in shapes else "mean",
    }
    if "head/kernel" in shapes:
        fields["num_labels"] = shapes["head/kernel"][1]
    return fields


def unsupported_text_reason(given: Config, shapes: Shapes) -> str:
    """Returns the reason why the text tower is not supported, or an empty string if there is no text tower."""
    has_texts = any(name.startswith("txt/") for name in shapes)
    return "it has big_vision's layout; google/siglip-… of transformers has the same weights" if has_texts else ""


GOOGLE = Family(
    name="ViT, AugReg",
    files="`.npz` of google-research/vision_transformer",
    marks=("embedding/kernel", POSITIONS),
    keys=KEYS,
    configure=configure,
    prefixes=("opt/target/", "params/"),
    images="vit_jax",
    outputs="last hidden state, pooled, logits",
)
BIG_VISION = replace(
    GOOGLE,
    name="ViT, SigLIP of big_vision",
    files="`.npz` of google-research/big_vision",
    marks=("embedding/kernel", "pos_embedding"),
    keys=BIG_VISION_KEYS,
    prefixes=("params/img/", "params/"),
    dropped={r"txt/.*|t|b": "the text tower, and the temperature and bias of its loss"},
    unsupported_text_reason=unsupported_text_reason,
)
