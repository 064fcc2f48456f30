"""An exponential moving average of the weights of a model in training (EMA)."""

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
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState

from ..output_folder import AVERAGE_FOLDER
from .state import StatefulCallback


class WeightAverage:
    """Average of all weights of a model that train, in float32 even where these are of lower precision.

    It starts with the weights as they are. What the model has beside them, frozen weights and buffers such as the
    statistics of batch norms, is its own. Under FSDP2 each process averages the part of the weights that it has.
    """

    def __init__(self, model: PreTrainedModel, decay: float) -> None:
        self.model = model
        self.decay = decay
        # By the state, which does not have what trains beside the model.
        weights = dict.fromkeys(weight for weight in self._state().values() if weight.requires_grad)
        self.averages = {
            weight: weight.detach().clone().to(torch.promote_types(weight.dtype, torch.float32)) for weight in weights
        }

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Moves the average towards the weights that the optimizer has left after its step number `step`, from 1."""
        # Less for the first steps, so that the average forgets where the training began, as `num_updates` makes it in
        # TensorFlow's `tf.train.ExponentialMovingAverage`.
        decay = min(self.decay, (1 + step) / (10 + step))
        averages = [own_part(average) for average in self.averages.values()]
        weights = [own_part(weight).to(average.dtype) for weight, average in zip(self.averages, averages, strict=True)]
        torch._foreach_lerp_(averages, weights, 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Gives the model the averaged weights as long as this lasts."""
        with torch.no_grad():
            weights = [own_part(weight).clone() for weight in self.averages]
            self._set(map(own_part, self.averages.values()))
        try:
            yield
        finally:
            with torch.no_grad():
                self._set(weights)

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the state with averaged weights by name, whole; all processes have to go through it together."""
        for name, value in self._state().items():
            averaged = self.averages.get(value, value.detach())
            yield name, averaged.full_tensor().cpu() if isinstance(averaged, DTensor) else averaged

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Reads the average saved as a model into `folder`; `ValueError` if the folder does not have all of it."""
        saved: dict[str, Tensor] = {}
        for file in folder.glob("*.safetensors"):
            saved |= load_file(file)
        found = {
            weight: saved[name] for name, weight in self._state().items() if weight in self.averages and name in saved
        }
        if len(found) < len(self.averages):
            raise ValueError(
                f"{folder} has no average of {len(self.averages) - len(found)} of {len(self.averages)} weights. A "
                "training that was started without --ema_decay resumes without it; or start another one in another "
                "--output_dir."
            )
        for weight, value in found.items():
            average = self.averages[weight]
            if isinstance(average, DTensor):
                value = distribute_tensor(value.to(average.device), average.device_mesh, average.placements)
            average.copy_(value)

    def _state(self) -> dict[str, Tensor]:
        """Returns the tensors that the model has in files, weights as the very objects that train."""
        return self.model.state_dict(keep_vars=True)

    def _set(self, values: Iterable[Tensor]) -> None:
        """Writes into the weights, in their order."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # or it would continue with weights that it has gathered before
        for weight, value in zip(self.averages, values, strict=True):
            own_part(weight).copy_(value)


def own_part(tensor: Tensor) -> Tensor:
    """Returns what this process has of a tensor, to read or to write."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class AverageWeights(StatefulCallback):
    """Keeps a `WeightAverage` of the model in training, and saves it as a model of its own in the folder `ema`.

    With `is_fsdp` the Trainer shards the model, and so can save it whole.
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
                f"ema_decay={self.decay} averages the weights of a whole model, and here adapters or a model "
                f"of the class {type(model).__name__} train. Leave it out."
            )
        self.average, self.processing_class = WeightAverage(model, self.decay), kwargs["processing_class"]
        if not self.is_fsdp and any(isinstance(weight, DTensor) for weight in self.average.averages):
            raise ValueError(
                f"ema_decay={self.decay} cannot be saved for a model that was spread over processes when it "
                "was loaded. Load it whole, and let the Trainer spread it: --fsdp."
            )

    def on_step_end(self, args: Any, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        assert self.average is not None
        self.average.update(state.global_step)

    def save_state(self, folder: Path, is_writer: bool) -> None:
        if self.average is None:
            return
        # On all processes, which may have to bring the weights together.
        weights = {name: weight for name, weight in self.average.whole_weights() if is_writer}
        if is_writer:
            self.average.model.save_pretrained(folder / AVERAGE_FOLDER, state_dict=weights)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder / AVERAGE_FOLDER)

    def load_state(self, folder: Path) -> None:
        assert self.average is not None
        self.average.load(folder / AVERAGE_FOLDER)


class LastAverage(TrainerCallback):
    """Puts the weights in place that a schedule-free optimizer averages when the last step is done.

    That is before the best model is loaded, whose weights are averages already.
    """

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if control.should_training_stop or state.global_step >= state.max_steps:
            kwargs["optimizer"].eval()
