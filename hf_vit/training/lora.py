"""LoRA: low-rank updates of the weights of a frozen model, which are trained and saved as an adapter."""

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
from ..options.training_arguments import LORA_TARGETS, HfViTTrainingArguments


if is_peft_available():
    from peft import LoraConfig, PeftModel, inject_adapter_in_model
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
    from peft.utils.other import AuxiliaryTrainingWrapper


PREFIX = "base_model.model."  # prefix of all weight names in peft adapter files
Model = TypeVar("Model", bound=HfViTPreTrainedModel)


def add_lora(model: HfViTPreTrainedModel, args: HfViTTrainingArguments) -> None:
    """Freeze a model, and add an adapter with low-rank updates of attention and MLP layers. Heads are not frozen.

    The class of the model does not change. Parameters that were frozen before stay frozen.

    Args:
        model: A saved or published model with a head.
        args: Training arguments with the rank and the target modules.

    Raises:
        ValueError: if the model is trained from scratch, or no trainable linear layer matches the target modules.
    """
    assert args.lora_rank is not None
    base = model.config._name_or_path
    if not base:
        raise ValueError(
            f"lora_rank={args.lora_rank} requires a pretrained model, but this model is trained from scratch. Give a "
            "saved or published model: --model_name_or_path."
        )
    towers = {name: child for name, child in model.named_children() if isinstance(child, PreTrainedModel)}
    layers = [
        f"{tower}.{name}"
        for tower, child in towers.items()
        for name, layer in child.named_modules()
        if isinstance(layer, nn.Linear) and is_trained(layer)
    ]
    wanted = args.lora_target_modules
    targets = [name for name in layers if name.endswith(tuple(wanted))]
    # A model has only some of the default layers: an MLP is either plain or gated.
    missing = [end for end in wanted if end not in LORA_TARGETS and not any(name.endswith(end) for name in layers)]
    if missing or not targets:
        raise ValueError(
            f"lora_target_modules={wanted}: no trainable linear layer of {type(model).__name__} has a name that ends "
            f"with {' or '.join(missing or wanted)}. Give endings of names in `[name for name, _ in "
            "model.named_modules()]`. Query, key and value are one layer, attention.qkv, so LoRA cannot update only "
            "some of them."
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
    # Do not call `model.add_adapter`, because in transformers 5.24 it requires peft 0.22 or newer.
    inject_adapter_in_model(config, model)


def prepare_adapter(model: Any, args: Any) -> Any:
    """Unwrap the model if it is a `PeftModel`, add an adapter if `lora_rank` is set, and return the model."""
    model = unwrap_peft(model)
    if isinstance(args, HfViTTrainingArguments) and args.lora_rank is not None:
        add_lora(model, args)
    if is_adapted(model):
        model._hf_peft_config_loaded = True  # this flag makes `model.save_pretrained` save the adapter
    return model


def is_trained(module: nn.Module) -> bool:
    """Return whether any parameter of a module is trainable."""
    return any(parameter.requires_grad for parameter in module.parameters())


def is_adapted(model: nn.Module) -> bool:
    """Return whether a model has an adapter, added by `add_lora`, `model.add_adapter` or `peft.get_peft_model`."""
    return isinstance(model, PreTrainedModel) and is_peft_available() and bool(adapted_modules(model))


def active_adapter(model: PreTrainedModel) -> str:
    """Return the name of the active adapter of a model."""
    layer = next(module for _, module in adapted_modules(model) if isinstance(module, BaseTunerLayer))
    (name,) = layer.active_adapters
    return str(name)


def count_parameters(model: PreTrainedModel) -> int:
    """Return the number of parameters of a model. Adapters are not counted, because they can be merged."""
    count: int = model.num_parameters()
    if is_adapted(model):
        count -= sum(
            size_of(module) - size_of(unwrap_layer(module, merges=False)) for _, module in adapted_modules(model)
        )
    return count


def size_of(module: nn.Module) -> int:
    """Return the number of parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters())


@torch.no_grad()
def merge(model: Model) -> Model:
    """Return a copy of an adapted model with the adapter merged into its weights."""
    weights: dict[str, Tensor] = model.state_dict()
    for name, module in adapted_modules(model):
        weights = {key: weight for key, weight in weights.items() if not key.startswith(f"{name}.")}
        weights |= {f"{name}.{key}": weight for key, weight in unwrap_layer(module, merges=True).state_dict().items()}
    return type(model).from_pretrained(None, config=copy.deepcopy(model.config), state_dict=weights, dtype=model.dtype)


def adapted_modules(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """Return the names and modules of the layers with an adapter, and of the heads trained in full."""
    kinds = BaseTunerLayer | AuxiliaryTrainingWrapper
    return [(name, module) for name, module in model.named_modules() if isinstance(module, kinds)]


def unwrap_layer(module: Any, *, merges: bool) -> nn.Module:
    """Return the layer or head inside a peft module. If `merges` is true, low-rank updates are merged into it."""
    if isinstance(module, AuxiliaryTrainingWrapper):
        plain: nn.Module = module.unload_and_optionally_merge_module(merge=False, safe_merge=False, adapter_names=None)
        return plain
    if merges:
        module = copy.deepcopy(module)  # copy the layer, because merging in place cannot be undone exactly
        module.merge()
    plain = module.get_base_layer()
    return plain


def adapter_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return a copy of the adapter weights of a model under the names that peft uses."""
    # By default, peft would query the Hub at each call to check whether the vocabulary of the base model was resized.
    weights = get_peft_model_state_dict(model, adapter_name=active_adapter(model), save_embedding_layers=False)
    return {f"{PREFIX}{key}": weight.clone(memory_format=torch.contiguous_format) for key, weight in weights.items()}


def save_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Save the adapter of a model in peft format."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(adapter_weights(model), folder / ADAPTER_SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
    model.peft_config[active_adapter(model)].save_pretrained(folder)


def as_peft_model(model: PreTrainedModel) -> "PeftModel":
    """Wrap an adapted model in a `PeftModel`, so that `transformers.Trainer` saves and loads only the adapter."""
    name, weights = active_adapter(model), adapter_weights(model)
    # Restore the random state and hide warnings: peft first initializes the adapter randomly, warns that the adapter
    # already exists, and reads a deprecated attribute.
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config` attribute|`is_gradient_checkpointing` is")
        wrapped = PeftModel(model, model.peft_config[name], adapter_name=name)
    set_peft_model_state_dict(wrapped, weights, adapter_name=name)
    return wrapped


def unwrap_peft(model: nn.Module) -> nn.Module:
    """Return the model inside a `PeftModel`; return any other model unchanged."""
    if is_peft_available() and isinstance(model, PeftModel):
        base: nn.Module = model.get_base_model()
        return base
    return model


def check_adapter(model: nn.Module, checkpoint: Path) -> None:
    """Raise `ValueError` if a checkpoint has an adapter and the model has none, or vice versa."""
    has_adapter = (checkpoint / ADAPTER_SAFE_WEIGHTS_NAME).is_file()
    if is_adapted(model) and not has_adapter:
        raise ValueError(
            f"{checkpoint} contains no adapter ({ADAPTER_SAFE_WEIGHTS_NAME}): its run did not use LoRA. Resume "
            "without lora_rank."
        )
    if has_adapter and not is_adapted(model):
        raise ValueError(
            f"{checkpoint} contains only an adapter ({ADAPTER_SAFE_WEIGHTS_NAME}). Resume with the lora_rank of its "
            "training run."
        )


def describe_adapter(model: PreTrainedModel) -> dict[str, str]:
    """Return the model card rows about the adapter of a model, or an empty dictionary if it has no adapter."""
    if not is_adapted(model):
        return {}
    config = model.peft_config[active_adapter(model)]
    heads = f"; {', '.join(config.modules_to_save)} in full" if config.modules_to_save else ""
    layers = sum(isinstance(module, BaseTunerLayer) for _, module in adapted_modules(model))
    learned = model.num_parameters(only_trainable=True)
    return {
        "adapter": f"{config.peft_type.value}, rank {config.r}, alpha {config.lora_alpha}, dropout "
        f"{config.lora_dropout:g} in {layers} layers{heads}; {learned:,} trained parameters"
    }
