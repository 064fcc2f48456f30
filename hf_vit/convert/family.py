"""Description of a family of published checkpoints, and helpers that translate configurations."""

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
# Fields of `HfViTConfig` that all plain ViT configurations of transformers have, with the same name and meaning
VIT_FIELDS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act", "qkv_bias"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range", "layer_norm_eps"),
    *("image_size", "patch_size", "num_channels"),
)
# `VIT_FIELDS` plus fields that only some ViT configurations of transformers have, also with the same name and meaning
ARCHITECTURE = (
    *VIT_FIELDS,
    *("key_bias", "proj_bias", "mlp_bias", "use_gated_mlp", "layerscale_value", "drop_path_rate"),
    *("num_register_tokens", "rope_theta"),
    *("apply_layernorm", "reshape_hidden_states", "out_features", "out_indices"),
)


def is_classifier(shapes: Shapes) -> bool:
    """Return whether a checkpoint of transformers has a classifier, given the shapes of its tensors by name."""
    return "classifier.weight" in shapes


def shape_of(shapes: Shapes, name: str) -> tuple[int, ...]:
    """Return the shape of the source tensor `name`; raise `ValueError` if it is missing."""
    if name not in shapes:
        raise ValueError(f"The weights have no tensor {name!r}. The file is incomplete or belongs to another model.")
    return shapes[name]


@dataclass(frozen=True)
class Family:
    """A family of published checkpoints, with the rules that convert their configuration and weights.

    "Source" means the published checkpoint.

    Args:
        name: Name of the family, as in the README.
        keys: Maps tensor names of hf_vit to those of the source.
        configure: Function that returns the fields of `HfViTConfig`, given the source configuration and the shapes of
            the source tensors (names without prefix). If there is no source configuration, the fields given by the
            user take its place.
        model_types: Values of `model_type` in config.json of transformers; empty for other formats.
        files: File format or library of the checkpoints, as in the README; empty for transformers.
        marks: Tensor names that identify a file of this family without config.json.
        adapt: Function that returns changes of `keys` for one checkpoint, given the source configuration, the
            converted configuration, and the shapes of the source tensors.
        prefixes: Optional prefixes of source tensor names; they are removed before the names are matched.
        dropped: Regular expressions of source tensors that are ignored on purpose, with the reason.
        unsupported_text_reason: Function that returns the reason why the text tower of a checkpoint is not supported,
            given the source configuration and the tensor shapes; empty if it is supported or there is none.
        reads: Function that returns whether a configuration belongs to this family, in addition to `model_types`.
        fixed: Fields of the source configuration for which only one value is supported, mapped to that value.
        has_experts: Whether a checkpoint may have several experts, of which `dataset_index` selects one.
        images: Key of the image processor options in `ORIGINALS` for files that do not contain any.
        is_sized_by_images: Whether `configure` also needs the image processor options. They are passed as
            `image_processor` in the configuration; empty if the checkpoint has none.
        outputs: Outputs that are equal to those of the source, as in the README.
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
        """The library or files that the checkpoints come from, as in the README."""
        return self.files or f"transformers {', '.join(f'`{model_type}`' for model_type in self.model_types)}"


# Types of the fields of `HfViTConfig`
TYPES: Any = TypedDict("TYPES", {own.name: own.type for own in fields_of(HfViTConfig)}, total=False)  # type: ignore[misc]


def transformers_fields(config: Config, shapes: Shapes, **defaults: Any) -> dict[str, Any]:
    """Return the fields of `HfViTConfig` for a checkpoint of transformers.

    Args:
        config: Content of config.json.
        shapes: Shapes of the tensors by name; used to detect a mask token and a pooler.
        **defaults: Values of fields that config.json omits: defaults of the source class and constants of the family.

    Raises:
        StrictDataclassError: If a field has another type than in `HfViTConfig`.
        ValueError: If the pooler is not supported.
    """
    return {
        **architecture_fields(config, **defaults),
        **label_fields(config),
        "use_mask_token": "embeddings.mask_token" in shapes,
        "use_pooler": has_pooler(config, shapes),
    }


def architecture_fields(config: Config, **defaults: Any) -> dict[str, Any]:
    """Return the fields of `HfViTConfig` that describe the encoder, without labels; see `transformers_fields`."""
    fields = given_fields(config, ARCHITECTURE, **defaults)
    validate_typed_dict(TYPES, {name: value for name, value in fields.items() if name in TYPES.__annotations__})
    if config.get("attention_dropout") is not None:
        fields["attention_probs_dropout_prob"] = config["attention_dropout"]
    fields["image_size"] = round_to_patches(fields.get("image_size", 224), fields.get("patch_size", 16))
    if fields.get("out_features") == [f"stage{fields.get('num_hidden_layers', 12)}"]:
        # The last block is the default. The explicit value would not follow a later change of num_hidden_layers.
        del fields["out_features"], fields["out_indices"]
    return fields


def has_pooler(config: Config, shapes: Shapes) -> bool:
    """Return whether the checkpoint has a pooler; raise `ValueError` if it is not supported."""
    activation = config.get("pooler_act", "tanh")
    width, pooled = config.get("hidden_size"), config.get("pooler_output_size")
    if "pooler.dense.weight" in shapes and (activation != "tanh" or pooled not in (None, width)):
        raise ValueError(
            f"The pooler has pooler_act={activation!r} and pooler_output_size={pooled}, but only 'tanh' and "
            f"hidden_size={width} are supported. Save the model without a pooler (add_pooling_layer=False)."
        )
    return "pooler.dense.weight" in shapes


def given_fields(config: Config, names: Iterable[str], **defaults: Any) -> dict[str, Any]:
    """Return `defaults`, updated with those fields in `names` that the configuration sets to a value except None."""
    return {**defaults, **{name: config[name] for name in names if config.get(name) is not None}}


def check_backbone(backbone_config: Config, family: str, model_type: str) -> None:
    """Raise `ValueError` if the backbone configuration has a `model_type` other than the supported one."""
    if (found := backbone_config.get("model_type", model_type)) != model_type:
        raise ValueError(
            f"The backbone_config has model_type={found!r}, but {family} is supported with {model_type!r} only."
        )


def label_fields(config: Config) -> dict[str, Any]:
    """Return the label names in a config.json of transformers or, if there are none, the number of labels."""
    fields = given_fields(config, LABELS)
    if "id2label" in fields:
        fields["id2label"] = {int(index): label for index, label in fields["id2label"].items()}
    elif config.get("num_labels") is not None:
        fields["num_labels"] = config["num_labels"]
    return fields


def round_to_patches(image_size: Size, patch_size: Size) -> Size:
    """Return an image size rounded down to whole patches. The source's patch embedding ignores the other pixels."""
    image, patch = ([size] * 2 if isinstance(size, int) else list(size) for size in (image_size, patch_size))
    if len(image) != 2 or len(patch) != 2 or min(patch) < 1:  # `HfViTConfig` reports invalid sizes.
        return image_size
    height, width = (whole // part * part for whole, part in zip(image, patch, strict=True))
    return height if height == width else [height, width]
