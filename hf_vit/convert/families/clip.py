"""The image tower of CLIP of transformers (https://arxiv.org/abs/2103.00020), alone or within the whole model."""

from typing import Any

from transformers.utils import logging

from ..family import Config, Family, Shapes, architecture_fields, is_classifier
from ..key_map import Joined, KeyMap, Reshaped, Zeros


logger = logging.get_logger(__name__)


BLOCK: KeyMap = {
    "encoder.layers.*.norm1": "encoder.layers.*.layer_norm1",
    "encoder.layers.*.attention.qkv": Joined(
        (
            "encoder.layers.*.self_attn.q_proj",
            "encoder.layers.*.self_attn.k_proj",
            "encoder.layers.*.self_attn.v_proj",
        )
    ),
    "encoder.layers.*.attention.projection": "encoder.layers.*.self_attn.out_proj",
    "encoder.layers.*.norm2": "encoder.layers.*.layer_norm2",
    "encoder.layers.*.mlp.fc1": "encoder.layers.*.mlp.fc1",
    "encoder.layers.*.mlp.fc2": "encoder.layers.*.mlp.fc2",
}
KEYS: KeyMap = {
    "embeddings.cls_token": Reshaped(("embeddings.class_embedding",)),
    "embeddings.position_embeddings": Reshaped(("embeddings.position_embedding.weight",)),
    "embeddings.patch_embeddings.projection.weight": "embeddings.patch_embedding.weight",
    "embeddings.patch_embeddings.projection.bias": Zeros(),
    "pre_norm": "pre_layrnorm",
    **BLOCK,
    "norm": "post_layernorm",
}
# What towers for images and text have beside the image tower.
OTHER_PARTS = {
    r"(text_model|text_projection|visual_projection)\..*": "of the comparison with text",
    r"logit_(scale|bias)": "of the comparison with text",
    r"embeddings\.position_ids": "the numbers 0, 1, 2, …",
}


def tower_of(config: Config) -> Config:
    """Returns the configuration of the image tower, which is nested in that of a whole model."""
    return config["vision_config"] if config.get("vision_config") is not None else config


def tower_fields(config: Config, **defaults: Any) -> dict[str, Any]:
    """Returns the fields of an image tower, without labels, which are those of the whole model."""
    tower = tower_of(config)
    dropout = tower.get("attention_dropout") or 0.0
    return {**architecture_fields(tower, **defaults), "attention_probs_dropout_prob": dropout}


def configure(config: Config, shapes: Shapes) -> dict[str, Any]:
    """CLIPConfig, in older files with the tower in `vision_config_dict`, which wins; or CLIPVisionConfig."""
    if config.get("vision_config_dict") is not None:
        config = {**config, "vision_config": config["vision_config_dict"]}
    if is_classifier(shapes):
        logger.warning(
            "The classifier of CLIPForImageClassification is left out, and its labels with it: it takes the mean of "
            "the patches without the final norm, which ours cannot. A model for classification starts with a fresh "
            "head."
        )
    fields = tower_fields(config, patch_size=32, hidden_act="quick_gelu", layer_norm_eps=1e-5)
    return {**fields, "use_pre_layernorm": True}


CLIP = Family(
    name="CLIP",
    source="transformers `clip`, `clip_vision_model`",
    model_types=("clip", "clip_vision_model"),
    keys=KEYS,
    configure=configure,
    prefixes=("vision_model.",),
    dropped={**OTHER_PARTS, r"classifier\..*": "it takes the mean of patches without the final norm"},
    outputs="hidden states, pooled",
)
