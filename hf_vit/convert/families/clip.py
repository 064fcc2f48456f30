"""CLIP of transformers (https://arxiv.org/abs/2103.00020): both towers, or that for images alone."""

from collections.abc import Mapping
from typing import Any

from transformers.utils import logging

from ..family import Config, Family, Shapes, architecture_fields, given_fields, is_classifier
from ..key_map import KeyMap, Reshaped, Zeros, join_qkv


logger = logging.get_logger(__name__)


def block(prefix: str = "") -> KeyMap:
    """Returns the keys of the blocks of a tower, whose names begin with `prefix` on both sides."""
    layer = f"{prefix}encoder.layers.*"
    return {
        f"{layer}.norm1": f"{layer}.layer_norm1",
        f"{layer}.attention.qkv": join_qkv(f"{layer}.self_attn."),
        f"{layer}.attention.projection": f"{layer}.self_attn.out_proj",
        f"{layer}.norm2": f"{layer}.layer_norm2",
        f"{layer}.mlp.fc1": f"{layer}.mlp.fc1",
        f"{layer}.mlp.fc2": f"{layer}.mlp.fc2",
    }


# The tower for texts, which that of SigLIP is too, and what compares it with images
TEXT_KEYS: KeyMap = {
    "text_model.token_embedding": "text_model.embeddings.token_embedding",
    "text_model.position_embedding": "text_model.embeddings.position_embedding",
    **block("text_model."),
    "text_model.norm": "text_model.final_layer_norm",
    "contrastive_head.logit_scale": Reshaped(("logit_scale",)),
}
KEYS: KeyMap = {
    "embeddings.cls_token": Reshaped(("embeddings.class_embedding",)),
    "embeddings.position_embeddings": Reshaped(("embeddings.position_embedding.weight",)),
    "embeddings.patch_embeddings.projection.weight": "embeddings.patch_embedding.weight",
    "embeddings.patch_embeddings.projection.bias": Zeros(),
    "pre_norm": "pre_layrnorm",
    **block(),
    "norm": "post_layernorm",
    **TEXT_KEYS,
    "contrastive_head.image_projection": "visual_projection",
    "contrastive_head.text_projection": "text_projection",
}
NUMBERS = {r"(text_model\.)?embeddings\.position_ids": "the numbers 0, 1, 2, …"}
# Fields that the towers for texts share with ours
TEXT_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_act",
    "layer_norm_eps",
    "max_position_embeddings",
)


def tower_of(config: Config) -> Config:
    """Returns the configuration of the image tower, which is nested in that of a whole model."""
    return config["vision_config"] if config.get("vision_config") is not None else config


def tower_fields(config: Config, **defaults: Any) -> dict[str, Any]:
    """Returns the fields of an image tower, without labels, which are those of the whole model."""
    return architecture_fields(tower_of(config), **defaults)


def text_fields(config: Config) -> dict[str, Mapping[str, Any]]:
    """Returns the fields of the text tower of CLIP, and of what compares it; `text_config_dict` of older files wins.

    They end a text at `eos_token_id`, but for 2, which files say that were made before it was read: those go by the
    largest number. One that is beyond the vocabulary is never found, and then CLIP takes the first token.
    """
    tower = config.get("text_config_dict") or config.get("text_config") or {}
    text = given_fields(tower, TEXT_FIELDS, hidden_act="quick_gelu")
    end, vocab_size = tower.get("eos_token_id", 49407), text.get("vocab_size", 49408)
    if end == 2:
        end = vocab_size - 1
    summary = {"eos_token_id": end} if end < vocab_size else {"eos_token_id": None, "pooling": "first"}
    head = given_fields(config, ("projection_dim",), loss="softmax")
    return {"text_config": {**text, **summary}, "contrastive_config": head}


def configure(config: Config, shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of a CLIPVisionConfig or CLIPConfig, in older files with `vision_config_dict`, which wins."""
    if config.get("vision_config_dict") is not None:
        config = {**config, "vision_config": config["vision_config_dict"]}
    if is_classifier(shapes):
        logger.warning(
            "The classifier of CLIPForImageClassification is left out, and its labels with it: it takes the mean of "
            "the patches without the final norm, which ours cannot. A model for classification starts with a fresh "
            "head."
        )
    fields = tower_fields(config, patch_size=32, hidden_act="quick_gelu", layer_norm_eps=1e-5)
    texts = text_fields(config) if "text_projection.weight" in shapes else {}
    return {**fields, **texts, "use_pre_layernorm": True}


CLIP = Family(
    name="CLIP",
    model_types=("clip", "clip_vision_model"),
    keys=KEYS,
    configure=configure,
    prefixes=("vision_model.",),
    dropped={
        **NUMBERS,
        r"classifier\..*": "it takes the mean of patches without the final norm",
        r"visual_projection\..*": "of the comparison with text, which is not there",
    },
    outputs="hidden states, pooled; embeddings and logits of images and texts",
)
