"""What the name of an architecture of timm says that neither its config.json nor the shapes of its tensors do."""

import re
from typing import Any


SIZES = (
    "tiny|wee|xsmall|little|small|small_plus|medium|mediumd|betwixt|base|so150m|so150m2|large|so400m|huge|huge_plus|"
    "giant|giantopt|gigantic|7b"
)
KINDS = (
    "plus|gap|36x1|reg[14]_gap|reg4_map|plus_clip|clip|clip_quickgelu|siglip|siglip_gap|dinov2|reg4_dinov2|"
    "reg1_tipsv2|dinov3|dinov3_qkvb|lingbot|rope|rope_ape|rope_reg[14]_gap"
)
# What timm once put behind a name and now calls its tag.
TAGS = "miil|miil_in21k|in21k|sam|dino|clip_laion2b"
# The architectures whose model is ours, weight by weight.
CONVERTED = (
    rf"vit_({SIZES})_patch\d+(_({KINDS}))?(_\d+)?(_({TAGS}))?",
    r"deit_(tiny|small|base)(_distilled)?_patch16_\d+",
    r"deit3_(small|medium|base|large|huge)_patch\d+_\d+",
    r"flexivit_(small|base|large)",
    r"eva_large_patch14_\d+",
    r"test_vit[24]?",
)
# The others, and what ours lacks for them.
REFUSED = {
    r".*_rpn_\d+": "its blocks normalize after attention and MLP",
    r".*_18x2_\d+": "its blocks hold two attentions and two MLPs side by side",
    r".*_xp_\d+|vit_d?pwee_.*": "its blocks compute attention and MLP side by side",
    r"vit_d(wee|little)_.*": "its attention is the difference of two",
    r"(vit|test_vit)_s?relpos.*": "its positions are relative ones, added to the attention scores",
    r"vit_[a-z]+_(r\d*_|r\d+_|resnet|mci).*": "a convolutional network comes before its blocks",
    r".*_rope_mixed.*": "each of its blocks learns rotary frequencies of its own",
    r"vit_pe_.*": "its rotary positions start at one, its pooling has other heads or its final norm is missing",
    r".*_radio_.*|vit_intern300m_.*": "it has no final norm",
    r".*_sapiens2": "LayerScale is on one branch only, and key and value have fewer heads than the query",
    r"test_vit3": "its attention pooling looks at the registers too",
}
# Fields of `HfViTConfig` by name, the later ones first in rank. The rest is as in ViT.
FACTS: tuple[tuple[str, dict[str, Any]], ...] = (
    (r".*_clip_.*", {"layer_norm_eps": 1e-5}),
    (r".*_clip_quickgelu_.*", {"hidden_act": "quick_gelu"}),
    (r".*_(base_patch32|so400m_patch16|giantopt_patch16)_siglip_.*", {"hidden_act": "gelu_pytorch_tanh"}),
    (r".*_large_patch16_siglip_(gap_)?512", {"hidden_act": "gelu_pytorch_tanh"}),
    (r".*_(dinov3|dinov3_qkvb|lingbot)", {"layer_norm_eps": 1e-5, "rope_coordinates": "centered"}),
    (r".*_rope_(ape_)?\d+", {"rope_coordinates": "index"}),
    (r".*_rope_reg[14]_gap_256", {"rope_coordinates": "scaled_index", "rope_grid_size": 16, "rope_theta": 10000.0}),
)
# Their rotary positions turn neighbors, not halves of a head; the second table counts columns first.
INTERLEAVED = r".*_rope_.*"
COLUMNS_FIRST = r".*_rope_(ape_)?\d+"
# Width of a head, or number of heads, where it is not heads of width 64.
HEAD_SIZES = ((r"test_vit\d?", 32), (r"vit_7b_.*", 128))
HEADS = (
    (r"vit_(so400m|huge|giant|giantopt|gigantic)_patch.*", 16),
    (r"vit_giant_.*_(dinov2|tipsv2|lingbot)", 24),
    (r"deit3_huge_.*|vit_base_patch16_gap_224", 16),
)


def check(architecture: str) -> None:
    """Raises `ValueError` for an architecture that is not ours or not known, saying why."""
    for pattern, reason in REFUSED.items():
        if re.fullmatch(pattern, architecture):
            raise ValueError(
                f"timm's {architecture!r} is no plain ViT: {reason}. No HfViTConfig describes it; use timm for it."
            )
    if not any(re.fullmatch(pattern, architecture) for pattern in CONVERTED):
        raise ValueError(
            f"timm's architecture {architecture!r} is not known here, and its weights alone do not say what it "
            "computes. Known are the plain ones among vit_*, deit_*, deit3_*, flexivit_* and eva_large_*."
        )


def facts(architecture: str, width: int) -> dict[str, Any]:
    """Returns the fields of `HfViTConfig` that only the name of an architecture tells, of a model `width` wide."""
    fields: dict[str, Any] = {}
    for pattern, more in FACTS:
        if re.fullmatch(pattern, architecture):
            fields.update(more)
    heads = width // next((size for pattern, size in HEAD_SIZES if re.fullmatch(pattern, architecture)), 64)
    for pattern, number in HEADS:
        if re.fullmatch(pattern, architecture):
            heads = number
    return {**fields, "num_attention_heads": heads}
