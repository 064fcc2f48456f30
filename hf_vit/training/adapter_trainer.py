"""The Trainer of models that learn by adapters: what it saves opens without peft, and is taken up again exactly."""

from pathlib import Path
from typing import Any

from ..model.pretrained import HfViTPreTrainedModel
from .lora import ADAPTER_FOLDER, add_lora, is_adapted, load_adapter, merge, save_adapter
from .lora_arguments import LoraArguments
from .safe_trainer import SafeTrainer


class AdapterTrainer(SafeTrainer):
    """`SafeTrainer`, whose model learns by an adapter if `lora_rank` is among its arguments, or if it has one already.

    What is saved, checkpoints too, is a plain model with all that was learned, and beside it `adapter/`, that alone.
    """

    model: HfViTPreTrainedModel

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes the arguments of `transformers.Trainer`."""
        super().__init__(*args, **kwargs)
        if isinstance(self.args, LoraArguments) and self.args.lora_rank is not None:
            add_lora(self.model, self.args)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Saves the model, its image processor and the arguments, and the adapter."""
        if not is_adapted(self.model) or not self.args.should_save:
            super()._save(output_dir, state_dict)
            return
        adapted = self.model
        self.model = merge(adapted)
        try:
            super()._save(output_dir, state_dict)
        finally:
            self.model = adapted
        save_adapter(adapted, Path(output_dir or self.args.output_dir) / ADAPTER_FOLDER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        """Loads what the model had learned; an adapter alone, since merged weights are rounded."""
        if is_adapted(self.model):
            load_adapter(self.model, Path(resume_from_checkpoint) / ADAPTER_FOLDER)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

    def _load_best_model(self) -> None:
        """Loads the best of all that it had learned at an evaluation."""
        if is_adapted(self.model):
            load_adapter(self.model, Path(self.state.best_model_checkpoint) / ADAPTER_FOLDER)
        else:
            super()._load_best_model()
