"""Our models as checkpoints of other libraries."""

import json
import os
from collections.abc import Mapping
from typing import Any

from huggingface_hub import save_torch_state_dict

from ..configuration_hf_vit import HfViTConfig
from ..modeling_hf_vit import HfViTForImageClassification, HfViTModel, HfViTPreTrainedModel
from .families import EXPORTS
from .family import Family
from .key_map import export_weights
from .new_folder import new_folder


# Fields that change nothing in the outputs at the native size, or only in training, and that no other format holds.
NOT_CARRIED = {
    "drop_path_rate",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "initializer_range",
    "position_interpolation",
    "position_antialias",
    "apply_layernorm",
    "reshape_hidden_states",
    "out_features",
    "out_indices",
    "label2id",
    "problem_type",
}


def export_checkpoint(model: HfViTPreTrainedModel, save_directory: str | os.PathLike[str], layout: str) -> None:
    """Saves a model in the layout of another library, which opens it without us; the weights stay bit by bit.

    Args:
        model: `HfViTModel` or `HfViTForImageClassification`.
        save_directory: New or empty folder.
        layout: "vit", "deit" or "dinov2" of transformers, or "timm".

    Raises:
        ValueError: if there is no such layout, if it cannot express the model, or the folder holds something.
    """
    if layout not in EXPORTS:
        raise ValueError(f"There is no layout {layout!r} to export to. Choose one of {', '.join(EXPORTS)}.")
    if not isinstance(model, HfViTModel | HfViTForImageClassification):
        raise ValueError(
            f"{type(model).__name__} has no counterpart in other libraries. Export its backbone: model.base_model."
        )
    family = EXPORTS[layout]
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    state = model.state_dict()
    try:
        exported = export_weights({name.removeprefix(prefix): tensor for name, tensor in state.items()}, family.keys)
    except ValueError as error:
        raise ValueError(f"{type(model).__name__} does not fit the layout {layout!r}. {error}") from error
    assert family.restore is not None
    config = family.restore(model.config, bool(prefix))
    check_expressible(model.config, config, exported, family, layout)
    if prefix:
        heads = {name for name in exported if not any(name.startswith(part) for part in ("classifier", "head"))}
        exported = {(family.head_prefix if name in heads else "") + name: tensor for name, tensor in exported.items()}
    with new_folder(save_directory) as folder:
        save_torch_state_dict(exported, folder)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def check_expressible(
    config: HfViTConfig, restored: Mapping[str, Any], exported: Mapping[str, Any], family: Family, layout: str
) -> None:
    """Raises `ValueError` unless the exported configuration reads back as ours."""
    shapes = {name: tuple(tensor.shape) for name, tensor in exported.items()}
    back = HfViTConfig(**family.configure(restored, shapes)).to_dict()
    own = config.to_dict()
    lost = {name: own[name] for name in back.keys() & own.keys() - NOT_CARRIED if own[name] != back[name]}
    ignored = {"architectures", "dtype", "auto_map", "transformers_version", "_name_or_path", "model_type"}
    if lost := {name: value for name, value in lost.items() if name not in ignored}:
        described = ", ".join(f"{name}={value!r} (there {back[name]!r})" for name, value in sorted(lost.items()))
        raise ValueError(f"The layout {layout!r} cannot express {described}.")
