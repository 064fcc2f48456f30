"""LoRA: models whose weights stay as they are but for updates of low rank, trained and saved as an adapter."""

import copy
import warnings
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME, is_peft_available

from ..model.pretrained import HfViTPreTrainedModel
from .training_arguments import HfViTTrainingArguments


if is_peft_available():
    from peft import LoraConfig, PeftModel, inject_adapter_in_model
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
    from peft.utils.other import AuxiliaryTrainingWrapper


PREFIX = "base_model.model."  # of all names in the files of peft
Model = TypeVar("Model", bound=HfViTPreTrainedModel)


def add_lora(model: HfViTPreTrainedModel, args: HfViTTrainingArguments) -> None:
    """Freezes a model, and adds an adapter that trains low-rank updates of attention and MLP, and its head in full.

    The model keeps its class. What was frozen before stays as it is.

    Args:
        model: A saved or published model, with a head.
        args: Rank and place of the updates.

    Raises:
        ValueError: if the model starts from scratch, or has no such layers.
    """
    assert args.lora_rank is not None
    base = model.config._name_or_path
    if not base:
        raise ValueError(
            f"lora_rank={args.lora_rank} changes little in a model that has learned much, and this one starts from "
            "scratch. Give a saved or published one: --model_name_or_path."
        )
    towers = {name: child for name, child in model.named_children() if isinstance(child, PreTrainedModel)}
    targets = [
        f"{tower}.{name}"
        for tower, child in towers.items()
        for name, layer in child.named_modules()
        if name.endswith(tuple(args.lora_target_modules)) and isinstance(layer, nn.Linear) and is_trained(layer)
    ]
    if not targets:
        raise ValueError(
            f"lora_target_modules={args.lora_target_modules} are the ends of no names of linear layers that learn in "
            f"{type(model).__name__}. Give some of `[name for name, _ in model.named_modules()]`."
        )
    heads = [name for name, child in model.named_children() if name not in towers and is_trained(child)]
    config = LoraConfig(
        base_model_name_or_path=base,
        r=args.lora_rank,
        lora_alpha=args.lora_alpha or 2 * args.lora_rank,
        lora_dropout=args.lora_dropout,
        target_modules=targets,
        modules_to_save=heads,
    )
    # Not `model.add_adapter`: transformers 5.24 refuses versions of peft before 0.22.
    inject_adapter_in_model(config, model)


def prepare_adapter(model: Any, args: Any) -> Any:
    """Returns the plain model that trains, with the adapter of `lora_rank` or that of a `PeftModel` in it."""
    model = unwrap_peft(model)
    if isinstance(args, HfViTTrainingArguments) and args.lora_rank is not None:
        add_lora(model, args)
    if is_adapted(model):
        model._hf_peft_config_loaded = True  # so that `model.save_pretrained` does not take it for a plain model
    return model


def is_trained(module: nn.Module) -> bool:
    """Returns whether any weight of a module is trained."""
    return any(parameter.requires_grad for parameter in module.parameters())


def is_adapted(model: nn.Module) -> bool:
    """Returns whether a model has adapters in it: by `add_lora`, by its own `add_adapter`, or by `get_peft_model`."""
    return isinstance(model, PreTrainedModel) and is_peft_available() and bool(adapted_modules(model))


def active_adapter(model: PreTrainedModel) -> str:
    """Returns the name of the active adapter of a model."""
    layer = next(module for _, module in adapted_modules(model) if isinstance(module, BaseTunerLayer))
    (name,) = layer.active_adapters
    return str(name)


def count_parameters(model: PreTrainedModel) -> int:
    """Returns the number of parameters of a model, of an adapted one those that are left once all is merged."""
    count: int = model.num_parameters()
    if is_adapted(model):
        count -= sum(
            size_of(module) - size_of(without_peft(module, merges=False)) for _, module in adapted_modules(model)
        )
    return count


def size_of(module: nn.Module) -> int:
    """Returns the number of parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters())


@torch.no_grad()
def merge(model: Model) -> Model:
    """Returns a plain model that does what an adapted one does, which stays as it is."""
    weights: dict[str, Tensor] = model.state_dict()
    for name, module in adapted_modules(model):
        weights = {key: weight for key, weight in weights.items() if not key.startswith(f"{name}.")}
        weights |= {f"{name}.{key}": weight for key, weight in without_peft(module, merges=True).state_dict().items()}
    return type(model).from_pretrained(None, config=copy.deepcopy(model.config), state_dict=weights, dtype=model.dtype)


def adapted_modules(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """Returns the layers with an adapter, and the heads that train in full, by name."""
    kinds = BaseTunerLayer | AuxiliaryTrainingWrapper
    return [(name, module) for name, module in model.named_modules() if isinstance(module, kinds)]


def without_peft(module: Any, *, merges: bool) -> nn.Module:
    """Return a plain layer with its old or, if `merges`, its updated weights, or a plain head as it was trained."""
    if isinstance(module, AuxiliaryTrainingWrapper):
        plain: nn.Module = module.unload_and_optionally_merge_module(merge=False, safe_merge=False, adapter_names=None)
        return plain
    if merges:
        module = copy.deepcopy(module)  # what is merged in place cannot be taken out again bit for bit
        module.merge()
    plain = module.get_base_layer()
    return plain


def adapter_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Returns a copy of the weights of the adapter of a model, under peft's names."""
    # Without False, peft asks the Hub at each call whether the model that it starts from has more words by now.
    weights = get_peft_model_state_dict(model, adapter_name=active_adapter(model), save_embedding_layers=False)
    return {f"{PREFIX}{key}": weight.clone(memory_format=torch.contiguous_format) for key, weight in weights.items()}


def save_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Saves the adapter of a model, in the files that peft opens."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(adapter_weights(model), folder / ADAPTER_SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
    model.peft_config[active_adapter(model)].save_pretrained(folder)


def as_peft_model(model: PreTrainedModel) -> "PeftModel":
    """Wraps an adapted model as the library's Trainer knows adapters, which it then saves and loads alone."""
    name, weights = active_adapter(model), adapter_weights(model)
    # peft draws the adapter again, warns that there is one, and asks by a deprecated name for checkpointing.
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config` attribute|`is_gradient_checkpointing` is")
        wrapped = PeftModel(model, model.peft_config[name], adapter_name=name)
    set_peft_model_state_dict(wrapped, weights, adapter_name=name)
    return wrapped


def unwrap_peft(model: nn.Module) -> nn.Module:
    """Returns the model inside a `PeftModel`, and any other one as it is."""
    if is_peft_available() and isinstance(model, PeftModel):
        base: nn.Module = model.get_base_model()
        return base
    return model


def check_adapter(model: nn.Module, checkpoint: Path) -> None:
    """Raises `ValueError` if a checkpoint holds an adapter and the model has none, or the other way around."""
    has_adapter = (checkpoint / ADAPTER_SAFE_WEIGHTS_NAME).is_file()
    if is_adapted(model) and not has_adapter:
        raise ValueError(
            f"{checkpoint} holds no adapter ({ADAPTER_SAFE_WEIGHTS_NAME}): it is of a training in which all weights "
            "learned. Resume without lora_rank."
        )
    if has_adapter and not is_adapted(model):
        raise ValueError(
            f"{checkpoint} holds an adapter alone ({ADAPTER_SAFE_WEIGHTS_NAME}). Resume with the lora_rank of its "
            "training."
        )


def describe_adapter(model: PreTrainedModel) -> dict[str, str]:
    """Returns the rows of a card on the adapter of a model, none if it has none."""
    if not is_adapted(model):
        return {}
    config = model.peft_config[active_adapter(model)]
    heads = f"; {', '.join(config.modules_to_save)} in full" if config.modules_to_save else ""
    layers = sum(isinstance(module, BaseTunerLayer) for _, module in adapted_modules(model))
    learned = model.num_parameters(only_trainable=True)
    return {
        "adapter": f"{config.peft_type.value}, rank {config.r}, alpha {config.lora_alpha}, dropout "
        f"{config.lora_dropout:g} in {layers} layers{heads}; {learned:,} parameters learned"
    }
