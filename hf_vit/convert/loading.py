"""Convert published checkpoints to hf_vit models."""

import os
import resource
import sys
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers.initialization import no_init_weights
from transformers.utils import logging

from ..model.configuration_hf_vit import PROPERTIES, HfViTConfig
from ..model.modeling_hf_vit import HfViTModel
from ..model.pretrained import HfViTPreTrainedModel
from ..model.remote_code import class_path, list_tasks
from ..model.task_configurations import TASK_CONFIGS, HfViTTextConfig
from .families import FAMILIES
from .families.torch_encoder import common_names
from .family import Config, Family, Shapes
from .key_map import KeyMap, convert_weights, find_rule, names_of, strip_prefix
from .source import HUB_ARGUMENTS, Source, open_source, read_image_processor


def find_class(path: str) -> Any:
    """Returns a class of hf_vit, given its path in `AUTO_MAP`, such as "modeling_hf_vit.HfViTModel"."""
    module, name = path.split(".")
    return vars(import_module(f"..model.{module}", __package__))[name]


logger = logging.get_logger(__name__)
TASKS = {"features": HfViTModel} | {task: find_class(class_path(task)) for task in list_tasks()}
# Text tower options that determine the shapes of the weights. If one is changed, the weights cannot be loaded. The
# number of blocks is not included, because it can be reduced.
TEXT_SHAPE = (
    *("encoder_config", "vocab_size", "hidden_size", "num_attention_heads", "intermediate_size"),
    "max_position_embeddings",
)
# Maps head tensors in hf_vit to tasks. A checkpoint with one of these tensors is a model for the corresponding task.
HEADS = {
    "classifier.weight": "image-classification",
    "universal_segmentation_head.queries.weight": "universal-segmentation",
    "detection_head.queries.weight": "object-detection",
    "detection_head.query_features.weight": "object-detection",
    "depth_head.dpt.predictor.weight": "depth-estimation",
    "keypoint_head.simple.predictor.weight": "keypoint-detection",  # also in "classic" ViTPose heads
    "masked_image_modeling_head.mae.predictor.weight": "masked-image-modeling",
    "masked_image_modeling_head.simmim.predictor.weight": "masked-image-modeling",
    "contrastive_head.text_projection.weight": "zero-shot-image-classification",
}


@dataclass(frozen=True)
class Converted:
    """A published checkpoint, converted to hf_vit.

    Args:
        name: Folder, file, or name on the Hub.
        family: Family of the checkpoint.
        config: Configuration of the converted model.
        model_class: hf_vit class with the same head as the source.
        weights: All tensors of the converted model by name.
    """

    name: str
    family: Family
    config: HfViTConfig
    model_class: type[HfViTPreTrainedModel]
    weights: dict[str, Tensor]


def convert_pretrained(
    name_or_path: str | os.PathLike[str],
    geometry: dict[str, Any],
    model_class: type[HfViTPreTrainedModel] = HfViTModel,
    **kwargs: Any,
) -> dict[str, Any]:
    """Converts a published checkpoint of another library. `from_pretrained` of hf_vit models calls this function.

    Args:
        name_or_path: Folder, file of weights, or name on the Hub.
        geometry: Fields of `HfViTConfig` that the caller changes after loading (`image_size`, …). They may be required
            to convert a weight file without configuration.
        model_class: Class of the model that will be loaded.
        **kwargs: Further keyword arguments of `from_pretrained`. Fields of `HfViTConfig` (`num_attention_heads`, …)
            override those of the checkpoint, or give those that cannot be inferred from a weight file.
            `architecture` is the model name in timm ("vit_base_patch16_siglip_224", …) for files of timm and DeiT III.
            `norm_first` is the argument of `nn.TransformerEncoderLayer`. `dataset_index` is the index of the ViTPose+
            expert, 0 by default. `revision`, `token` and similar arguments locate the checkpoint on the Hub.

    Returns:
        Arguments of `from_pretrained` in transformers: `config`, `state_dict`, and the arguments in `kwargs` that were
        not used for the conversion (`dtype`, `device_map`, …).

    Raises:
        ValueError: if the checkpoint belongs to no supported family, its tensors do not match its configuration, or
            the model needs a text tower and the text tower of the checkpoint is not supported.
        OSError: if there is no such checkpoint, or a file is damaged.
    """
    if "config" in kwargs:
        raise ValueError(
            f"{str(name_or_path)!r} has its own configuration. Remove config= and pass individual fields instead."
        )
    hub = {name: kwargs.pop(name) for name in HUB_ARGUMENTS if name in kwargs}
    known = {field.name for field in fields(HfViTConfig)} | {*PROPERTIES}
    known -= {"dtype"}  # `dtype` is an argument of `from_pretrained` here, not a field.
    overrides = {name: kwargs.pop(name) for name in known & kwargs.keys()}
    source = open_source(name_or_path, kwargs.pop("architecture", None), kwargs.pop("dataset_index", None), **hub)
    converted = convert_checkpoint(source, **overrides, **geometry, norm_first=kwargs.pop("norm_first", None))
    config, weights = override(converted.config, overrides), converted.weights
    if issubclass(model_class, TASKS["zero-shot-image-classification"]):
        if "text_config" in overrides:
            weights = drop_incompatible_text_tower(converted, config)
        else:
            check_text_tower(source, converted)
    return {"config": config, "state_dict": weights, **kwargs}


def check_text_tower(source: Source, converted: Converted) -> None:
    """Raises `ValueError` if the text tower of a checkpoint is not supported and would be initialized randomly."""
    reason = converted.family.unsupported_text_reason(source.config, shapes_of(source, converted.family))
    if reason:
        raise ValueError(
            f"The text tower of {source.name!r} is not supported and would have random weights: {reason}. Load only "
            "the image tower (HfViTModel), choose another text tower (text_config=), or use the original library."
        )


def drop_incompatible_text_tower(converted: Converted, config: HfViTConfig) -> dict[str, Tensor]:
    """Returns the weights. Text tower and contrastive head are left out if `config` has a different text tower."""
    before, after = (HfViTTextConfig.of(part.text_config) for part in (converted.config, config))
    other = [name for name in TEXT_SHAPE if vars(before)[name] != vars(after)[name]]
    left_out = [name for name in converted.weights if name.startswith(("text_model.", "contrastive_head."))]
    if not other or not left_out:
        return converted.weights
    logger.warning(
        f"The text tower of {converted.name!r} differs from text_config in {', '.join(other)}. Text tower and "
        "contrastive head are not loaded and have random weights."
    )
    return {name: tensor for name, tensor in converted.weights.items() if name not in left_out}


def override(config: HfViTConfig, overrides: dict[str, Any]) -> HfViTConfig:
    """Returns `config` with the fields in `overrides` replaced. Dictionaries of task options are merged.

    `id2label` and `label2id` have the same meaning, as do `out_features` and `out_indices`. If one of two such fields
    is overridden, the old values of both are discarded.
    """
    replaced: set[str] = set()
    if "id2label" in overrides or overrides.get("num_labels", config.num_labels) != config.num_labels:
        replaced |= {"id2label", "label2id"}
    if not overrides.keys().isdisjoint({"out_features", "out_indices"}):
        replaced |= {"out_features", "out_indices"}
    kept = {name: value for name, value in config.to_dict().items() if name not in replaced}
    options = {
        name: TASK_CONFIGS[name].merge(kept.get(name, {}), overrides[name])
        for name in TASK_CONFIGS.keys() & overrides.keys()
        if isinstance(overrides[name], dict)
    }
    return HfViTConfig.from_dict({**kept, **overrides, **options})


def convert_checkpoint(source: Source, **given: Any) -> Converted:
    """Converts a published checkpoint to an hf_vit model of the same architecture.

    Args:
        source: The checkpoint.
        **given: Fields of `HfViTConfig` that cannot be inferred if the checkpoint has no transformers config.json.
            `num_hidden_layers` is the minimum number of blocks that the weights must contain.

    Raises:
        ValueError: if the checkpoint belongs to no supported family, or its tensors do not match its configuration.
    """
    family, config = describe(source, **given)
    shapes = shapes_of(source, family)
    keys = {**family.keys, **family.adapt(known_config(source, family, given), config, shapes)}
    model_class = class_by_weights(keys, shapes)
    with torch.device("meta"), no_init_weights():  # Only tensor names and shapes are needed, no values.
        model = model_class(config)
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    state = model.state_dict()
    expected = {name.removeprefix(prefix): tuple(tensor.shape) for name, tensor in state.items()}
    weights = convert_weights(source.weights, keys, expected, prefixes=family.prefixes, dropped=family.dropped)
    source.weights.release()
    named = {name: weights[name.removeprefix(prefix)] for name in state}
    return Converted(source.name, family, config, model_class, named)


def describe(source: Source, **given: Any) -> tuple[Family, HfViTConfig]:
    """Returns the family of a checkpoint and its `HfViTConfig`; see `convert_checkpoint`."""
    family = find_family(source)
    for name, value in family.fixed.items():
        if source.config.get(name, value) != value:
            raise ValueError(
                f"{source.name!r} has {name}={source.config[name]!r} in its configuration, but {family.name} supports "
                f"only {name}={value!r}. Use transformers for this checkpoint."
            )
    if "dataset_index" in source.config and not family.has_experts:
        raise ValueError(f"{source.name!r} is a {family.name} model, which has no experts. Remove dataset_index.")
    try:
        config = HfViTConfig(**family.configure(known_config(source, family, given), shapes_of(source, family)))
    except StrictDataclassError as error:
        raise ValueError(f"The configuration of {source.name!r} is invalid: {error}") from error
    if not family.model_types and given.get("num_hidden_layers", 0) > config.num_hidden_layers:
        raise ValueError(
            f"{source.name!r} has {config.num_hidden_layers} blocks, fewer than num_hidden_layers="
            f"{given['num_hidden_layers']}. The file is incomplete or belongs to another model."
        )
    return family, config


def known_config(source: Source, family: Family, given: Config) -> Config:
    """Returns the source configuration. Unless it is a transformers config.json, adds the fields in `given`.

    If `family.is_sized_by_images` is set, the image processor options are added under the key `image_processor`.
    """
    if family.is_sized_by_images:
        return {**source.config, "image_processor": read_image_processor(source)}
    return source.config if family.model_types else {**given, **source.config}


def shapes_of(source: Source, family: Family) -> Shapes:
    """Returns the shapes of the source tensors by name, without the prefixes of `family`."""
    return {strip_prefix(name, family.prefixes): shape for name, shape in source.weights.shapes.items()}


def class_by_weights(keys: KeyMap, shapes: Shapes) -> type[HfViTPreTrainedModel]:
    """Returns the model class that matches the head tensors in the weights, or `HfViTModel` if there is no head."""
    for name, task in HEADS.items():
        rule = find_rule(keys, name)
        if rule is not None and set(names_of(rule)) <= shapes.keys():
            return TASKS[task]
    return HfViTModel


def find_family(source: Source) -> Family:
    """Finds the family of a checkpoint by its configuration, or by its tensor names if it has no configuration.

    Renames the tensors in `source` if they belong to a ViT built on `nn.TransformerEncoder`.
    """
    if not source.config and (names := common_names(source.weights.shapes)):
        source.weights.rename(names)
    if source.config and (configured := find_family_by_config(source.config)) is not None:
        return configured
    for family in FAMILIES:
        if not source.config and family.marks and set(family.marks) <= shapes_of(source, family).keys():
            return family
    if not source.config:
        known = [f"{family.name} ({', '.join(family.marks)})" for family in FAMILIES if family.marks]
        raise ValueError(
            f"{source.name!r} has no config.json, and its tensor names match no supported family: "
            f"{', '.join(list(source.weights.shapes)[:6])}, … Supported families and names: {'; '.join(known)}. For a "
            'file of timm, give the name of its architecture, for example architecture="vit_base_patch16_224".'
        )
    if source.config.get("model_type") == HfViTConfig.model_type:
        raise ValueError(f"{source.name!r} is a file of a checkpoint saved by hf_vit. Give its folder instead.")
    known = sorted({model_type for family in FAMILIES for model_type in family.model_types})
    raise ValueError(
        f"{source.name!r} has model type {source.config.get('model_type')!r} "
        f"({', '.join(source.config.get('architectures') or [])}), which is not supported. "
        f"Supported model types are {', '.join(known)}."
    )


def find_family_by_config(config: Config) -> Family | None:
    """Returns the family of a configuration, or None if no family supports it."""
    for family in FAMILIES:
        is_of_type = not family.model_types or config.get("model_type") in family.model_types
        if not family.marks and is_of_type and family.reads(config):
            return family
    return None


def peak_memory() -> int:
    """Returns the peak memory of this process in MiB.

    On Linux, the peak is read from /proc, because `getrusage` also includes memory that the parent process used when
    it forked.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) // 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (2**20 if sys.platform == "darwin" else 2**10)
