"""What is known about a family of published checkpoints."""

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
# Fields of the same name and meaning in the configurations of all plain ViTs of transformers and in ours
VIT_FIELDS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act", "qkv_bias"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range", "layer_norm_eps"),
    *("image_size", "patch_size", "num_channels"),
)
# Those, and fields shared with the configurations of some of them
ARCHITECTURE = (
    *VIT_FIELDS,
    *("key_bias", "proj_bias", "mlp_bias", "use_gated_mlp", "layerscale_value", "drop_path_rate"),
    *("num_register_tokens", "rope_theta"),
    *("apply_layernorm", "reshape_hidden_states", "out_features", "out_indices"),
)


def is_classifier(shapes: Shapes) -> bool:
    """Returns whether a model of transformers classifies."""
    return "classifier.weight" in shapes


def shape_of(shapes: Shapes, name: str) -> tuple[int, ...]:
    """Returns the shape of their tensor `name`; `ValueError` if there is none."""
    if name not in shapes:
        raise ValueError(f"The weights hold no {name!r}. The file is of another model, or incomplete.")
    return shapes[name]


@dataclass(frozen=True)
class Family:
    """A published layout: whose checkpoints it covers, how configuration and weights become ours.

    Args:
        name: Name of the family, as in the README.
        model_types: `model_type` in the config.json of transformers; empty for other formats.
        files: Files or library that checkpoints come from, as in the README, if it is not transformers.
        marks: For files that come without config.json: names of tensors that all of them hold.
        keys: Our tensors to theirs.
        adapt: What a checkpoint changes in `keys`, by its configuration, ours, and the shapes of its tensors.
        configure: Makes the fields of `HfViTConfig` from their configuration (or, without one, from the fields that
            the user gave) and the shapes of their tensors, whose names have their prefix taken off.
        prefixes: What may stand before all of their names.
        dropped: Regular expressions of their tensors that are left out on purpose, and why.
        refuse_texts: Says what keeps the text tower in a checkpoint from being opened, by the configuration and the
            shapes of the tensors; empty where there is none, or nothing does.
        reads: Narrows `model_types` down, by the configuration; without them it tells the format.
        fixed: Fields of their configuration that we have for one value only, and that value.
        has_experts: Whether a checkpoint may have several experts, of which `dataset_index` chooses one.
        images: For files that come without options of an image processor: whose they are like, in `ORIGINALS`.
        is_sized_by_images: Whether `configure` needs the options of the image processor too, which are in their
            configuration as `image_processor`, empty if there are none.
        outputs: What is equal to the source, as in the README.
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
    refuse_texts: Callable[[Config, Shapes], str] = lambda config, shapes: ""
    reads: Callable[[Config], bool] = lambda config: True
    fixed: Mapping[str, Any] = field(default_factory=dict)
    has_experts: bool = False
    images: str = ""
    is_sized_by_images: bool = False
    outputs: str = ""

    @property
    def source(self) -> str:
        """The library or the files that checkpoints come from, as in the README."""
        return self.files or f"transformers {', '.join(f'`{model_type}`' for model_type in self.model_types)}"


# The types of our own fields
TYPES: Any = TypedDict("TYPES", {own.name: own.type for own in fields_of(HfViTConfig)}, total=False)  # type: ignore[misc]


def transformers_fields(config: Config, shapes: Shapes, **defaults: Any) -> dict[str, Any]:
    """Return the fields of `HfViTConfig` that a config.json of transformers and the tensors of the checkpoint give.

    Args:
        config: Content of config.json.
        shapes: Shapes of the tensors, which tell whether there are a mask token and a pooler.
        **defaults: Fields that config.json leaves out: defaults of the source class and constants of the family.

    Raises:
        StrictDataclassError: If a field has another type than ours, before anything is computed with it.
        ValueError: If the pooler is not one of ours.
    """
    return {
        **architecture_fields(config, **defaults),
        **label_fields(config),
        "use_mask_token": "embeddings.mask_token" in shapes,
        "use_pooler": has_pooler(config, shapes),
    }


def architecture_fields(config: Config, **defaults: Any) -> dict[str, Any]:
    """Return the fields that the configuration of an encoder gives, without labels; see `transformers_fields`."""
    fields = given_fields(config, ARCHITECTURE, **defaults)
    validate_typed_dict(TYPES, {name: value for name, value in fields.items() if name in TYPES.__annotations__})
    if config.get("attention_dropout") is not None:
        fields["attention_probs_dropout_prob"] = config["attention_dropout"]
    fields["image_size"] = whole_patches(fields.get("image_size", 224), fields.get("patch_size", 16))
    if fields.get("out_features") == [f"stage{fields.get('num_hidden_layers', 12)}"]:
        # The last stage is the default, which follows where a user takes fewer blocks.
        del fields["out_features"], fields["out_indices"]
    return fields


def has_pooler(config: Config, shapes: Shapes) -> bool:
    """Return whether there is a pooler; raise `ValueError` if it is none of ours."""
    activation = config.get("pooler_act", "tanh")
    width, pooled = config.get("hidden_size"), config.get("pooler_output_size")
    if "pooler.dense.weight" in shapes and (activation != "tanh" or pooled not in (None, width)):
        raise ValueError(
            f"The pooler has pooler_act={activation!r} and pooler_output_size={pooled}, but only 'tanh' and "
            f"hidden_size={width} are known here. Save the model without it (add_pooling_layer=False)."
        )
    return "pooler.dense.weight" in shapes


def given_fields(config: Config, names: Iterable[str], **defaults: Any) -> dict[str, Any]:
    """Returns the fields `names` that a configuration has, over defaults."""
    return {**defaults, **{name: config[name] for name in names if config.get(name) is not None}}


def check_backbone(backbone_config: Config, family: str, model_type: str) -> None:
    """Raises `ValueError` if the backbone of a model, whose configuration may leave out its type, is another one."""
    if (found := backbone_config.get("model_type", model_type)) != model_type:
        raise ValueError(f"The backbone_config has model_type={found!r}; of {family} only {model_type!r} is known.")


def label_fields(config: Config) -> dict[str, Any]:
    """Returns what a config.json of transformers says about labels: their names, or at least their number."""
    fields = given_fields(config, LABELS)
    if "id2label" in fields:
        fields["id2label"] = {int(index): label for index, label in fields["id2label"].items()}
    elif config.get("num_labels") is not None:
        fields["num_labels"] = config["num_labels"]
    return fields


def whole_patches(image_size: Size, patch_size: Size) -> Size:
    """Returns an image size in whole patches: the source's convolution cuts off what is left over them."""
    image, patch = ([size] * 2 if isinstance(size, int) else list(size) for size in (image_size, patch_size))
    if len(image) != 2 or len(patch) != 2 or min(patch) < 1:  # which `HfViTConfig` refuses by name
        return image_size
    height, width = (whole // part * part for whole, part in zip(image, patch, strict=True))
    return height if height == width else [height, width]
