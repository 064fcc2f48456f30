"""MSN of transformers (https://arxiv.org/abs/2204.07141)."""

from typing import Any

from ..family import Config, Family, Shapes
from .vit import KEYS
from .vit import configure as configure_vit


def configure(config: Config, shapes: Shapes) -> dict[str, Any]:
    """ViTMSNConfig."""
    return {**configure_vit(config, shapes), "layer_norm_eps": config.get("layer_norm_eps", 1e-6)}


VIT_MSN = Family(
    name="MSN",
    source="transformers `vit_msn`",
    model_types=("vit_msn",),
    keys=KEYS,
    configure=configure,
    prefixes=("vit.",),
    outputs="hidden states, logits",
)
