"""Time budgets: time a few training steps, then choose model size, batch size, number of steps and schedule.

A larger model or image size is only chosen if the number of steps in defaults.yaml still fits into the budget, because
a small model learns more in many steps than a large model in few steps.
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

from ...data.datasets import TargetData
from ...processes import on_first_process
from ...tasks.common.arguments import ClassificationArguments
from ...tasks.common.defaults import EVALUATIONS, Size
from ...tasks.common.models import without_load_report
from ...training.trainer import HfViTTrainer
from ..assemble import build_run
from ..build import Run


TIMING_SHARE = 0.08  # maximum share of the time budget for timing steps
EVALUATION_SHARE = 0.08  # share of the budget for all evaluations before the final report
EVALUATION_SECONDS = 2.0  # estimated time in seconds to draw pictures and save a checkpoint at an evaluation
REPORT_SECONDS = 8.0  # estimated time in seconds to save the model and write pictures, curves and model card
LEAST_TIMED, MOST_TIMED = 3, 50  # minimum and maximum number of timed steps
STORING_GAIN = 1.75  # minimum factor by which stored features must increase the number of steps of a classifier
LEFT_OUT = 1  # number of initial steps that are not timed, because they allocate memory and use prefetched images
TIMED_IMAGES = 32
VIEW_SHARE = 0.4  # maximum share of the budget for computing features of frozen blocks
LEAST_VIEWS, MOST_VIEWS = 2, 8


# Training arguments that disable evaluation, checkpoints and reports in a timing run
TRIAL = {
    **dict.fromkeys(("eval_strategy", "logging_strategy"), IntervalStrategy.NO),
    "save_strategy": SaveStrategy.NO,
    "early_stopping_patience": None,
    **{"report_to": [], "push_to_hub": False, "disable_tqdm": True},
}


class Pace(NamedTuple):
    """Seconds per training step, per evaluated image and per stored view of an image, and bytes per stored view."""

    step: float
    image: float
    view: float = 0.0
    view_bytes: int = 0


class Candidate(NamedTuple):
    """Candidate size of model and images, with the measured speed. `size` is None if the user gave the size."""

    size: Size | None
    pace: Pace
    steps: int
    evaluations: int
    views: int = 0  # number of augmented views per image whose features are stored


@dataclass(frozen=True)
class Budget:
    """Time budget of a training run.

    Args:
        seconds: Total time in seconds, from the start of the process.
        num_scored: Number of images evaluated after the last step; an image evaluated twice counts twice.
        num_validated: Number of images per validation; 0 without validation images.
        num_probed: Number of images that are encoded before the first step to fit the linear probe.
        num_trained: Number of training images for which features may be stored.
        batch: Number of images per step.
        most_bytes: Maximum size of the stored features in bytes.
        clock: Function that returns the elapsed seconds, identical on all processes.
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
        """Return the estimated time in seconds from the last step to the end of the run."""
        return min(REPORT_SECONDS, 0.2 * self.seconds) + self.num_scored * pace.image

    def evaluation_seconds(self, pace: Pace) -> float:
        """Return the estimated time in seconds of an evaluation during training."""
        return EVALUATION_SECONDS + self.num_validated * pace.image

    def plan(self, size: Size | None, pace: Pace) -> Candidate:
        """Return the number of steps, evaluations and stored views of a size that fit into the remaining time."""
        left = self.seconds - self.clock() - self.report_seconds(pace) - self.num_probed * pace.image
        evaluation = self.evaluation_seconds(pace)
        evaluations = 0
        if self.num_validated:
            evaluations = min(EVALUATIONS, int(EVALUATION_SHARE * self.seconds / evaluation))
        evaluations *= evaluations > 1  # skip a single evaluation, because the report evaluates the last step
        left -= evaluations * evaluation
        of_view = self.num_trained * pace.view
        views = self.count_views(pace, left) if of_view else 0
        return Candidate(size, pace, max(0, int((left - views * of_view) / pace.step)), evaluations, views)

    def count_views(self, pace: Pace, left: float) -> int:
        """Return the number of views to store per image: at most one per epoch, 0 if fewer than `LEAST_VIEWS` fit."""
        of_view, step_views = self.num_trained * pace.view, self.num_trained / self.batch * pace.step
        most = min(VIEW_SHARE * self.seconds / of_view, self.most_bytes / (self.num_trained * pace.view_bytes))
        views = int(min(most, MOST_VIEWS, left / (of_view + step_views)))
        return views if views >= LEAST_VIEWS else 0

    def choose(
        self, sizes: Sequence[Size | None], needed_steps: int, measure: Callable[[Size | None], Pace]
    ) -> Candidate:
        """Choose the largest size for which `needed_steps` fit into the budget. Sizes are timed in ascending order.

        Args:
            sizes: Candidates in ascending order, at least one.
            needed_steps: Number of steps that must fit into the budget for a size to be preferred to a smaller one.
            measure: Function that times a few steps of a size.
        """
        deadline = self.clock() + TIMING_SHARE * self.seconds
        best = self.plan(sizes[0], measure(sizes[0]))
        stores = best.views > 0
        for size in sizes[1:]:
            # Estimate the time of a step at a larger size: it grows at least in proportion to the number of patches.
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
    """Record the time of each step, and stop training once the total time of the timed steps is long enough.

    Args:
        seconds: Minimum total time of the timed steps. At least `LEAST_TIMED` steps are timed.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        """Record the time of the step, and stop training if the timed steps took at least `seconds`."""
        self.ends.append(time.perf_counter())
        is_enough = len(self.ends) > LEAST_TIMED and self.ends[-1] - self.ends[0] >= self.seconds
        control.should_training_stop = control.should_training_stop or is_enough

    def step(self) -> float:
        """Return the mean seconds per step, excluding the first `LEFT_OUT` steps."""
        ends = self.ends[min(LEFT_OUT, len(self.ends) - 2) :]
        return (ends[-1] - ends[0]) / (len(ends) - 1)


def measure_pace(run: Run, seconds: float) -> Pace:
    """Train a model for a few steps, evaluate a few images, and return the measured times.

    All files are written to a temporary folder, which is deleted.

    Args:
        run: The run, with its data. Its training arguments are changed.
        seconds: Maximum time of the steps; at least `LEAST_TIMED` steps are run.
    """
    task, args = run.task, run.args
    # Fix the number of steps if it must be the same on all processes, or if all progressive sizes must be timed.
    is_fixed = args.world_size > 1 or args.progressive_sizes
    # Whitening and probing are skipped, because they do not change the time of a step.
    skipped = {"probe_classifier": False} if isinstance(task.options, ClassificationArguments) else {}
    task = replace(task, options=replace(task.options, whiten_patches=False, **skipped))
    with tempfile.TemporaryDirectory() as folder:
        trial = {**TRIAL, "output_dir": folder, "max_steps": LEAST_TIMED + 1 if is_fixed else MOST_TIMED}
        for name, value in trial.items():
            setattr(args, name, value)
        with without_load_report():  # hide the loading report, which the training run prints later
            trainer = build_run(replace(run, task=task)).trainer
        trainer.pop_callback(PrinterCallback)
        times = StepTimes(seconds)
        trainer.add_callback(times)
        if args.cached_views and trainer.parts:
            raise ValueError("cached_views of a multi-task model needs a given number of steps. Set --max_steps.")
        if args.cached_views:
            trainer.open_features(TIMED_IMAGES, report=lambda _: None, folder=Path(folder))
        trainer.train()
        pace = Pace(times.step(), time_evaluation(run.data, trainer))
        for features in trainer.stored.values():
            count = args.cached_views * len(features.dataset)
            pace = pace._replace(view=features.seconds / count, view_bytes=features.size // count)
    return on_first_process(args, lambda: pace)


def time_evaluation(data: TargetData, trainer: HfViTTrainer) -> float:
    """Return the seconds per image of an evaluation. The first batch, which allocates memory, is not timed.

    For a multi-task model, only the first head is timed.
    """
    trainer = next(iter(trainer.parts.values()), trainer)
    examples = data.examples(data.evaluated_split)
    count = min(TIMED_IMAGES, len(examples)) // 2 or 1
    trainer.model.eval()
    for _ in range(2):
        loader = trainer.get_test_dataloader(Subset(examples, range(count)))
        start = time.perf_counter()
        for batch in loader:
            trainer.prediction_step(trainer.model, batch, prediction_loss_only=False)
    return (time.perf_counter() - start) / count
