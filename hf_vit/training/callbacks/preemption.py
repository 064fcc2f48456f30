"""What ends a training before its time: signals, numbers that are not finite, checkpoints that cannot be written."""

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

from ..errors import NotFiniteError, Preempted, describe_lost_numbers, how_to_resume, unwritten_checkpoint
from .ema import own_part


logger = logging.get_logger(__name__)

# What SLURM, Kubernetes and torchrun send, and what SLURM sends before the time is up (--signal=USR1@120). Not SIGINT:
# who presses Ctrl-C wants an end at once. Windows has no SIGUSR1.
STOP_SIGNALS = tuple(number for number in signal.Signals if number.name in ("SIGTERM", "SIGUSR1"))


class PreemptionSignals:
    """Notes signals that ask a training to end."""

    def __init__(self) -> None:
        self.received = 0
        # In shared memory, so that worker processes see it.
        self.is_training = torch.zeros((), dtype=torch.int64).share_memory_()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Notes signals in `received` rather than die of them, in the main thread, where alone Python allows it.

        One that comes too late for the training to see it counts as if it had come after it.
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
        # Not another of them: torchrun and SLURM may both send one.
        self.received = self.received or number


@dataclass(frozen=True)
class WorkerStart:
    """Starts a worker process of a loader, which a signal to all processes shall not end before the training.

    The training still needs the rest of its batch. It ends its workers by SIGTERM too, when it is no longer running.
    """

    is_training: torch.Tensor  # tells the worker so, in shared memory
    before: Callable[[int], None] | None  # what else starts a worker

    def __call__(self, worker: int) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, self._end)
        if self.before is not None:
            self.before(worker)

    def _end(self, number: int, frame: FrameType | None) -> None:
        if not self.is_training:
            os._exit(0)


class SafeStop(TrainerCallback):
    """Ends a training in good order, on all processes after the same step, with nothing lost.

    At SIGTERM or SIGUSR1, to one of the processes or to all, the training finishes the step, and the evaluation that
    is due after it, saves a checkpoint and raises `Preempted`. (The library's `enable_jit_checkpoint` saves in the
    middle of a step, from where a training cannot resume exactly, and its processes do not agree on the step.)

    A loss or weights that are not finite end it too, and are never saved. A checkpoint that cannot be written is
    removed.
    """

    def __init__(self) -> None:
        self.signals = PreemptionSignals()
        self._reset()

    def _reset(self) -> None:
        self.saving: Path | None = None  # the checkpoint that is being written
        self._loss: Tensor | None = None  # of the batches of this step
        self._number = 0  # of the signal that all processes know of
        self._save_strategy: SaveStrategy | str | None = None
        self._pending: tuple[Tensor, torch.cuda.Event] | None = None

    @contextmanager
    def guarding(self, args: TrainingArguments) -> Iterator[None]:
        """Notes signals while a training lasts; raises `CheckpointError` if a checkpoint cannot be written."""
        self._reset()
        with self.signals.noted():
            try:
                yield
            except (OSError, SafetensorError, RuntimeError) as error:
                if self.saving is None or not args.should_save:
                    raise
                if (explained := unwritten_checkpoint(self.saving, error)) is None:
                    raise
                raise explained from error
            finally:
                if self._save_strategy is not None:
                    args.save_strategy = self._save_strategy

    def add_loss(self, loss: Tensor) -> None:
        """Takes the loss of a batch, which is looked at after the step."""
        self._loss = loss if self._loss is None else self._loss + loss

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # Of a signal and of a lost loss; signals stay, so that a process that has one tells of it at every step.
        numbers = torch.full((2,), self.signals.received, dtype=torch.int64, device=args.device)
        numbers[1] = 0 if self._loss is None else ~self._loss.isfinite() * state.global_step
        self._loss = None
        self._number, lost_step = self._exchange(numbers, args)
        check_loss(lost_step, args, kwargs["optimizer"])
        if not self._number:
            return
        control.should_training_stop = True
        # The last step of an epoch saves when the epoch has ended, with the evaluation that is due then.
        control.should_save = not float(state.epoch or 0.0).is_integer()
        if args.save_strategy == SaveStrategy.BEST:  # would leave out a checkpoint that is not the best
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
        """Raises `NotFiniteError` on all processes if the loss so far, or a weight of one, is not finite."""
        _, lost_step = self._settle()  # every later step tells of a signal again
        check_loss(lost_step, args, optimizer)
        # Of a sharded model, the shard of this process.
        weights = [own_part(parameter.detach()) for parameter in model.parameters()]
        is_lost = 1 - torch.stack([weight.isfinite().all() for weight in weights]).all().long()[None]  # (1,)
        if largest(is_lost.to(args.device), args).item():
            raise NotFiniteError(describe_lost_numbers("weights", step, learning_rate(optimizer), args))

    def _exchange(self, numbers: Tensor, args: TrainingArguments) -> list[int]:
        """Returns the largest numbers of all processes: on a CPU of this step, from a GPU of the step before.

        Those have arrived while the GPU worked on another step, so that nobody waits for it.
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
        """Waits for the numbers that have not been looked at yet, and returns them; zeros if there are none."""
        if self._pending is None:
            return [0, 0]
        (numbers, event), self._pending = self._pending, None
        event.synchronize()
        return numbers.tolist()


def check_loss(lost_step: int, args: TrainingArguments, optimizer: torch.optim.Optimizer) -> None:
    """Raises `NotFiniteError` if there is a step whose loss is not finite; 0 is none."""
    if lost_step:
        raise NotFiniteError(describe_lost_numbers("loss", lost_step, learning_rate(optimizer), args))


def largest(numbers: Tensor, args: TrainingArguments) -> Tensor:
    """Returns the largest of the numbers of all processes, in their place."""
    if args.parallel_mode == ParallelMode.DISTRIBUTED:
        all_reduce(numbers, ReduceOp.MAX)
    return numbers


def learning_rate(optimizer: torch.optim.Optimizer) -> float:
    """Returns the learning rate of layers without a factor of their own."""
    group = optimizer.param_groups[0]
    return float(group["lr"]) / float(group.get("lr_scale", 1.0))
