"""Keeps a training within its budget: the speed of a machine changes, so the steps follow what they have taken.

Each change of their number is noted as `length_changes`, so that what resumes or repeats the training does the same.
"""

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from ..checkpoints import read_state
from ..trainer import HfViTTrainer
from ..training_arguments import parse_changes
from .budget import LEAST_STEPS, Budget, Pace


FIRST_CHECK, INTERVAL = 0.15, 0.1  # of all steps
LEAST_CHANGE = 0.02  # of all steps
MOST_LENGTHENED = 2  # times the steps that were planned


class LengthChanges(TrainerCallback):
    """Changes the number of steps of a training after some of its steps.

    Args:
        trainer: Runs the training.
        checkpoint: That it resumes from.
    """

    def __init__(self, trainer: HfViTTrainer, checkpoint: str | None) -> None:
        self.trainer = trainer
        self.changes = parse_changes(trainer.args.length_changes)
        trainer.most_steps = max(self.changes.values(), default=0)
        if checkpoint is not None and self.changes:
            done = read_state(checkpoint)["global_step"]
            lengths = [length for step, length in sorted(self.changes.items()) if step <= done]
            trainer.args.max_steps = [trainer.args.max_steps, *lengths][-1]

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Changes it."""
        if state.global_step in self.changes:
            change_length(self.trainer, self.changes[state.global_step])


class KeepBudget(LengthChanges):
    """Gives a training that runs as many steps as still fit into its budget.

    Args:
        trainer: Runs the training.
        budget: What it may take.
        pace: As measured before.
        changed: Called after a change with the new number of steps.
    """

    def __init__(self, trainer: HfViTTrainer, budget: Budget, pace: Pace, changed: Callable[[int], None]) -> None:
        super().__init__(trainer, None)
        self.budget, self.pace, self.changed = budget, pace, changed
        self.start, self.next_check = 0.0, 0
        trainer.most_steps = MOST_LENGTHENED * trainer.args.max_steps

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Notes the time."""
        self.start, self.next_check = self.budget.clock(), max(1, round(FIRST_CHECK * state.max_steps))

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Changes the number of steps if those that are done took another time than was planned."""
        done = state.global_step
        if not self.next_check <= done < state.max_steps:
            return
        now = self.budget.clock()
        left = self.budget.seconds - now - self.budget.report_seconds(self.pace)
        steps = done + max(1, int(left * done / (now - self.start)))
        steps = max(LEAST_STEPS, min(steps, self.trainer.most_steps))
        self.next_check = done + max(1, round(INTERVAL * steps))
        if abs(steps - state.max_steps) > LEAST_CHANGE * state.max_steps:
            self.changes[done] = steps
            args.length_changes = [f"{step}:{length}" for step, length in self.changes.items()]
            super().on_step_end(args, state, control)
            self.changed(steps)


def change_length(trainer: HfViTTrainer, num_steps: int) -> None:
    """Gives a training that runs another number of steps, which schedule and evaluations follow from here on.

    Args:
        trainer: Runs the training.
        num_steps: All of them, more than are done and at most `trainer.most_steps`.
    """
    trainer.lengths[trainer.state.global_step] = num_steps
    trainer.args.max_steps = trainer.state.max_steps = num_steps
    trainer.state.compute_steps(trainer.args, num_steps)
