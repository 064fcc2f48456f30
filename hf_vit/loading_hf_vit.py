"""What `from_pretrained` checks and puts right around the library's loading."""

import copy
import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from .configuration_hf_vit import HfViTConfig, to_pair


GEOMETRY = ("image_size", "patch_size", "num_channels", "use_cls_token", "num_register_tokens")
# Parts that carry what a model has learned. Others (heads, poolers) may start fresh, and the mask token too.
BACKBONE = ("embeddings.", "pre_norm.", "encoder.", "norm.")
MASK_TOKEN = "embeddings.mask_token"


@contextmanager
def without_collecting() -> Iterator[None]:
    """Pauses the search for reference cycles.

    The thousands of objects of a new model set it off, it finds nothing, and going through all modules that have been
    imported takes longer than loading does.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def read_config(name_or_path: str | os.PathLike[str], **kwargs: Any) -> dict[str, Any]:
    """Returns the config.json of a folder or repository; empty for a file.

    Raises:
        OSError: if there is no such folder or repository.
    """
    path = Path(name_or_path)
    if path.is_file():
        return {}
    if not path.is_dir() and (path.is_absolute() or len(path.parts) > 2):  # names on the Hub have two parts at most
        raise OSError(f"There is no folder or file {str(name_or_path)!r}, and it is no name on the Hub.")
    config: dict[str, Any] = PreTrainedConfig.get_config_dict(name_or_path, **kwargs)[0]
    return config


def take_geometry(kwargs: dict[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Takes out of the arguments of `from_pretrained` what `apply_geometry` changes once the model is loaded.

    Args:
        kwargs: The arguments. Fields in them, or in the `config` that the Auto classes make of them, are put back to
            those of the checkpoint.
        saved: The checkpoint's config.json.
    """
    config = kwargs.pop("config", None)
    if config is not None:
        kwargs["config"] = config
    given = kwargs if config is None else vars(config) if isinstance(config, PreTrainedConfig) else {}
    has_new_token = given.get("use_cls_token") and saved.get("use_cls_token") is not True
    names = (*GEOMETRY, "pooling") if has_new_token else GEOMETRY  # the pooling may have to wait for the token
    if config is None:
        return {name: kwargs.pop(name) for name in names if name in kwargs}
    changed = {name: given[name] for name in names if name in saved and not is_same(given.get(name), saved[name])}
    if changed:
        kwargs["config"] = copy.deepcopy(config)
        for name in changed:
            setattr(kwargs["config"], name, saved[name])
    return changed


def is_same(value: Any, other: Any) -> bool:
    """Whether two values of a field say the same; sizes do as a number and as a pair."""
    sizes = [to_pair(size) if isinstance(size, int | list | tuple) else size for size in (value, other)]
    return bool(sizes[0] == sizes[1])


def check_weights(
    model: PreTrainedModel, info: Mapping[str, Any], name_or_path: str | os.PathLike[str], has_new_labels: bool
) -> None:
    """Refuses a model whose backbone is not the checkpoint's.

    Args:
        model: As the library loaded it.
        info: What it reports: missing, unexpected and mismatched keys.
        name_or_path: The checkpoint, for errors.
        has_new_labels: Whether heads may have another shape.

    Raises:
        ValueError: if part of the backbone would be drawn at random, left out, or has another shape.
    """
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    encoder = {name for name, _ in model.named_parameters() if "encoder.layers." in name}
    if encoder <= set(info["missing_keys"]):
        raise ValueError(
            f"Nothing in {str(name_or_path)!r} fits the encoder of {type(model).__name__}: it would have been drawn "
            f"at random. The checkpoint holds {some(info['unexpected_keys'], 3)}. Open it with the transformers class "
            f"it was saved from, or build a new model with {type(model).__name__}(config)."
        )
    of_backbone_first = sorted(info["mismatched_keys"], key=lambda entry: (not entry[0].startswith(prefix), entry))
    shapes = [
        f"{name} is {tuple(theirs)} there and {tuple(ours)} here"
        for name, theirs, ours in of_backbone_first
        if name.startswith(prefix) or not has_new_labels
    ]
    missing = [name for name in info["missing_keys"] if is_backbone(name.removeprefix(prefix), model.config)]
    left_out = [name for name in info["unexpected_keys"] if is_left_out(name, model.config)]
    problems = {
        "": "; ".join(shapes[:6]) + ("; …" if shapes[6:] else ""),
        "drawn at random: ": some(missing),
        "left out: ": some(left_out),
    }
    if found := [problem + names for problem, names in problems.items() if names]:
        raise ValueError(
            f"The weights of {str(name_or_path)!r} do not fit: {'. '.join(found)}. Leave out the fields that change "
            "the architecture, or accept it with ignore_mismatched_sizes=True."
        )


def is_backbone(name: str, config: HfViTConfig) -> bool:
    """Whether a tensor of the base model carries what it has learned."""
    is_of_pooling = config.norm_after_pooling and name.startswith("norm.")
    return name.startswith(BACKBONE) and name != MASK_TOKEN and not is_of_pooling


def is_left_out(name: str, config: HfViTConfig) -> bool:
    """Whether a tensor of a checkpoint is missed in a model that has no place for it; blocks at the end are not."""
    name = name.removeprefix("model.")
    number = name.removeprefix("encoder.layers.").partition(".")[0]
    return is_backbone(name, config) and not (number.isdigit() and int(number) >= config.num_hidden_layers)


def some(names: Any, limit: int = 6) -> str:
    """Lists the first names."""
    return ", ".join(sorted(names)[:limit]) + (", …" if len(names) > limit else "")
