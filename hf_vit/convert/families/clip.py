"""CLIP, SigLIP and SigLIP 2 checkpoints in transformers, with two towers or with the image tower only.

Sources: https://arxiv.org/abs/2103.00020, 2303.15343 and 2502.14786.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import SiglipTextConfig
from transformers.utils import logging

from ...model.task_zero_shot_image_classification import BLOCK_FIELDS
from ..family import Config, Family, Shapes, architecture_fields, given_fields, is_classifier, label_fields
from ..key_map import KeyMap, Reshaped, Rows, Zeros, block_keys, join_qkv, parts


logger = logging.get_logger(__name__)
BLOCK = ("layer_norm1", join_qkv("self_attn."), "self_attn.out_proj", "layer_norm2", "mlp.fc1", "mlp.fc2")
# Key map entries of image tower, text tower and contrastive head that CLIP and SigLIP have in common
SHARED: KeyMap = {
    "embeddings.position_embeddings": Reshaped(("embeddings.position_embedding.weight",)),
    **block_keys("encoder.layers.*", "encoder.layers.*", BLOCK),
    **block_keys("text_model.encoder.layers.*", "text_model.encoder.layers.*", BLOCK),
    **parts("text_model", "text_model.embeddings", "token_embedding position_embedding"),
    **parts("", "", "norm=post_layernorm text_model.norm=text_model.final_layer_norm"),
    "contrastive_head.logit_scale": Reshaped(("logit_scale",)),
}
KEYS: KeyMap = {
    **SHARED,
    "embeddings.cls_token": Reshaped(("embeddings.class_embedding",)),
    **parts("embeddings", "embeddings", "patch_embeddings.projection.weight=patch_embedding.weight"),
    "embeddings.patch_embeddings.projection.bias": Zeros(),
    "pre_norm": "pre_layrnorm",
    **parts("contrastive_head", "", "image_projection=visual_projection text_projection"),
}
NUMBERS = {r"(text_model\.)?embeddings\.position_ids": "the numbers 0, 1, 2, …"}
# Defaults of SiglipTextConfig. The field names are the same in CLIPTextConfig and `HfViTTextConfig`.
SIGLIP_TEXT_DEFAULTS = given_fields(
    SiglipTextConfig(bos_token_id=None, eos_token_id=None).to_dict(),
    ("vocab_size", "max_position_embeddings", *BLOCK_FIELDS),
)


def tower_of(config: Config) -> Config:
    """Returns the configuration of the image tower. Models with two towers nest it under "vision_config"."""
    return config["vision_config"] if config.get("vision_config") is not None else config


def text_fields(config: Config) -> dict[str, Mapping[str, Any]]:
    """Returns the options of CLIP's text tower and contrastive head.

    In older files, `text_config_dict` has priority over `text_config`. CLIP uses the output at the token
    `eos_token_id` as the text embedding. If it is 2, an unused value in old files, CLIP uses the token with the
    largest id. If `eos_token_id` is not in the vocabulary, no token matches, and CLIP uses the first one.
    """
    tower = config.get("text_config_dict") or config.get("text_config") or {}
    text = given_fields(tower, SIGLIP_TEXT_DEFAULTS, hidden_act="quick_gelu")
    end, vocab_size = tower.get("eos_token_id", 49407), text.get("vocab_size", 49408)
    if end == 2:
        end = vocab_size - 1
    summary = {"eos_token_id": end} if end < vocab_size else {"eos_token_id": None, "pooling": "first"}
    head = given_fields(config, ("projection_dim",), loss="softmax")
    return {"text_config": {**text, **summary}, "contrastive_config": head}


def configure(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of `HfViTConfig` for a CLIPVisionConfig or CLIPConfig.

    In older files, `vision_config_dict` has priority over `vision_config`.
    """
    if config.get("vision_config_dict") is not None:
        config = {**config, "vision_config": config["vision_config_dict"]}
    if is_classifier(shapes):
        logger.warning(
            "The classifier of CLIPForImageClassification and its labels are not loaded: it classifies the mean of "
            "the patch tokens before the final norm, which is not supported. An HfViTForImageClassification starts "
            "with a new head."
        )
    defaults = {"patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "use_pre_layernorm": True}
    texts = text_fields(config) if "text_projection.weight" in shapes else {}
    return {**architecture_fields(tower_of(config), **defaults), **texts}


CLIP = Family(
    name="CLIP",
    model_types=("clip", "clip_vision_model"),
    keys=KEYS,
    configure=configure,
    prefixes=("vision_model.",),
    dropped={
        **NUMBERS,
        r"classifier\..*": "a classifier on the mean of patch tokens before the final norm, which is not supported",
        r"visual_projection\..*": "the image projection of the contrastive head, unused without a text tower",
    },
    outputs="hidden states, pooled; embeddings and logits of images and texts",
)

SIGLIP_KEYS: KeyMap = {
    **SHARED,
    "embeddings.patch_embeddings.projection": "embeddings.patch_embedding",
    **{
        f"attention_pooling.{name}.{part}": Rows((f"head.attention.in_proj_{part}",), *rows, 3)
        for name, rows in (("query", (0, 1)), ("key_value", (1, 3)))
        for part in ("weight", "bias")
    },
    **parts("attention_pooling", "head", "probe projection=attention.out_proj norm=layernorm mlp.fc1 mlp.fc2"),
    "classifier": "classifier",
    "contrastive_head.logit_bias": Reshaped(("logit_bias",)),
    "contrastive_head.text_projection": "text_model.head",
}


def siglip_text_fields(config: Config) -> dict[str, Any]:
    """Returns the options of SigLIP's text tower and contrastive head.

    The text tower attends to padding, so texts must be padded to the maximum length. The padding token of the file is
    not used: SigLIP 2 uses the tokenizer of Gemma, but its files contain the padding token of SigLIP.
    """
    text = given_fields(config.get("text_config") or {}, SIGLIP_TEXT_DEFAULTS, **SIGLIP_TEXT_DEFAULTS)
    text |= {"is_causal": False, "pooling": "last", "eos_token_id": None}
    text["pad_token_id"] = 0 if text["vocab_size"] == 256000 else 1
    return {"text_config": text, "contrastive_config": {"loss": "sigmoid", "projection_dim": None}}


def configure_siglip(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of `HfViTConfig` for a SiglipConfig or SiglipVisionConfig.

    Models with a classifier use mean pooling of the patch tokens instead of attention pooling.
    """
    tower = tower_of(config)
    has_attention = tower.get("vision_use_head", True) and not is_classifier(shapes)
    return {
        **architecture_fields(tower, hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-6, use_cls_token=False),
        **label_fields(config),
        "pooling": "attention" if has_attention else "mean",
        **(siglip_text_fields(config) if "text_model.head.weight" in shapes else {}),
    }


def configure_siglip_2(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of `HfViTConfig` for a Siglip2Config or Siglip2VisionConfig.

    The image size is computed from the position table, which has a square patch grid.
    """
    fields = configure_siglip(config, shapes)
    return {
        **fields,
        "image_size": math.isqrt(tower_of(config).get("num_patches", 256)) * fields.get("patch_size", 16),
        "position_interpolation": "bilinear",
        "position_antialias": True,
    }


SIGLIP = Family(
    name="SigLIP",
    model_types=("siglip", "siglip_vision_model"),
    keys=SIGLIP_KEYS,
    configure=configure_siglip,
    prefixes=("vision_model.",),
    dropped={**NUMBERS, r"head\..*": "attention pooling, which the classifier does not use"},
    outputs="hidden states, pooled, logits; embeddings and logits of images and texts",
)
SIGLIP_2 = replace(
    SIGLIP,
    name="SigLIP 2, any size",
    model_types=("siglip2", "siglip2_vision_model"),
    # The patch embedding of SigLIP 2 is a linear layer on patches that are flattened with channels last.
    keys={
        **SIGLIP_KEYS,
        "embeddings.patch_embeddings.projection.weight": Reshaped(
            ("embeddings.patch_embedding.weight",), (0, 2, 3, 1)
        ),
    },
    configure=configure_siglip_2,
    outputs="hidden states, pooled; embeddings and logits of images and texts",
)
