"""I-JEPA of transformers (https://arxiv.org/abs/2301.08243): no CLS token."""

from typing import Any

from ..family import Config, Family, Shapes, transformers_fields
from .vit import KEYS


def configure(config: Config, shapes: Shapes) -> dict[str, Any]:
    """IJepaConfig; its classifier takes the mean of the patches."""
    return {
        **transformers_fields(config, layer_norm_eps=1e-12),
        "use_cls_token": False,
        "pooling": "mean",
        "use_mask_token": "embeddings.mask_token" in shapes,
    }


IJEPA = Family(
    name="I-JEPA",
    source="transformers `ijepa`",
    model_types=("ijepa",),
    keys={name: rule for name, rule in KEYS.items() if not name.startswith("pooler")},  # theirs takes the first patch
    configure=configure,
    prefixes=("ijepa.",),
    outputs="hidden states, logits",
)
