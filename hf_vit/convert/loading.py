"""Published checkpoints as our models."""

import os
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from ..configuration_hf_vit import HfViTConfig
from ..modeling_hf_vit import HfViTPreTrainedModel
from .families import FAMILIES
from .family import Config, Family, check_fixed
from .key_map import convert_weights, strip_prefix
from .source import HUB_ARGUMENTS, Source, open_source


Model = TypeVar("Model", bound=HfViTPreTrainedModel)


@dataclass(frozen=True)
class Converted:
    """A published checkpoint in our terms.

    Args:
        name: Folder, file, or name on the Hub.
        family: What it is.
        config: Its configuration; the architecture is that of the source.
        model_class: Our class of the same architecture.
        weights: All tensors of that class, by name.
    """

    name: str
    family: Family
    config: HfViTConfig
    model_class: type[HfViTPreTrainedModel]
    weights: dict[str, Tensor]


def load_pretrained(model_class: type[Model], name_or_path: str | os.PathLike[str], **kwargs: Any) -> Model:
    """Opens a published checkpoint of another library as one of our models; `from_pretrained` calls it.

    Args:
        model_class: Our class, of any task. What it has beyond the checkpoint starts fresh and is reported.
        name_or_path: Folder, file of weights, or name on the Hub.
        **kwargs: Fields of `HfViTConfig` that differ from the checkpoint, where the files are on the Hub (`revision`,
            `token`, …), and what `from_pretrained` takes beside (`dtype`, `device_map`, …).

    Raises:
        ValueError: if the checkpoint is of no family that is known, or its tensors do not fit its configuration.
        OSError: if there is no such checkpoint, or a file is damaged.
    """
    if "config" in kwargs:
        raise ValueError(
            f"{str(name_or_path)!r} brings its own configuration. Leave out config= and give the fields that differ "
            "as arguments, such as image_size=384."
        )
    hub = {name: kwargs.pop(name) for name in HUB_ARGUMENTS if name in kwargs}
    converted = convert_checkpoint(open_source(name_or_path, **hub))
    known = {field.name for field in fields(HfViTConfig)} | {"num_labels", "out_features", "out_indices"}
    overrides = {name: kwargs.pop(name) for name in known & kwargs.keys()}
    config = HfViTConfig.from_dict({**converted.config.to_dict(), **overrides})
    return model_class.from_pretrained(None, config=config, state_dict=converted.weights, **kwargs)


def convert_checkpoint(source: Source) -> Converted:
    """Carries a published checkpoint over, its architecture unchanged.

    Raises:
        ValueError: if it is of no family that is known, or its tensors do not fit its configuration.
    """
    family = find_family(source.config, source.name)
    check_fixed(family, source.config, source.name)
    shapes = {strip_prefix(name, family.prefixes): shape for name, shape in source.weights.shapes.items()}
    try:
        config = HfViTConfig(**family.configure(source.config, shapes))
    except StrictDataclassError as error:
        raise ValueError(f"The configuration of {source.name!r} does not fit: {error}") from error
    model_class = family.model_class(source.config)
    with torch.device("meta"):
        model = model_class(config)
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    state = model.state_dict()
    expected = {name.removeprefix(prefix): tuple(tensor.shape) for name, tensor in state.items()}
    weights = convert_weights(source.weights, family.keys, expected, prefixes=family.prefixes, dropped=family.dropped)
    named = {name: weights[name.removeprefix(prefix)] for name in state}
    return Converted(source.name, family, config, model_class, named)


def find_family(config: Config, name: str) -> Family:
    """Returns the family that a configuration belongs to.

    Raises:
        ValueError: if none of ours reads it.
    """
    for family in FAMILIES:
        if config.get("model_type") in family.model_types and family.reads(config):
            return family
    known = sorted({model_type for family in FAMILIES for model_type in family.model_types})
    raise ValueError(
        f"{name!r} has model type {config.get('model_type')!r} ({', '.join(config.get('architectures') or [])}), "
        f"which is no plain ViT that is known here. Known are: {', '.join(known)}."
    )
