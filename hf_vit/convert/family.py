"""Checkpoint families: conversion rules of published checkpoints, and helpers to convert configurations."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from dataclasses import fields as fields_of
from typing import Any, TypedDict

from huggingface_hub.dataclasses import validate_typed_dict

from ..model.configuration_hf_vit import HfViTConfig
from .key_map import KeyMap


Config = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]
Size = int | list[int] | tuple[int, int]  # height and width in pixels, or one number for both
LABELS = ("id2label", "label2id", "problem_type")
# Fields of `HfViTConfig` that all plain ViT configurations in transformers share, with the same name and meaning
VIT_FIELDS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act", "qkv_bias"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range", "layer_norm_eps"),
    *("image_size", "patch_size", "num_channels"),
)
# `VIT_FIELDS` plus fields with the same name and meaning that only some ViT configurations in transformers have
ARCHITECTURE = (
    *VIT_FIELDS,
    *("key_bias", "proj_bias", "mlp_bias", "use_gated_mlp", "layerscale_value", "drop_path_rate"),
    *("num_register_tokens", "rope_theta"),
    *("apply_layernorm", "reshape_hidden_states", "out_features", "out_indices"),
)


def is_classifier(shapes: Shapes) -> bool:
    """Return whether a transformers checkpoint has a classifier, given the shape of each tensor by name."""
    return "classifier.weight" in shapes


def shape_of(shapes: Shapes, name: str) -> tuple[int, ...]:
    """Return the shape of the source tensor `name`; raise `ValueError` if it is missing."""
    if name not in shapes:
        raise ValueError(f"The weights have no tensor {name!r}. The file is incomplete or belongs to another model.")
    return shapes[name]


@dataclass(frozen=True)
class Family:
    """A family of published checkpoints, with the rules that convert their configurations and weights.

    "Source" means the published checkpoint that is converted.

    Args:
        name: Name of the family, as listed in the README.
        keys: Maps tensor names in hf_vit to conversion rules with tensor names in the source.
        configure: Function that returns the fields of `HfViTConfig`, given the source configuration and the shapes of
            the source tensors (names without prefix). If there is no source configuration, the function receives
            the fields given by the user instead.
        model_types: Values of `model_type` in a transformers config.json; empty for other formats.
        files: File format or library of the checkpoints, as listed in the README; empty for transformers.
        marks: Tensor names that identify a checkpoint of this family if it has no config.json.
        adapt: Function that returns changes of `keys` for one checkpoint, given the source configuration, the
            converted configuration, and the shapes of the source tensors.
        prefixes: Optional prefixes of source tensor names; they are removed before the names are matched.
        dropped: Maps regular expressions to reasons. Source tensors with a matching name are ignored.
        unsupported_text_reason: Function that returns the reason why the text tower of a checkpoint is not supported,
            given the source configuration and the tensor shapes; empty if the text tower is supported or missing.
        reads: Function that returns whether a configuration belongs to this family, in addition to `model_types`.
        fixed: Fields of the source configuration for which only one value is supported, mapped to that value.
        has_experts: Whether a checkpoint may have several experts, of which `dataset_index` selects one.
        images: Key in `ORIGINALS` of the image processor options for checkpoints without such options.
        is_sized_by_images: Whether `configure` also needs the image processor options. They are passed under the key
            `image_processor` of the configuration, empty if the checkpoint has no such options.
        outputs: Names of the outputs that are equal to those of the source, as listed in the README.
    """

    name: str
    keys: KeyMap
    configure: Callable[[Config, Shapes], dict[str, Any]]
    model_types: tuple[str, ...] = ()
    files: str = ""
    marks: tuple[str, ...] = ()
    adapt: Callable[[Config, HfViTConfig, Shapes], KeyMap] = lambda config, ours, shapes: {}
    prefixes: tuple[str, ...] = ()
    dropped: Mapping[str, str] = field(default_factory=dict)
    unsupported_text_reason: Callable[[Config, Shapes], str] = lambda config, shapes: ""
    reads: Callable[[Config], bool] = lambda config: True
    fixed: Mapping[str, Any] = field(default_factory=dict)
    has_experts: bool = False
    images: str = ""
    is_sized_by_images: bool = False
    outputs: str = ""

    @property
    def source(self) -> str:
        """The library or file format of the checkpoints, as listed in the README."""
        return self.files or f"transformers {', '.join(f'`{model_type}`' for model_type in self.model_types)}"


# Field types of `HfViTConfig`, used to check converted fields
TYPES: Any = TypedDict("TYPES", {own.name: own.type for own in fields_of(HfViTConfig)}, total=False)  # type: ignore[misc]


def transformers_fields(config: Config, shapes: Shapes, **defaults: Any) -> dict[str, Any]:
    """Return the fields of `HfViTConfig` for a transformers checkpoint.

    Args:
        config: Content of config.json.
        shapes: Shapes of the tensors by name. They show whether the checkpoint has a mask token and a pooler.
        **defaults: Values of fields missing from config.json: defaults of the source class and constants of the
            family.

    Raises:
        StrictDataclassError: If the type of a field differs from its type in `HfViTConfig`.
        ValueError: If the pooler is not supported.
    """
    return {
        **architecture_fields(config, **defaults),
        **label_fields(config),
        "use_mask_token": "embeddings.mask_token" in shapes,
        "use_pooler": has_pooler(config, shapes),
    }


def architecture_fields(config: Config, **defaults: Any) -> dict[str, Any]:
    """Return the encoder fields of `HfViTConfig`, without labels. See `transformers_fields` for the arguments."""
    fields = given_fields(config, ARCHITECTURE, **defaults)
    validate_typed_dict(TYPES, {name: value for name, value in fields.items() if name in TYPES.__annotations__})
    if config.get("attention_dropout") is not None:
        fields["attention_probs_dropout_prob"] = config["attention_dropout"]
    fields["image_size"] = round_to_patches(fields.get("image_size", 224), fields.get("patch_size", 16))
    if fields.get("out_features") == [f"stage{fields.get('num_hidden_layers', 12)}"]:
        # Without these fields, the last block is used, even if num_hidden_layers is changed later.
        del fields["out_features"], fields["out_indices"]
    return fields


def has_pooler(config: Config, shapes: Shapes) -> bool:
    """Return whether a checkpoint has a pooler; raise `ValueError` if the pooler is not supported."""
    activation = config.get("pooler_act", "tanh")
    width, pooled = config.get("hidden_size"), config.get("pooler_output_size")
    if "pooler.dense.weight" in shapes and (activation != "tanh" or pooled not in (None, width)):
        raise ValueError(
            f"The pooler has pooler_act={activation!r} and pooler_output_size={pooled}, but only 'tanh' and "
            f"hidden_size={width} are supported. Save the model without a pooler (add_pooling_layer=False)."
        )
    return "pooler.dense.weight" in shapes


def given_fields(config: Config, names: Iterable[str], **defaults: Any) -> dict[str, Any]:
    """Return `defaults`, updated with the fields in `names` that are set and not None in the configuration."""
    return {**defaults, **{name: config[name] for name in names if config.get(name) is not None}}


def check_backbone(backbone_config: Config, family: str, model_type: str) -> None:
    """Raise `ValueError` if the `model_type` of a backbone configuration is not the supported one."""
    if (found := backbone_config.get("model_type", model_type)) != model_type:
        raise ValueError(f"The backbone_config has model_type={found!r}, but {family} supports {model_type!r} only.")


def label_fields(config: Config) -> dict[str, Any]:
    """Return the label names of a transformers config.json, or the number of labels if it contains no names."""
    fields = given_fields(config, LABELS)
    if "id2label" in fields:
        fields["id2label"] = {int(index): label for index, label in fields["id2label"].items()}
    elif config.get("num_labels") is not None:
        fields["num_labels"] = config["num_labels"]
    return fields


def round_to_patches(image_size: Size, patch_size: Size) -> Size:
    """Round an image size down to whole patches. The source model ignores the remaining pixels."""
    image, patch = ([size] * 2 if isinstance(size, int) else list(size) for size in (image_size, patch_size))
    if len(image) != 2 or len(patch) != 2 or min(patch) < 1:  # `HfViTConfig` rejects invalid sizes.
        return image_size
    height, width = (whole // part * part for whole, part in zip(image, patch, strict=True))
    return height if height == width else [height, width]
