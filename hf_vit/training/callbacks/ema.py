"""Exponential moving average (EMA) of the weights during training."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel, TrainerState

from ...outputs import AVERAGE_FOLDER
from .state import StatefulCallback


class WeightAverage:
    """Exponential moving average of all trained weights, in float32 even if the weights have lower precision.

    The average is initialized with the current weights. Frozen weights and buffers, such as batch norm statistics, are
    not averaged. Under FSDP2, each process averages its own shards.
    """

    def __init__(self, model: PreTrainedModel, decay: float) -> None:
        self.model = model
        self.decay = decay
        # Average only weights in the model state. Trained parameters that are not saved with the model are excluded.
        weights = dict.fromkeys(weight for weight in self._state().values() if weight.requires_grad)
        self.averages = {
            weight: weight.detach().clone().to(torch.promote_types(weight.dtype, torch.float32)) for weight in weights
        }

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average with the weights after optimizer step `step`, counted from 1."""
        # Use a smaller decay in the first steps, so that the share of the initial weights decreases quickly. The
        # formula is that of `tf.train.ExponentialMovingAverage` with the argument `num_updates`.
        decay = min(self.decay, (1 + step) / (10 + step))
        averages = [own_part(average) for average in self.averages.values()]
        weights = [own_part(weight).to(average.dtype) for weight, average in zip(self.averages, averages, strict=True)]
        torch._foreach_lerp_(averages, weights, 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context manager that replaces the weights of the model with the averaged weights."""
        with torch.no_grad():
            weights = [own_part(weight).clone() for weight in self.averages]
            self._set(map(own_part, self.averages.values()))
        try:
            yield
        finally:
            with torch.no_grad():
                self._set(weights)

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors of the model state, with averaged weights. All processes must iterate together."""
        for name, value in self._state().items():
            averaged = self.averages.get(value, value.detach())
            yield name, averaged.full_tensor().cpu() if isinstance(averaged, DTensor) else averaged

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Load the average from a model saved in `folder`; raise `ValueError` if weights are missing."""
        saved: dict[str, Tensor] = {}
        for file in folder.glob("*.safetensors"):
            saved |= load_file(file)
        found = {
            weight: saved[name] for name, weight in self._state().items() if weight in self.averages and name in saved
        }
        if len(found) < len(self.averages):
            raise ValueError(
                f"{folder} has no average of {len(self.averages) - len(found)} of {len(self.averages)} weights. If "
                "the run was started without --ema_decay, resume it without this option. Otherwise, start a new run "
                "in another --output_dir."
            )
        for weight, value in found.items():
            average = self.averages[weight]
            if isinstance(average, DTensor):
                value = distribute_tensor(value.to(average.device), average.device_mesh, average.placements)
            average.copy_(value)

    def _state(self) -> dict[str, Tensor]:
        """Return the tensors of the model state by name. Trained weights are the `nn.Parameter` objects themselves."""
        return self.model.state_dict(keep_vars=True)

    def _set(self, values: Iterable[Tensor]) -> None:
        """Copy values, given in the order of the weights, into the weights of the model."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # discard gathered weights, so that the module uses the new ones
        for weight, value in zip(self.averages, values, strict=True):
            own_part(weight).copy_(value)


def own_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds. Writing to this part changes the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class AverageWeights(StatefulCallback):
    """Update a `WeightAverage` in each training step, and save the averaged weights as a model in the subfolder `ema`.

    If `is_fsdp` is true, the model is sharded, and the Trainer gathers the shards when it saves the model.
    """

    is_published = True

    def __init__(self, decay: float, is_fsdp: bool) -> None:
        self.decay = decay
        self.is_fsdp = is_fsdp
        self.average: WeightAverage | None = None
        self.processing_class: Any = None

    def on_train_begin(self, *_: Any, **kwargs: Any) -> None:
        model = extract_model_from_parallel(kwargs["model"], keep_torch_compile=False)
        if not isinstance(model, PreTrainedModel) or model._hf_peft_config_loaded:
            raise ValueError(
                f"ema_decay={self.decay} supports neither adapters nor models of the class {type(model).__name__}. "
                "Remove it."
            )
        self.average, self.processing_class = WeightAverage(model, self.decay), kwargs["processing_class"]
        if not self.is_fsdp and any(isinstance(weight, DTensor) for weight in self.average.averages):
            raise ValueError(
                f"ema_decay={self.decay} does not support a model that was sharded while loading. Load the whole "
                "model, and let the Trainer shard it with --fsdp."
            )

    def on_step_end(self, args: Any, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        assert self.average is not None
        self.average.update(state.global_step)

    def save_state(self, folder: Path, is_writer: bool) -> None:
        if self.average is None:
            return
        # All processes iterate over the weights, because sharded weights are gathered from all of them.
        weights = {name: weight for name, weight in self.average.whole_weights() if is_writer}
        if is_writer:
            config = self.average.model.config  # not for averaged weights
            fitted, config.calibration_config = config.calibration_config, None
            self.average.model.save_pretrained(folder / AVERAGE_FOLDER, state_dict=weights)
            config.calibration_config = fitted
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder / AVERAGE_FOLDER)

    def load_state(self, folder: Path) -> None:
        assert self.average is not None
        self.average.load(folder / AVERAGE_FOLDER)
