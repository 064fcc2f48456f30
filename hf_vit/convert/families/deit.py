"""DeiT of transformers (https://arxiv.org/abs/2012.12877), which always has the distillation token."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..family import Config, Family, Shapes
from ..key_map import KeyMap, Made
from .vit import KEYS, PIXEL_DECODER
from .vit import configure as configure_vit


TOKEN, TABLE = "embeddings.distillation_token", "embeddings.position_embeddings"


def with_its_position(token: Tensor, table: Tensor) -> Tensor:
    """Returns the distillation token as a register, which has no position of its own: (1, 1, D)."""
    return token + table[:, 1:2]


def without_its_position(table: Tensor) -> Tensor:
    """Returns the position table without the row of the distillation token: (1, 1 + N, D)."""
    return torch.cat((table[:, :1], table[:, 2:]), dim=1)


DISTILLED_KEYS: KeyMap = {
    **KEYS,
    "embeddings.distillation_token": TOKEN,
    "classifier": "cls_classifier",
    "distillation_classifier": "distillation_classifier",
}
ONE_HEAD_KEYS: KeyMap = {
    **KEYS,
    "embeddings.register_tokens": Made((TOKEN, TABLE), with_its_position),
    "embeddings.position_embeddings": Made((TABLE,), without_its_position),
}


def configure_distilled(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of a DeiTConfig."""
    return {**configure_vit(config, shapes), "use_distillation_token": True}


def configure_one_head(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of a DeiTConfig with one head, whose distillation token has no task: a register."""
    return {**configure_vit(config, shapes), "num_register_tokens": 1}


def has_one_head(config: Config) -> bool:
    """Returns whether the model classifies by its CLS token only."""
    return config.get("architectures") == ["DeiTForImageClassification"]


DEIT_ONE_HEAD = Family(
    name="DeiT with one head",
    source="transformers `deit`",
    model_types=("deit",),
    reads=has_one_head,
    keys=ONE_HEAD_KEYS,
    configure=configure_one_head,
    prefixes=("deit.",),
    outputs="hidden states, logits",
)
DEIT = replace(
    DEIT_ONE_HEAD,
    name="DeiT",
    reads=lambda config: True,
    keys=DISTILLED_KEYS,
    configure=configure_distilled,
    dropped=PIXEL_DECODER,
    outputs="hidden states, pooled, logits of both heads and their mean",
)
