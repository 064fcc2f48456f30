"""A budget in minutes: a few steps are timed, then size, batch, steps and schedule chosen to fit.

A size is preferred to a smaller one if it still gets the steps that its task needs: what a small model learns in many
steps is more than what a large one does in few. The table of the task has the sizes and the steps.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import Subset
from transformers import TrainerCallback, TrainerControl
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from ..arguments import ClassificationArguments
from ..checkpoints import on_first_process
from ..models import without_load_report
from ..publishing.report import evaluation_split
from ..tasks.base import Task
from ..trainer import HfViTTrainer
from .defaults import EVALUATIONS, Size


TIMING_SHARE = 0.08  # of the budget, which timing takes at most
EVALUATION_SHARE = 0.08  # of the budget, for evaluations before the report
EVALUATION_SECONDS = 2.0  # for the pictures of an evaluation, and a checkpoint beside it
REPORT_SECONDS = 8.0  # pictures, curves, card and saving
LEAST_TIMED, MOST_TIMED = 3, 50  # steps
LEAST_STEPS = 20  # of a training: a budget for fewer is refused
LEFT_OUT = 1  # of them, the first ones, which prepare memory and find images that were read ahead
TIMED_IMAGES = 32
VIEW_SHARE = 0.4  # of the budget, for the features of views of images that a frozen backbone sees once
LEAST_VIEWS, MOST_VIEWS = 2, 8


# Arguments of a trial, which evaluates, saves and reports nothing
TRIAL = {
    **dict.fromkeys(("eval_strategy", "logging_strategy"), IntervalStrategy.NO),
    "save_strategy": SaveStrategy.NO,
    "early_stopping_patience": None,
    **{"report_to": [], "push_to_hub": False, "disable_tqdm": True},
}


class Pace(NamedTuple):
    """Seconds of a step, of an image in an evaluation, and of a view whose features are stored, with its bytes."""

    step: float
    image: float
    view: float = 0.0
    view_bytes: int = 0


class Candidate(NamedTuple):
    """A size, None for one that is given, and how fast it is."""

    size: Size | None
    pace: Pace
    steps: int
    evaluations: int
    views: int = 0  # of each image, whose features are stored


@dataclass(frozen=True)
class Budget:
    """What a training may take.

    Args:
        seconds: All of it.
        num_scored: Evaluations of an image after the last step.
        num_validated: Images of each evaluation before; 0 without.
        num_probed: Images whose features a linear probe takes before the first step.
        num_trained: Images of a training whose features may be stored.
        batch: Images of a step.
        most_bytes: That stored features may take.
        clock: Tells how many seconds have gone by, the same on all processes.
    """

    seconds: float
    num_scored: int
    num_validated: int
    num_probed: int
    clock: Callable[[], float]
    num_trained: int = 0
    batch: int = 1
    most_bytes: float = 0.0

    def report_seconds(self, pace: Pace) -> float:
        """Returns what follows the last step."""
        return min(REPORT_SECONDS, 0.2 * self.seconds) + self.num_scored * pace.image

    def plan(self, size: Size | None, pace: Pace) -> Candidate:
        """Returns the steps and evaluations of a size that fit into what is left."""
        left = self.seconds - self.clock() - self.report_seconds(pace) - self.num_probed * pace.image
        evaluation = EVALUATION_SECONDS + self.num_validated * pace.image
        evaluations = 0
        if self.num_validated:
            evaluations = min(EVALUATIONS, int(EVALUATION_SHARE * self.seconds / evaluation))
        evaluations *= evaluations > 1  # one alone would be that of the report
        left -= evaluations * evaluation
        of_view = self.num_trained * pace.view
        views = self.count_views(pace, left) if of_view else 0
        return Candidate(size, pace, max(1, int((left - views * of_view) / pace.step)), evaluations, views)

    def count_views(self, pace: Pace, left: float) -> int:
        """Return how many views of each image to store: at most one per epoch, 0 if fewer than `LEAST_VIEWS` fit."""
        of_view, step_views = self.num_trained * pace.view, self.num_trained / self.batch * pace.step
        most = min(VIEW_SHARE * self.seconds / of_view, self.most_bytes / (self.num_trained * pace.view_bytes))
        views = int(min(most, MOST_VIEWS, left / (of_view + step_views)))
        return views if views >= LEAST_VIEWS else 0

    def choose(
        self, sizes: Sequence[Size | None], needed_steps: int, measure: Callable[[Size | None], Pace]
    ) -> Candidate:
        """Climbs the sizes, smallest first, as long as the next one still gets the steps that are needed.

        Args:
            sizes: What there is to choose from, at least one.
            needed_steps: Steps that a size must get to be preferred to a smaller one.
            measure: Times a few steps of a size.
        """
        deadline = self.clock() + TIMING_SHARE * self.seconds
        best = self.plan(sizes[0], measure(sizes[0]))
        stores = best.views > 0
        for size in sizes[1:]:
            # A larger one takes at least as long as this one has: by how much, the number of patches tells.
            growth = 1.0 if size is None or best.size is None else max(1.0, size.num_patches / best.size.num_patches)
            expected = LEAST_TIMED * best.pace.step * growth
            if best.steps / growth < needed_steps or self.clock() + expected > deadline:
                break
            candidate = self.plan(size, measure(size))
            if candidate.steps < needed_steps or (stores and not candidate.views):
                break
            best = candidate
        return self.plan(best.size, best.pace)


class StepTimes(TrainerCallback):
    """Notes when each step has ended, and ends the training when they have been timed for long enough.

    Args:
        seconds: That the steps are to take all together, if these are not `LEAST_TIMED` anyway.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        """Notes the time."""
        self.ends.append(time.perf_counter())
        is_enough = len(self.ends) > LEAST_TIMED and self.ends[-1] - self.ends[0] >= self.seconds
        control.should_training_stop = control.should_training_stop or is_enough

    def step(self) -> float:
        """Returns the mean time from the end of a step to that of the next, but for the first ones."""
        ends = self.ends[min(LEFT_OUT, len(self.ends) - 2) :]
        return (ends[-1] - ends[0]) / (len(ends) - 1)


def measure_pace(task: Task, seconds: float) -> Pace:
    """Trains some steps of a task whose data are loaded, as it will be trained, and evaluates a few images.

    Nothing of it stays: what is written goes into a folder that is deleted.

    Args:
        task: Its arguments are changed.
        seconds: That the steps may take; they are `LEAST_TIMED` at least.
    """
    args = task.args
    # All processes have to make as many; and the sizes of images that grow come in turn.
    is_fixed = args.world_size > 1 or args.progressive_sizes
    with tempfile.TemporaryDirectory() as folder:
        trial = {**TRIAL, "output_dir": folder, "max_steps": LEAST_TIMED + 1 if is_fixed else MOST_TIMED}
        for name, value in trial.items():
            setattr(args, name, value)
        task.options.whiten_patches = False  # which reads images, and changes no step's time
        if isinstance(task.options, ClassificationArguments):
            task.options.probe_classifier = False
        with without_load_report():  # which the training run reports
            trainer = task.make_trainer()
        trainer.pop_callback(PrinterCallback)
        times = StepTimes(seconds)
        trainer.add_callback(times)
        if args.cached_views:
            examples: Any = trainer.train_dataset.dataset
            few = examples.select(range(min(TIMED_IMAGES, len(examples))))
            trainer.train_dataset, trainer.feature_folder = replace(trainer.train_dataset, dataset=few), Path(folder)
        trainer.train()
        pace = Pace(times.step(), time_evaluation(task, trainer))
        if trainer.features is not None:
            count = args.cached_views * len(trainer.train_dataset)
            pace = pace._replace(view=trainer.features.seconds / count, view_bytes=trainer.features.size // count)
    return on_first_process(args, lambda: pace)


def time_evaluation(task: Task, trainer: HfViTTrainer) -> float:
    """Return the seconds per image of an evaluation, after a first batch, which also prepares kernels and memory."""
    examples = task.loaded.examples(evaluation_split(task.loaded.splits))
    count = min(TIMED_IMAGES, len(examples)) // 2 or 1
    trainer.model.eval()
    for _ in range(2):
        loader = trainer.get_test_dataloader(Subset(examples, range(count)))
        start = time.perf_counter()
        for batch in loader:
            trainer.prediction_step(trainer.model, batch, prediction_loss_only=False)
    return (time.perf_counter() - start) / count
