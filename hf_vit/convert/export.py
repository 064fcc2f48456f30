"""Export hf_vit models and image processors as checkpoints for other libraries."""

import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers import BaseImageProcessor
from transformers.image_utils import PILImageResampling
from transformers.utils import logging

from ..model.configuration_hf_vit import HfViTConfig, to_pair
from ..model.modeling_hf_vit import HfViTModel
from ..model.pretrained import HfViTPreTrainedModel
from ..model.task_configurations import TASK_CONFIGS
from ..model.task_image_classification import HfViTForImageClassification
from ..outputs import new_folder
from .families import DEIT, DINOV2, DINOV2_WITH_REGISTERS, TIMM, VIT
from .families.timm_vit import ACTIVATIONS, ARGUMENTS, POOLINGS
from .family import LABELS, VIT_FIELDS, Family, given_fields
from .image_processor import SHARED, read_image_processor_file
from .key_map import export_weights, parts, strip_prefix


Weights = Mapping[str, Tensor]
# Field values that an exported model must have, because timm's VisionTransformer has no arguments for other values. A
# norm before the blocks is not supported, because timm then removes the bias of the patch embedding.
REQUIRED_BY_TIMM = {"position_embedding_type": "learned", "use_pre_layernorm": False, "key_bias": True}
REQUIRED_WITH_DISTILLATION = {"num_register_tokens": 0, "prefix_has_position": True, "pooling": "cls"}
TIMM_ARGUMENTS = {name: str(field) for name, field in parts("", "", ARGUMENTS).items()}
TIMM_POOLINGS = {ours: theirs for theirs, ours in POOLINGS.items()}
TIMM_ACTIVATIONS = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
logger = logging.get_logger(__name__)
RESAMPLING = ("position_interpolation", "position_antialias", "position_interpolation_offset")
# Fields that an export may omit without an error. They affect only training or the outputs at other image sizes, or
# they belong to heads that are not exported.
NOT_EXPORTED_FIELDS = {
    *TASK_CONFIGS,
    *RESAMPLING,
    *("drop_path_rate", "hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range"),
    *("apply_layernorm", "reshape_hidden_states", "out_features", "out_indices", "problem_type", "label2id"),
    *("architectures", "auto_map", "dtype", "transformers_version", "_name_or_path"),
}


# Maps each export layout to the checkpoint family that loads files in this layout
LAYOUTS: Mapping[str, Family] = {
    "vit": VIT,
    "deit": DEIT,
    "dinov2": DINOV2,
    "dinov2_with_registers": DINOV2_WITH_REGISTERS,
    "timm": TIMM,
}
# Maps each layout to the base model class and the classifier class in transformers
CLASSES = {
    "vit": ("ViTModel", "ViTForImageClassification"),
    "deit": ("DeiTModel", "DeiTForImageClassificationWithTeacher"),
    "dinov2": ("Dinov2Model", "Dinov2ForImageClassification"),
    "dinov2_with_registers": ("Dinov2WithRegistersModel", "Dinov2WithRegistersForImageClassification"),
}


def transformers_config(layout: str, config: HfViTConfig, is_classifier: bool) -> dict[str, Any]:
    """Return config.json for a transformers layout; raise `ValueError` if the layout does not support the sizes."""
    fields = given_fields(config.to_dict(), (*VIT_FIELDS, *LABELS))
    if layout.startswith("dinov2"):
        fields = dinov2_fields(config, fields)
    if layout == "dinov2_with_registers":
        fields["num_register_tokens"] = config.num_register_tokens
    return {"model_type": layout, "architectures": [CLASSES[layout][is_classifier]], **fields}


def dinov2_fields(config: HfViTConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """Return all fields of a Dinov2Config, given those that it has in common with ViTConfig."""
    for name in ("image_size", "patch_size"):
        height, width = to_pair(vars(config)[name])
        if height != width:
            raise ValueError(
                f"The DINOv2 classes in transformers do not support {name}={vars(config)[name]}, which is not square. "
                f"Export to another layout, or load the model with {name}={width} first, which resamples its weights."
            )
    # The factor 1.5 compensates for Dinov2Config, which reduces the width of a SwiGLU MLP to two thirds.
    factor = 1.5 if config.use_gated_mlp else 1
    fields["mlp_ratio"] = round(factor * fields.pop("intermediate_size") / config.hidden_size)
    return {
        **fields,
        # In Dinov2Config, hidden_act applies only to MLPs that are not gated.
        "hidden_act": "gelu" if config.use_gated_mlp else config.hidden_act,
        "use_swiglu_ffn": config.use_gated_mlp,
        "layerscale_value": config.layerscale_value,
        "drop_path_rate": config.drop_path_rate,
        "use_mask_token": config.use_mask_token,
    }


def timm_config(config: HfViTConfig, is_classifier: bool) -> dict[str, Any]:
    """Return config.json for timm's VisionTransformer class, with all constructor arguments set explicitly."""
    of_distilled = REQUIRED_WITH_DISTILLATION if config.use_distillation_token else {}
    for required, condition in ((REQUIRED_BY_TIMM, ""), (of_distilled, " with use_distillation_token=True")):
        for name, value in required.items():
            if vars(config)[name] != value:
                raise ValueError(f"timm does not support {name}={vars(config)[name]!r}{condition}, only {value!r}.")
    if config.use_distillation_token and not is_classifier:
        raise ValueError(
            "timm does not support use_distillation_token=True without classifiers: it then returns the mean of the "
            "CLS token and the distillation token, not pooler_output. Export an HfViTForImageClassification."
        )
    if config.proj_bias != config.mlp_bias:
        raise ValueError(
            f"timm does not support proj_bias={config.proj_bias} with mlp_bias={config.mlp_bias}: both must be equal."
        )
    pool = TIMM_POOLINGS.get(config.pooling, config.pooling)
    arguments = {name: vars(config)[field] for name, field in TIMM_ARGUMENTS.items()} | {
        "mlp_ratio": config.intermediate_size / config.hidden_size,
        "no_embed_class": config.num_prefix_positions == 0,
        "global_pool": pool,
        "act_layer": TIMM_ACTIVATIONS.get(config.hidden_act),
        "norm_layer": "rmsnorm" if config.norm_type == "rmsnorm" else None,
    }
    names = list((config.id2label or {}).values())
    return {
        "architecture": f"{'deit_base_distilled' if config.use_distillation_token else 'vit_base'}_patch16_224",
        "num_classes": config.num_labels if is_classifier else 0,
        "num_features": config.hidden_size,
        "global_pool": pool,
        "model_args": {name: value for name, value in arguments.items() if value is not None},
        "pretrained_cfg": {"input_size": [config.num_channels, *to_pair(config.image_size)]},
        **({"label_names": names} if is_classifier and names else {}),
    }


def complete_timm(config: HfViTConfig, weights: Weights) -> Weights:
    """Add zero position embeddings for register tokens to the weights if timm requires them.

    They are required if the CLS token has a position embedding.
    """
    first = config.num_prefix_positions
    if first == 0 or config.num_register_tokens == 0:
        return weights
    before, patches = weights["pos_embed"].tensor_split((first,), dim=1)
    of_registers = patches.new_zeros(1, config.num_register_tokens, config.hidden_size)
    return {**weights, "pos_embed": torch.cat((before, of_registers, patches), dim=1)}


def export_image_processor(image_processor: BaseImageProcessor, layout: str) -> dict[str, Any]:
    """Return the options of an image processor in the file format of another library.

    Args:
        image_processor: Image processor of hf_vit.
        layout: "timm" for the `pretrained_cfg` of timm. For other layouts, it is preprocessor_config.json.

    Raises:
        ValueError: If the other library does not support an option.
    """
    options = image_processor.to_dict()
    exported = timm_options(options) if layout == "timm" else transformers_options(options)
    content = {"pretrained_cfg": exported} if layout == "timm" else exported
    back = type(image_processor)(**read_image_processor_file(content)).to_dict()
    ignored = {"crop_rounding", "do_convert_rgb", "image_processor_type", "auto_map"}
    lost = sorted(name for name in options.keys() - ignored if options[name] != back.get(name))
    if lost:
        described = ", ".join(f"{name}={options[name]!r} (read back as {back.get(name)!r})" for name in lost)
        raise ValueError(
            f"The layout {layout!r} does not support these image processor options: {described}. Export the model "
            "without its image processor."
        )
    return exported


def transformers_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return preprocessor_config.json of class `BitImageProcessor` for a center crop, else of `ViTImageProcessor`."""
    kind = "BitImageProcessor" if options.get("do_center_crop") else "ViTImageProcessor"
    shared = {name: options[name] for name in SHARED if options.get(name) is not None}
    return {"image_processor_type": kind, **shared}


def timm_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the `pretrained_cfg` for timm.

    `crop_pct` is the ratio of the center crop size to the size of the resized image.
    """
    size = options["size"]
    crop = options["crop_size"] if options.get("do_center_crop") else size
    edge = crop.get("height", size.get("shortest_edge"))
    larger = size.get("shortest_edge", size.get("height"))
    return {
        "input_size": [options["num_channels"], edge, crop.get("width", edge)],
        "interpolation": PILImageResampling(options["resample"]).name.lower(),
        "crop_pct": edge / larger,
        "crop_mode": "center" if "shortest_edge" in size else "squash",
        "mean": list(options["image_mean"]),
        "std": list(options["image_std"]),
    }


def export_checkpoint(
    model: HfViTPreTrainedModel,
    save_directory: str | os.PathLike[str],
    layout: str,
    image_processor: BaseImageProcessor | None = None,
) -> None:
    """Save a model as a checkpoint that another library loads without hf_vit. Weight values are not changed.

    Args:
        model: `HfViTModel` or `HfViTForImageClassification`. If the layout does not support a mask token, the mask
            token of the model is removed with a warning.
        save_directory: New or empty folder.
        layout: "vit", "deit", "dinov2" or "dinov2_with_registers" for classes in transformers, or "timm".
        image_processor: Image processor to save with the model.

    Raises:
        ValueError: If the layout is unknown, the layout does not support the model or the image processor, or the
            folder is not empty.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"Unknown export layout {layout!r}. Choose one of {', '.join(LAYOUTS)}.")
    if not isinstance(model, HfViTModel | HfViTForImageClassification):
        raise ValueError(f"{type(model).__name__} cannot be exported. Export its backbone, model.base_model, instead.")
    is_classifier = isinstance(model, HfViTForImageClassification)
    own, weights = without_mask_token(model, layout)
    config = timm_config(own, is_classifier) if layout == "timm" else transformers_config(layout, own, is_classifier)
    exported = rename(model, own, weights, layout)
    check_expressible(own, config, exported, layout, is_classifier)
    files = {"config.json": config}
    if image_processor is not None:
        options = export_image_processor(image_processor, layout)
        if layout == "timm":
            config["pretrained_cfg"] = options
        else:
            files["preprocessor_config.json"] = options
    with new_folder(save_directory) as folder:
        save_torch_state_dict(exported, folder)
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def without_mask_token(model: HfViTPreTrainedModel, layout: str) -> tuple[HfViTConfig, dict[str, Tensor]]:
    """Return the configuration and weights of a model. Drop the mask token if the layout does not support it."""
    config: HfViTConfig = model.config
    if layout.startswith("dinov2") or not config.use_mask_token:
        return config, model.state_dict()
    logger.warning(f"The layout {layout!r} has no mask token, so it is dropped. Only bool_masked_pos uses it.")
    weights = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("mask_token")}
    return HfViTConfig.from_dict({**config.to_dict(), "use_mask_token": False}), weights


def rename(
    model: HfViTPreTrainedModel, config: HfViTConfig, weights: Mapping[str, Tensor], layout: str
) -> dict[str, Tensor]:
    """Rename weights to the tensor names of a layout; raise `ValueError` if the layout does not support a tensor."""
    family = LAYOUTS[layout]
    keys = {**family.keys, **({"norm": "fc_norm"} if config.norm_after_pooling and layout == "timm" else {})}
    inner = "" if model.base_model is model else f"{model.base_model_prefix}."
    body = {name.removeprefix(inner): tensor for name, tensor in weights.items() if name.startswith(inner)}
    heads = {name: tensor for name, tensor in weights.items() if not name.startswith(inner)}
    try:
        exported, exported_heads = export_weights(body, keys), export_weights(heads, keys)
    except ValueError as error:
        raise ValueError(f"The layout {layout!r} does not support {type(model).__name__}: {error}") from error
    prefix = "".join(family.prefixes) if heads else ""  # With a classifier, base model tensors have a prefix.
    completed = complete_timm(config, exported) if layout == "timm" else exported
    named = {prefix + name: tensor for name, tensor in completed.items()}
    return {**named, **exported_heads}


def check_expressible(
    config: HfViTConfig, exported: Mapping[str, Any], weights: Mapping[str, Tensor], layout: str, is_classifier: bool
) -> None:
    """Raise `ValueError` if the exported configuration does not convert back to the original one.

    Log a warning if only the resampling of position embeddings differs.
    """
    family = LAYOUTS[layout]
    shapes = {strip_prefix(name, family.prefixes): tuple(tensor.shape) for name, tensor in weights.items()}
    read = HfViTConfig(**family.configure(exported, shapes))
    own, back = comparable(config), comparable(read)
    changed = {name for name in own.keys() | back.keys() if own.get(name) != back.get(name)}
    if not is_classifier:
        changed.discard("id2label")
    if lost := sorted(changed - NOT_EXPORTED_FIELDS):
        ours, theirs = config.to_dict(), read.to_dict()
        described = ", ".join(f"{name}={ours.get(name)!r} (read back as {theirs.get(name)!r})" for name in lost)
        raise ValueError(f"The layout {layout!r} does not support {described}.")
    if resampled := sorted(name for name in changed if name in RESAMPLING):
        logger.warning(
            f"At image sizes other than {config.image_size}, the exported model has different outputs: it resamples "
            f"position embeddings differently ({', '.join(f'{name}={back[name]}' for name in resampled)})."
        )


def comparable(config: HfViTConfig) -> dict[str, Any]:
    """Return normalized fields of a configuration. Equivalent configurations have equal normalized fields."""
    return {
        **config.to_dict(),
        "image_size": to_pair(config.image_size),
        "patch_size": to_pair(config.patch_size),
        # The initial value of LayerScale has no effect on a trained model, so only its presence is compared.
        "layerscale_value": config.layerscale_value is not None,
        "prefix_has_position": config.num_prefix_positions > 0,
    }
