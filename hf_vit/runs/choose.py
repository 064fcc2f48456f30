"""Choose settings of a trained model on held-out images: weights, scale, calibration and score threshold."""

from dataclasses import replace
from typing import Any

from ..data.datasets import TargetDataset
from ..tasks.base import Choice
from ..tasks.common.load_data import CALIBRATION_SPLIT, chooses_step
from ..training.finetuning.from_probe import count_compared_images
from .build import Run


def can_calibrate(run: Run) -> bool:
    """Return whether scores are calibrated on validation images, which requires other images for reported scores."""
    return run.task.has_scores and run.task.options.calibrate and {"validation", "test"} <= set(run.data.splits)


def count_choosing_images(run: Run, num_trained: int) -> int:
    """Return the maximum number of images evaluated to make choices after training, excluding the report.

    Args:
        run: The run.
        num_trained: Total number of images in all training steps.
    """
    task, data = run.task, run.data
    passes = can_calibrate(run) + (task.chooses_threshold and "validation" in data.splits)
    own = task.count_choosing_images(data, run.args, num_trained) + count_compared_images(task, data)
    return own + (passes * data.count_evaluated("validation") if passes else 0)


def choose(run: Run) -> Choice:
    """Choose the settings of the trained model of a run."""
    task, data, trainer = run.task, run.data, run.trainer
    for head in run.heads.values():
        head.trainer.follow(trainer.state)
        choose(replace(head, probe=None))  # interpolating a probe would change the shared weights
    if run.heads:
        trainer.plain_model.update_heads({name: head.trainer.processing_class for name, head in run.heads.items()})
        return Choice()
    choices = [] if run.probe is None else [run.probe.choose(trainer)]
    choices.append(task.choose(trainer, data))
    is_calibrated = can_calibrate(run) and trainer.calibrate_if_possible(data)
    if task.chooses_threshold:
        trainer.choose_threshold()
    if is_calibrated:
        # The threshold may have been chosen on other images.
        separate = data.examples(CALIBRATION_SPLIT) if CALIBRATION_SPLIT in data.splits else None
        complete_calibration(trainer, separate)
    rows = {name: row for choice in choices for name, row in choice.rows.items()}
    return Choice(" ".join(choice.text for choice in choices if choice.text), rows)


def complete_calibration(trainer: Any, examples: TargetDataset | None = None) -> None:
    """Add calibration values that depend on calibrated scores, after the trainer has chosen the threshold.

    The values are computed from predictions for `examples`, by default from the last predictions.
    """
    if examples is not None and trainer.evaluator.completes_calibration:
        with trainer.evaluating_with(trainer.evaluator):
            trainer.predict(examples, metric_key_prefix=CALIBRATION_SPLIT)
    model = trainer.plain_model
    model.config.calibration_config = trainer.evaluator.complete_calibration(model.calibration)


def describe_held_out(run: Run) -> str:
    """Return a description of the held-out training images and their purpose."""
    if run.heads:
        return "; ".join(f"of {name}, {describe_held_out(head)}" for name, head in run.heads.items())
    data, held_out_for = run.data, run.task.held_out_for(run.args)
    if not data.division.holds_out:
        return "no training images are held out"
    purposes = [
        *(["choose the best step"] if chooses_step(run.args) else []),
        *([held_out_for] if held_out_for else []),
        *([] if "test" in data.splits else ["are evaluated at the end"]),
    ]
    as_test = "; the validation split is used as test split" if data.division.validation_as_test else ""
    return f"those for validation are held out, and {' and '.join(purposes) or 'follow the training'}{as_test}"
