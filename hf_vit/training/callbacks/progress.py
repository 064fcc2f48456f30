"""Progress of a training run, which learning rates, batch transforms, evaluations and checkpoints follow."""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from ...outputs import write_atomically
from ...processes import on_first_process
from ..checkpoints import read_state
from .state import StatefulCallback


SCHEDULE = "schedule.json"  # file with the progress at each step of a run with a time limit
LEAST_STEPS = 20  # minimum number of steps of a run with a time limit, unless fewer are planned
MOST_SHARE = 1 - 1e-6  # maximum share before the last step
READINGS = 200  # approximate number of times that several processes exchange the elapsed time


class RunProgress(StatefulCallback):
    """Share of a training run that is done, in [0, 1], and the training time, including the time before a resume.

    The share increases evenly with the steps. If a resumed run has another number of steps, the rest of the run is
    spread evenly over the remaining steps. With a time limit, the share is the elapsed time divided by the available
    time, measured by the first process, and training stops when no time is left for another step. The shares are saved
    as schedule.json in checkpoints and with the model. A run that reads this file has the same shares.

    Args:
        file: The schedule.json of the run to repeat, if any.
        num_steps: Number of steps in the options of the run, which must be that of the run to repeat.

    Raises:
        ValueError: If the file is not that of a finished run, or has another number of steps.
    """

    def __init__(self, file: str | None = None, num_steps: int = -1) -> None:
        self.left: Callable[[float], float] | None = None
        self.given = {} if file is None else read_schedule(Path(file))
        if file is not None and self.given.get("end") is None:
            raise ValueError(
                f"recorded_schedule={file!r} does not exist, or is not the {SCHEDULE} of a finished run. Copy "
                f"{SCHEDULE} next to the recipe, or remove recorded_schedule from it."
            )
        if file is not None and num_steps != self.given["end"]:
            raise ValueError(
                f"max_steps={num_steps} differs from the {self.given['end']} steps of recorded_schedule={file!r}. "
                "Correct it, or remove recorded_schedule to plan the learning rates for another number of steps."
            )
        self.restore(None)

    def restore(self, checkpoint: Path | None) -> None:
        """Start a run, or continue the run of a checkpoint."""
        known = self.given if checkpoint is None else read_schedule(checkpoint / SCHEDULE)
        self.length = 0 if checkpoint is None else int(read_state(checkpoint)["max_steps"])
        self.planned = int(known.get("planned", self.length))  # number of steps for which learning rates were planned
        self.shares = {int(step): float(share) for step, share in known.get("shares", {0: 0.0}).items()}
        self.end: int | None = known.get("end")  # number of steps of the run, None if it depends on options or time
        self.available: float | None = known.get("available")  # seconds for training steps
        self.earlier = 0.0 if checkpoint is None else float(known.get("seconds", 0.0))
        self.start: float | None = None
        self.next_reading = 0
        self.is_published = self.end is not None
        self.events: dict[str, float] = {}  # shares of the run between logs, evaluations and checkpoints

    def limit(self, left: Callable[[float], float]) -> None:
        """Stop training when no time is left.

        `left` returns the seconds that are left for training steps, given the mean seconds per step so far.
        """
        self.left = left

    def finish(self, step: int) -> None:
        """End the run after a step."""
        self.end = step

    @property
    def is_timed(self) -> bool:
        """Whether the shares of the remaining steps depend on the time."""
        return self.end is None and (self.left is not None or self.available is not None)

    @property
    def seconds(self) -> float:
        """Training time in seconds so far."""
        return self.earlier + (0.0 if self.start is None else time.monotonic() - self.start)

    def count_steps(self, given: int, resumed_step: int) -> int:
        """Return the number of steps of the run, given the number in its options; an estimate with a time limit."""
        estimate = max(given, resumed_step + 1) if self.is_timed else given
        return estimate if self.end is None else self.end

    def plan(self, length: int, resumed_step: int) -> int:
        """Set the number of steps. Return the number for which learning rates are planned."""
        if self.length not in (0, length) and self.end is None and not self.is_timed:
            self.shares[resumed_step] = self.share(resumed_step)
        self.length, self.planned = length, self.planned or length
        return self.planned

    def share(self, step: int) -> float:
        """Return the share of the run that is done after `step` steps."""
        start, known = next(reversed(self.shares.items()))
        if step in self.shares or self.is_timed:
            return self.shares.get(step, known)
        return known + (step - start) * (1 - known) / max(self.length - start, 1)

    def follow(self, scheduler: LRScheduler) -> None:
        """Let a schedule follow the shares. Schedules that depend on scores stay unchanged."""

        def follow(factor: Callable[[Any], float], step: int) -> float:
            return factor(round(self.share(step) * self.planned, 9))  # whole numbers of steps stay exact

        if isinstance(scheduler, LambdaLR):
            scheduler.lr_lambdas = [partial(follow, factor) for factor in scheduler.lr_lambdas]

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Start the clock. If the steps have unequal shares, log, evaluate and save at shares of the run."""
        self.start = time.monotonic()
        if self.is_timed or self.end is not None:
            for event, kind in (("log", "logging"), ("evaluate", "eval"), ("save", "save")):
                every = vars(args)[f"{kind}_steps"]
                if vars(args)[f"{kind}_strategy"] == IntervalStrategy.STEPS and every < 1:
                    self.events[event] = every
                    setattr(state, f"{kind}_steps", sys.maxsize)

    def on_optimizer_step(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Read the clock, and end the run after this step if less than half of the time of another step is left."""
        if not self.is_timed:
            return
        step, share = state.global_step + 1, self.share(state.global_step)
        state.max_steps = max(state.max_steps, step + 1)
        if step >= self.next_reading:
            self.next_reading = step + 1 + (step // READINGS if args.world_size > 1 else 0)
            elapsed, left = on_first_process(args, lambda: self.read_clock(step))
            least, self.available = min(LEAST_STEPS, self.planned), elapsed + max(left, 0.0)
            share = max(share, round(min(elapsed / self.available, step / least, MOST_SHARE), 7))
            state.max_steps = step + max(1, round(left * step / elapsed))
            if step >= least and left < 0.5 * elapsed / step:
                share, self.end = 1.0, step
                args.max_steps = state.max_steps = step
        self.shares[step], self.is_published = share, True

    def read_clock(self, step: int) -> tuple[float, float]:
        """Return the elapsed and the remaining seconds after a step."""
        elapsed = self.seconds
        return elapsed, (self.available or 0.0) - elapsed if self.left is None else self.left(elapsed / step)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Log, evaluate and save at shares of the run."""
        for event, every in self.events.items():
            if int(self.share(state.global_step) / every) > int(self.share(state.global_step - 1) / every):
                setattr(control, f"should_{event}", True)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Stop the clock, and record the last step of a run that early stopping has ended."""
        if self.is_timed:
            self.end = args.max_steps = state.global_step
        self.earlier, self.start = self.seconds, None

    def save_state(self, folder: Path, is_writer: bool) -> None:
        """Save the shares and the training time."""
        if is_writer:
            folder.mkdir(parents=True, exist_ok=True)
            known = {"seconds": self.seconds, "shares": self.shares}
            known |= {name: vars(self)[name] for name in ("planned", "end", "available")}
            write_atomically(folder / SCHEDULE, json.dumps(known) + "\n")


def read_schedule(file: Path) -> dict[str, Any]:
    """Return the content of schedule.json, or an empty dictionary if there is no such file."""
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}
