"""Stop a training run early after a signal, a non-finite loss or weight, or a failed attempt to save a checkpoint."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import PartialState
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed import ReduceOp, all_reduce
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy
from transformers.training_args import ParallelMode
from transformers.utils import logging

from ..errors import NotFiniteError, Preempted, checkpoint_error, how_to_resume, not_finite_message
from .ema import own_part


logger = logging.get_logger(__name__)

# Signals sent by SLURM, Kubernetes and torchrun, and by SLURM before the time limit (--signal=USR1@120). SIGINT is
# excluded: Ctrl-C stops immediately. Windows has no SIGUSR1.
STOP_SIGNALS = tuple(number for number in signal.Signals if number.name in ("SIGTERM", "SIGUSR1"))


class PreemptionSignals:
    """Record signals that request the end of a training run."""

    def __init__(self) -> None:
        self.received = 0
        # The flag is in shared memory, so that the worker processes of data loaders can read it.
        self.is_training = torch.zeros((), dtype=torch.int64).share_memory_()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Context manager that records signals in `received` instead of terminating the process.

        Signals are only recorded in the main thread, as Python requires. On exit, a signal that the run has not
        handled is raised again.
        """
        self.received = 0
        numbers = STOP_SIGNALS if threading.current_thread() is threading.main_thread() else ()
        before = {number: signal.signal(number, self._note) for number in numbers}
        self.is_training.fill_(len(before))
        try:
            yield
        finally:
            self.is_training.zero_()
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)
        if self.received:
            signal.raise_signal(self.received)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # Keep the first received signal, because torchrun and SLURM may both send one.
        self.received = self.received or number


@dataclass(frozen=True)
class WorkerStart:
    """Initialization function of data loader workers, which makes the workers ignore signals during training.

    After a signal, the main process still needs data from the workers to finish the current step. After training,
    SIGTERM ends the workers as usual.
    """

    is_training: torch.Tensor  # flag in shared memory that is nonzero during training
    before: Callable[[int], None] | None  # the original `worker_init_fn` of the data loader, if any

    def __call__(self, worker: int) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, self._end)
        if self.before is not None:
            self.before(worker)

    def _end(self, number: int, frame: FrameType | None) -> None:
        if not self.is_training:
            os._exit(0)


class SafeStop(TrainerCallback):
    """Stop a training run safely: on all processes after the same step, with a checkpoint.

    If any process receives SIGTERM or SIGUSR1, the run finishes the current step and a due evaluation, saves a
    checkpoint and raises `Preempted`. The option `enable_jit_checkpoint` in transformers is not used: it saves in the
    middle of a step, so that a run cannot resume exactly, and processes may stop at different steps.

    A non-finite loss or weight also stops the run and is never saved. A checkpoint that cannot be written is removed.
    """

    def __init__(self) -> None:
        self.signals = PreemptionSignals()
        self._reset()

    def _reset(self) -> None:
        self.saving: Path | None = None  # the checkpoint that is being written, if any
        self._loss: Tensor | None = None  # sum of the losses of all batches of the current step
        self._number = 0  # number of the signal that all processes respond to, or 0
        self._save_strategy: SaveStrategy | str | None = None
        self._pending: tuple[Tensor, torch.cuda.Event] | None = None

    @contextmanager
    def guarding(self, args: TrainingArguments) -> Iterator[None]:
        """Record signals during training; raise `CheckpointError` if a checkpoint cannot be written."""
        self._reset()
        with self.signals.noted():
            try:
                yield
            except (OSError, SafetensorError, RuntimeError) as error:
                if self.saving is None or not args.should_save:
                    raise
                if (explained := checkpoint_error(self.saving, error)) is None:
                    raise
                raise explained from error
            finally:
                if self._save_strategy is not None:
                    args.save_strategy = self._save_strategy

    def start_saving(self, checkpoint: Path) -> None:
        """Record the checkpoint that is about to be written."""
        self.saving = checkpoint

    def add_loss(self, loss: Tensor) -> None:
        """Add the loss of a batch to the loss of the step, which is checked after the step."""
        self._loss = loss if self._loss is None else self._loss + loss

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # In every step, processes exchange the number of a received signal and the step number of a non-finite loss.
        numbers = torch.full((2,), self.signals.received, dtype=torch.int64, device=args.device)
        numbers[1] = 0 if self._loss is None else ~self._loss.isfinite() * state.global_step
        self._loss = None
        self._number, lost_step = self._exchange(numbers, args)
        check_loss(lost_step, args, kwargs["optimizer"])
        if not self._number:
            return
        control.should_training_stop = True
        # After the last step of an epoch, save later: after the evaluation at the end of the epoch.
        control.should_save = not float(state.epoch or 0.0).is_integer()
        if args.save_strategy == SaveStrategy.BEST:  # in this mode, transformers would only save the best checkpoint
            self._save_strategy, args.save_strategy = args.save_strategy, SaveStrategy.STEPS

    def on_epoch_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        if self._number:
            control.should_save = True

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        self.saving = None
        if not self._number:
            return
        PartialState().wait_for_everyone()
        message = (
            f"{signal.Signals(self._number).name} has ended the training after step {state.global_step} of "
            f"{state.max_steps}. {how_to_resume(args.output_dir)}"
        )
        if state.is_world_process_zero:
            logger.warning(message)
        raise Preempted(self._number, message)

    def check_numbers(
        self, args: TrainingArguments, step: int, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Raise `NotFiniteError` on all processes if any loss so far, or any current weight, is not finite."""
        _, lost_step = self._settle()  # ignore the received signal, which is exchanged again in later steps
        check_loss(lost_step, args, optimizer)
        # If the model is sharded, each process checks its own shards.
        weights = [own_part(parameter.detach()) for parameter in model.parameters()]
        is_lost = 1 - torch.stack([weight.isfinite().all() for weight in weights]).all().long()[None]  # (1,)
        if largest(is_lost.to(args.device), args).item():
            raise NotFiniteError(not_finite_message("weights", step, learning_rate(optimizer), args))

    def _exchange(self, numbers: Tensor, args: TrainingArguments) -> list[int]:
        """Exchange `numbers` between all processes and return their maximum.

        On a GPU, the exchange runs during the next step, and the function returns the maximum of the previous step.
        """
        numbers = largest(numbers, args)
        if numbers.device.type != "cuda":
            return numbers.tolist()
        earlier = self._settle()
        event = torch.cuda.Event()
        self._pending = numbers.to("cpu", non_blocking=True), event
        event.record()
        return earlier

    def _settle(self) -> list[int]:
        """Wait for the pending exchange of numbers and return its result, or zeros if no exchange is pending."""
        if self._pending is None:
            return [0, 0]
        (numbers, event), self._pending = self._pending, None
        event.synchronize()
        return numbers.tolist()


def check_loss(lost_step: int, args: TrainingArguments, optimizer: torch.optim.Optimizer) -> None:
    """Raise `NotFiniteError` if `lost_step`, the number of a step with a non-finite loss, is not 0."""
    if lost_step:
        raise NotFiniteError(not_finite_message("loss", lost_step, learning_rate(optimizer), args))


def largest(numbers: Tensor, args: TrainingArguments) -> Tensor:
    """Replace `numbers` by the maximum over all processes, in place."""
    if args.parallel_mode == ParallelMode.DISTRIBUTED:
        all_reduce(numbers, ReduceOp.MAX)
    return numbers


def learning_rate(optimizer: torch.optim.Optimizer) -> float:
    """Return the current learning rate, without the factors of layers."""
    group = optimizer.param_groups[0]
    return float(group["lr"]) / float(group.get("lr_scale", 1.0))
