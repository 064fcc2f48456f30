"""Keep a training run within its time budget by adapting the number of steps to the measured speed.

Each change is recorded in `length_changes`, so that a resumed or repeated run makes the same changes.
"""

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from ...options.training_arguments import parse_changes
from ...training.checkpoints import read_state
from ...training.trainer import HfViTTrainer
from .budget import LEAST_STEPS, Budget, Pace


# Step of the first check of the speed, and number of steps between checks, as shares of all steps
FIRST_CHECK, INTERVAL = 0.15, 0.1
LEAST_CHANGE = 0.02  # minimum change of the number of steps, as a share of this number
MOST_LENGTHENED = 2  # maximum number of steps of a run, divided by the planned number


class LengthChanges(TrainerCallback):
    """Change the total number of steps of a run at the steps listed in its training arguments.

    Args:
        trainer: The trainer.
        checkpoint: Checkpoint to resume from, if any.
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
        """Change the total number of steps if a change is listed for this step."""
        if state.global_step in self.changes:
            change_length(self.trainer, self.changes[state.global_step])


class KeepBudget(LengthChanges):
    """Adapt the number of steps of a run to the time that remains in its budget.

    Args:
        trainer: The trainer.
        budget: The time budget.
        pace: The measured speed.
        changed: Function that is called with the new number of steps after a change.
    """

    def __init__(self, trainer: HfViTTrainer, budget: Budget, pace: Pace, changed: Callable[[int], None]) -> None:
        super().__init__(trainer, None)
        self.budget, self.pace, self.changed = budget, pace, changed
        self.start, self.next_check = 0.0, 0
        trainer.most_steps = MOST_LENGTHENED * trainer.args.max_steps

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Record the start time of the training run."""
        self.start, self.next_check = self.budget.clock(), max(1, round(FIRST_CHECK * state.max_steps))

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Change the total number of steps if the finished steps were faster or slower than planned."""
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
    """Change the number of steps of a running trainer, and adapt its schedule and evaluations.

    Args:
        trainer: The trainer.
        num_steps: New total number of steps, above the number of finished steps and at most `trainer.most_steps`.
    """
    trainer.lengths[trainer.state.global_step] = num_steps
    trainer.args.max_steps = trainer.state.max_steps = num_steps
    trainer.state.compute_steps(trainer.args, num_steps)
