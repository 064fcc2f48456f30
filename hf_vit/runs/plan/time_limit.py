"""Seconds that are left for training steps within a time budget."""

import time
from typing import Any

from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from ...options.training_arguments import training_options_of
from .budget import Budget, Pace


MOST_DRIFT = 4.0  # maximum factor by which the machine may become slower or faster after its speed was measured


class TimeLimit(TrainerCallback):
    """Seconds that are left for training steps within a time budget, before the last evaluation and the report.

    Their times are estimated with the speed of the steps and evaluations so far.

    Args:
        budget: The time budget.
        pace: The speed that was measured before training.
        start: Time of `time.monotonic()` at which the budget starts.
    """

    def __init__(self, budget: Budget, pace: Pace, start: float) -> None:
        self.budget, self.pace, self.start = budget, pace, start
        self.image: float | None = None  # seconds per evaluated image, measured in the last evaluation
        self.evaluates = False  # whether the last step is followed by an evaluation

    def on_train_begin(self, args: TrainingArguments, *_: Any, **kwargs: Any) -> None:
        """Record whether the last step is followed by an evaluation."""
        self.evaluates = args.eval_strategy != IntervalStrategy.NO

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, *_: Any, metrics: dict[str, float], **kwargs: Any
    ) -> None:
        """Record the seconds per evaluated image."""
        passes = 1 + (training_options_of(args).ema_decay is not None)
        seconds = sum(value for name, value in metrics.items() if name.endswith("_runtime"))
        self.image = seconds / (passes * self.budget.num_validated)

    def left(self, step: float) -> float:
        """Return the seconds that are left for training steps, given the mean seconds per step so far."""
        drift = min(max(step / self.pace.step, 1 / MOST_DRIFT), MOST_DRIFT)
        pace = self.pace._replace(image=self.pace.image * drift if self.image is None else self.image)
        reserved = self.budget.report_seconds(pace) + self.evaluates * self.budget.evaluation_seconds(pace)
        return self.budget.seconds - (time.monotonic() - self.start) - reserved
