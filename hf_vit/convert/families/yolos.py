"""YOLOS of transformers (https://arxiv.org/abs/2106.00666): a ViT whose last tokens become objects."""

from typing import Any

from torch import Tensor

from ...model.configuration_hf_vit import HfViTConfig
from ..family import Config, Family, Shapes, transformers_fields
from ..key_map import KeyMap, Made
from . import vit


HEAD = "detection_head"
TOKENS, POSITIONS = "embeddings.detection_tokens", "embeddings.position_embeddings"
KEYS: KeyMap = {
    **{name: rule for name, rule in vit.KEYS.items() if name.startswith(("embeddings.", "encoder.", "norm"))},
    f"{HEAD}.classifier.layers.*": "class_labels_classifier.layers.*",
    f"{HEAD}.box_predictor.layers.*": "bbox_predictor.layers.*",
}
# Releases of transformers differ in where they keep the positions between blocks.
MID_POSITIONS = ("encoder.mid_position_embeddings", "encoder.interpolation.mid_position_embeddings")


def add_positions(tokens: Tensor, positions: Tensor) -> Tensor:
    """Returns queries (Q, D) with their rows, the last ones, of the position table added."""
    return (tokens + positions[:, -tokens.shape[1] :])[0]


def adapt(config: Config, ours: HfViTConfig, shapes: Shapes) -> KeyMap:
    """Returns the rules for tables in which the queries have rows too."""
    num_queries = shapes[TOKENS][1]
    keys: dict[str, Any] = {
        f"{HEAD}.queries.weight": Made((TOKENS, POSITIONS), add_positions),
        POSITIONS: Made((POSITIONS,), lambda table: table[:, :-num_queries]),  # of (1, P + N + Q, D)
    }
    for name in MID_POSITIONS:
        if name in shapes:  # (blocks, 1, P + N + Q, D)
            keys[f"{HEAD}.mid_position_embeddings"] = Made((name,), lambda tables: tables[:, 0, :-num_queries])
            keys[f"{HEAD}.mid_query_embeddings"] = Made((name,), lambda tables: tables[:, 0, -num_queries:])
    return keys


def configure(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of a YolosConfig."""
    large = {"image_size": [512, 864], "layer_norm_eps": 1e-12}
    return {
        **transformers_fields(config, **large),
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
    keys=KEYS,
    adapt=adapt,
    configure=configure,
    prefixes=("vit.",),
    outputs="hidden states, classes and boxes of the queries",
)
