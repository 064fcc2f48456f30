"""DeiT of transformers (https://arxiv.org/abs/2012.12877), which always has the distillation token."""

from dataclasses import replace
from functools import partial

from ..family import Family
from ..key_map import KeyMap, Made
from .block_layout import add_positions, without_rows
from .vit import KEYS, PIXEL_DECODER
from .vit import configure as configure_vit


TOKEN, TABLE = "embeddings.distillation_token", "embeddings.position_embeddings"


DISTILLED_KEYS: KeyMap = {
    **KEYS,
    "embeddings.distillation_token": TOKEN,
    "classifier": "cls_classifier",
    "distillation_classifier": "distillation_classifier",
}
# The distillation token has no task here: it becomes a register, with the second row of the table added for good.
ONE_HEAD_KEYS: KeyMap = {
    **KEYS,
    "embeddings.register_tokens": Made((TOKEN, TABLE), partial(add_positions, 1)),
    "embeddings.position_embeddings": Made((TABLE,), partial(without_rows, 1, 2)),
}


DEIT_ONE_HEAD = Family(
    name="DeiT with one head",
    model_types=("deit",),
    reads=lambda config: config.get("architectures") == ["DeiTForImageClassification"],
    keys=ONE_HEAD_KEYS,
    configure=lambda config, shapes: {**configure_vit(config, shapes), "num_register_tokens": 1},
    prefixes=("deit.",),
    outputs="hidden states, logits",
)
DEIT = replace(
    DEIT_ONE_HEAD,
    name="DeiT",
    reads=lambda config: True,
    keys=DISTILLED_KEYS,
    configure=lambda config, shapes: {**configure_vit(config, shapes), "use_distillation_token": True},
    dropped=PIXEL_DECODER,
    outputs="hidden states, pooled, logits of both heads and their mean",
)
