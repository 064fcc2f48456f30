"""The Trainer that averages weights: what an average needs at each step, evaluation and checkpoint."""

from pathlib import Path
from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from .callbacks.ema import AVERAGE_FOLDER, AveragingArguments, WeightAverage
from .safe_trainer import SafeTrainer


class AveragingTrainer(SafeTrainer):
    """`SafeTrainer` that, with an `ema_decay` in its arguments, also keeps an average of the weights.

    Every evaluation scores the model and, under names like `eval_ema_accuracy`, the averaged weights. Wherever the
    model is saved, the folder `ema` in that place has a model with the averaged weights, in float32.

    The average begins with each call of `train`, goes on with a training that is taken up again, and is that of the
    best step where the best model is loaded at the end.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes the arguments of `transformers.Trainer`.

        Raises:
            ValueError: if weights shall be averaged that the library does not lay open.
        """
        super().__init__(*args, **kwargs)
        self.average: WeightAverage | None = None
        self.averaged_scores: dict[str, float] = {}  # of the last evaluation, by plain names
        if self.ema_decay is not None:
            self.check_weights_are_open(f"ema_decay={self.ema_decay}")
            self.add_callback(AverageUpdate(self))

    @property
    def ema_decay(self) -> float | None:
        """What is left of the average at a step; `None` keeps no average."""
        return self.args.ema_decay if isinstance(self.args, AveragingArguments) else None

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Scores the model and, where there are some, the averaged weights; predictions are those of the model."""
        options = (dataloader, description, prediction_loss_only, ignore_keys)
        if self.average is None:
            return self.score_weights(*options, metric_key_prefix)
        # The model comes last, so that what a evaluator still holds afterwards is of the model.
        prefix = f"{metric_key_prefix}_{AVERAGE_FOLDER}"
        with self.average.applied():
            averaged = self.score_weights(*options, prefix)
        self.averaged_scores = {name.removeprefix(f"{prefix}_"): value for name, value in averaged.metrics.items()}
        output = self.score_weights(*options, metric_key_prefix)
        return output._replace(
            metrics={**output.metrics, **averaged.metrics}, num_samples=averaged.num_samples + output.num_samples
        )

    def score_weights(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None,
        ignore_keys: list[str] | None,
        metric_key_prefix: str,
    ) -> EvalLoopOutput:
        """Scores the weights that the model has at the moment."""
        return super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model, and beside it the one with averaged weights."""
        if self.average is not None:
            # On all processes, which may have to bring the weights together; the first one keeps them.
            weights = {name: weight for name, weight in self.average.whole_weights() if self.args.should_save}
            if self.args.should_save:
                self._save(str(Path(output_dir or self.args.output_dir) / AVERAGE_FOLDER), weights)
        super().save_model(output_dir, _internal_call)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        """Prepares model and optimizer and, when the weights are those that the training begins with, the average."""
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if self.ema_decay is not None:
            model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
            if not isinstance(model, PreTrainedModel) or model._hf_peft_config_loaded:
                raise ValueError(
                    f"ema_decay={self.ema_decay} averages the weights of a whole model, and here adapters or a model "
                    f"of the class {type(model).__name__} train. Leave it out."
                )
            self.average = WeightAverage(model, self.ema_decay)
            if not self.is_fsdp_enabled and any(isinstance(weight, DTensor) for weight in self.average.averages):
                raise ValueError(
                    f"ema_decay={self.ema_decay} cannot be saved for a model that was spread over processes when it "
                    "was loaded. Load it whole, and let the Trainer spread it: --fsdp."
                )
            if resume_from_checkpoint is not None:
                self.average.load(Path(resume_from_checkpoint) / AVERAGE_FOLDER)
        return prepared

    def _load_best_model(self) -> None:
        """Loads the best model, and the average of that step."""
        super()._load_best_model()
        if self.average is not None:
            self.average.load(Path(self.state.best_model_checkpoint) / AVERAGE_FOLDER)


class AverageUpdate(TrainerCallback):
    """Moves the average of a trainer at each step of its optimizer."""

    def __init__(self, trainer: AveragingTrainer) -> None:
        """Begins."""
        self.trainer = trainer

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Moves it."""
        assert self.trainer.average is not None
        self.trainer.average.update(state.global_step)
