"""What is known about a family of published checkpoints."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..configuration_hf_vit import HfViTConfig
from ..modeling_hf_vit import HfViTForImageClassification, HfViTModel, HfViTPreTrainedModel
from .key_map import KeyMap


Config = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]
LABELS = ("id2label", "label2id", "problem_type")


def model_or_classifier(config: Config) -> type[HfViTPreTrainedModel]:
    """Returns our class of the same architecture, by the class name that transformers wrote into the configuration."""
    names = config.get("architectures") or [""]
    is_classifier = "ForImageClassification" in names[0]
    return HfViTForImageClassification if is_classifier else HfViTModel


@dataclass(frozen=True)
class Family:
    """A published layout: whose checkpoints it covers, how configuration and weights become ours.

    Args:
        name: Name of the family, as in the README.
        source: Library or files it comes from, as in the README.
        model_types: `model_type` in the config.json of transformers; empty for other formats.
        marks: For files that come without config.json: names of tensors that all of them hold.
        keys: Our tensors to theirs.
        adapt: What the checkpoint at hand changes in `keys`, by its configuration, ours, and the shapes of its tensors.
        configure: Makes the fields of `HfViTConfig` from their configuration (or, without one, from the fields that the
            user gave) and the shapes of their tensors, whose names have their prefix taken off.
        model_class: Our class of the same architecture; None: the classifier if the weights hold one.
        prefixes: What may stand before all of their names.
        dropped: Regular expressions of their tensors that are left out on purpose, and why.
        reads: Narrows `model_types` down, by the configuration; without them it tells the format.
        outputs: What is equal to the source, as in the README.
    """

    name: str
    source: str
    keys: KeyMap
    configure: Callable[[Config, Shapes], dict[str, Any]]
    model_types: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    adapt: Callable[[Config, HfViTConfig, Shapes], KeyMap] = lambda config, ours, shapes: {}
    model_class: Callable[[Config], type[HfViTPreTrainedModel]] | None = model_or_classifier
    prefixes: tuple[str, ...] = ()
    dropped: Mapping[str, str] = field(default_factory=dict)
    reads: Callable[[Config], bool] = lambda config: True
    outputs: str = ""


def transformers_fields(config: Config, **defaults: Any) -> dict[str, Any]:
    """Returns the fields that `HfViTConfig` shares with the configurations of transformers, names and all.

    Args:
        config: Their config.json.
        **defaults: What their class assumes for fields that the file leaves out, where it differs from ours.
    """
    shared = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "hidden_act",
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
        "drop_path_rate",
        "initializer_range",
        "layer_norm_eps",
        "image_size",
        "patch_size",
        "num_channels",
        "qkv_bias",
        *LABELS,
    )
    fields = {**defaults, **{name: config[name] for name in shared if config.get(name) is not None}}
    if "id2label" in fields:
        fields["id2label"] = {int(index): label for index, label in fields["id2label"].items()}
    return fields
