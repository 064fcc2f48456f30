"""A Trainer that ends in good order: at a signal, a loss that is no number, a full disk, or a lost image."""

import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.serialization import register_package
from transformers import TrainerControl
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.training_args import ParallelMode
from transformers.utils import logging

from .agreement import Agreement, lost_weights
from .callbacks.preemption import PreemptionSignals, WorkerStart
from .checkpoints import find_damage
from .errors import (
    ExampleError,
    NotFiniteError,
    Preempted,
    as_sentence,
    describe_lost_numbers,
    explained,
    how_to_go_on,
)
from .measured_trainer import MeasuredTrainer


logger = logging.get_logger(__name__)


def _restore_on_cpu(storage: Any, location: str) -> Any:
    return storage if location == "cpu:0" else None


# transformers 5.17 opens the optimizer of several processes on a CPU there, which is no place that torch 2.9 knows.
register_package(100, lambda storage: None, _restore_on_cpu)


class SurvivingTrainer(MeasuredTrainer):
    """`MeasuredTrainer`, which loses nothing when it cannot go on.

    At SIGTERM or SIGUSR1, to one of its processes or to all, `train` finishes the step, and the evaluation that is due
    after it, saves a checkpoint and raises `Preempted`. The library's `enable_jit_checkpoint` saves in the middle of a
    step, from where a training cannot be taken up exactly, and its processes do not agree on the step.

    A loss or weights that are no numbers end the training on all processes, and are never saved.

    A checkpoint that cannot be written is removed, and an image that cannot be read is named.
    """

    control: TrainerControl

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes the arguments of `transformers.Trainer`."""
        super().__init__(*args, **kwargs)
        # It would hide a loss that is no number, and wait for the GPU at every batch.
        self.args.logging_nan_inf_filter = False
        self.signals = PreemptionSignals()
        self._begin()

    def _begin(self) -> None:
        self._agreement = Agreement(self.args.parallel_mode == ParallelMode.DISTRIBUTED)
        self._stop_signal = 0
        self._ended_step = -1
        self._has_saved = False

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains.

        Raises:
            CheckpointError: if a checkpoint cannot be written.
            ExampleError: if an example cannot be read.
            NotFiniteError: if the loss or the weights are no numbers any more.
            Preempted: if a signal ends the training before its time.
        """
        self._begin()
        with self.signals.noted():
            try:
                output = super().train(*args, **kwargs)
                self._check_numbers()
            except Preempted as stop:
                if self.is_world_process_zero():
                    logger.warning(stop.message)
                raise
        return output

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the batches of a step."""
        try:
            return super().get_batch_samples(*args, **kwargs)
        except (OSError, ValueError) as error:
            raise ExampleError(
                f"After step {self.state.global_step} an example cannot be read: {as_sentence(error)} Restore it; "
                f"left out, it would change the order of all others. {how_to_go_on(self.args.output_dir)}"
            ) from error

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Trains for an epoch, unless a training that is taken up in the middle of it is at its end already."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def _maybe_log_save_evaluate(
        self, tr_loss: torch.Tensor, grad_norm: Any, model: torch.nn.Module, trial: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Does what is due after a step or an epoch, and stops the training if it shall."""
        # The library calls it after each step, and after the last one of an epoch once more.
        comes_again = float(self.state.epoch).is_integer() and self.state.global_step != self._ended_step
        self._ended_step = self.state.global_step
        self._has_saved = False
        self._exchange(tr_loss)
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, *args, **kwargs)
        if self._stop_signal and not comes_again:
            self._stop(model, trial)

    def _exchange(self, loss: torch.Tensor) -> None:
        """Tells the other processes of a signal and of a loss that is no number, and learns of theirs."""
        numbers = torch.full((2,), self.signals.received, dtype=torch.int64, device=loss.device)
        numbers[1] = ~loss.isfinite() * self.state.global_step
        self._judge(self._agreement.exchange(numbers))

    def _judge(self, numbers: list[int]) -> None:
        self._stop_signal, lost_step = numbers
        if lost_step:
            raise NotFiniteError(describe_lost_numbers("loss", lost_step, self._get_learning_rate(), self.args))

    def _stop(self, model: torch.nn.Module, trial: Any) -> None:
        """Saves what has not been saved, and ends the training."""
        if not self._has_saved:
            self._save_checkpoint(model, trial)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        self.accelerator.wait_for_everyone()
        raise Preempted(
            self._stop_signal,
            f"{signal.Signals(self._stop_signal).name} has ended the training after step {self.state.global_step} of "
            f"{self.state.max_steps}. {how_to_go_on(self.args.output_dir)}",
        )

    def _check_numbers(self) -> None:
        """Raises `NotFiniteError` on all processes if the loss so far, or a weight of one, is no number."""
        if numbers := self._agreement.settle():
            self._judge(numbers)
        if self._agreement.largest(lost_weights(self.model).to(self.args.device)).item():
            step, rate = self.state.global_step, self._get_learning_rate()
            raise NotFiniteError(describe_lost_numbers("weights", step, rate, self.args))

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Saves a checkpoint; where one of an earlier training is written over, it stops counting as complete."""
        self._check_numbers()
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.should_save:
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
        with explained(folder) if self.args.should_save else nullcontext():
            super()._save_checkpoint(model, trial)
        self._has_saved = True

    def _save_rng_state(self, output_dir: str) -> None:
        """Saves the random state, of all processes before trainer_state.json tells that the checkpoint is complete."""
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()
        # The last bytes of a small file are written as it is closed, where torch hears of no error.
        if self.args.should_save and (damage := find_damage(Path(output_dir))):
            raise OSError(damage)

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Returns a loader whose worker processes outlive a signal to all processes of a training."""
        loader = super()._get_dataloader(*args, **kwargs)
        base = loader.base_dataloader
        base.worker_init_fn = WorkerStart(self.signals.is_training, base.worker_init_fn)
        return loader
