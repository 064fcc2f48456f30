"""SigLIP and SigLIP 2 of transformers (https://arxiv.org/abs/2303.15343, 2502.14786): both towers, or one alone."""

import math
from dataclasses import replace
from typing import Any

from ..family import Config, Family, Shapes, given_fields, is_classifier, label_fields
from ..key_map import KeyMap, Reshaped, Rows
from .clip import NUMBERS, TEXT_FIELDS, TEXT_KEYS, block, tower_fields, tower_of


KEYS: KeyMap = {
    "embeddings.position_embeddings": Reshaped(("embeddings.position_embedding.weight",)),
    "embeddings.patch_embeddings.projection": "embeddings.patch_embedding",
    **block(),
    "norm": "post_layernorm",
    "attention_pooling.probe": "head.probe",
    "attention_pooling.query.weight": Rows(("head.attention.in_proj_weight",), 0, 1, 3),
    "attention_pooling.query.bias": Rows(("head.attention.in_proj_bias",), 0, 1, 3),
    "attention_pooling.key_value.weight": Rows(("head.attention.in_proj_weight",), 1, 3, 3),
    "attention_pooling.key_value.bias": Rows(("head.attention.in_proj_bias",), 1, 3, 3),
    "attention_pooling.projection": "head.attention.out_proj",
    "attention_pooling.norm": "head.layernorm",
    "attention_pooling.mlp.fc1": "head.mlp.fc1",
    "attention_pooling.mlp.fc2": "head.mlp.fc2",
    "classifier": "classifier",
    **TEXT_KEYS,
    "contrastive_head.logit_bias": Reshaped(("logit_bias",)),
    "contrastive_head.text_projection": "text_model.head",
}
# Their patches are flattened with the channels last.
KEYS_2: KeyMap = {
    **KEYS,
    "embeddings.patch_embeddings.projection.weight": Reshaped(("embeddings.patch_embedding.weight",), (0, 2, 3, 1)),
}
DROPPED = {**NUMBERS, r"head\..*": "the classifier does without the attention pooling"}
# What the class of their text towers assumes
TEXT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}
OF_TEXTS = {"is_causal": False, "pooling": "last", "eos_token_id": None}
# Those of SigLIP 2, whose tokenizer is Gemma's
GEMMA_TOKENS = 256000


def text_fields(config: Config) -> dict[str, Any]:
    """Returns the fields of the text tower and of what compares it with images.

    It attends to padding, with which texts must be filled up.
    """
    text = given_fields(config.get("text_config") or {}, TEXT_FIELDS, **TEXT_DEFAULTS)
    tower = {**text, **OF_TEXTS, "pad_token_id": padding_of(text["vocab_size"])}
    return {"text_config": tower, "contrastive_config": {"loss": "sigmoid", "projection_dim": None}}


def padding_of(vocab_size: int) -> int:
    """Returns the token that fills texts up; files of SigLIP 2 give that of SigLIP."""
    return 0 if vocab_size == GEMMA_TOKENS else 1


def configure(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of a SiglipConfig or SiglipVisionConfig, whose classifier takes the mean of the patches."""
    has_attention = tower_of(config).get("vision_use_head", True) and not is_classifier(shapes)
    return {
        **tower_fields(config, hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-6),
        **label_fields(config),
        "use_cls_token": False,
        "pooling": "attention" if has_attention else "mean",
        **(text_fields(config) if "text_model.head.weight" in shapes else {}),
    }


def configure_2(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of a Siglip2Config or Siglip2VisionConfig, whose table is made for a square of patches."""
    fields = configure(config, shapes)
    return {
        **fields,
        "image_size": math.isqrt(tower_of(config).get("num_patches", 256)) * fields.get("patch_size", 16),
        "position_interpolation": "bilinear",
        "position_antialias": True,
    }


SIGLIP = Family(
    name="SigLIP",
    model_types=("siglip", "siglip_vision_model"),
    keys=KEYS,
    configure=configure,
    prefixes=("vision_model.",),
    dropped=DROPPED,
    outputs="hidden states, pooled, logits; embeddings and logits of images and texts",
)
SIGLIP_2 = replace(
    SIGLIP,
    name="SigLIP 2, any size",
    model_types=("siglip2", "siglip2_vision_model"),
    keys=KEYS_2,
    configure=configure_2,
    outputs="hidden states, pooled; embeddings and logits of images and texts",
)
