"""Plan or execute a training run, given option values."""

import json
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from accelerate import PartialState
from safetensors import SafetensorError
from torch.utils.data import IterableDataset
from transformers import TrainerState, TrainingArguments, set_seed
from transformers.trainer_utils import SaveStrategy
from transformers.utils import logging

from ..data.checks import check_output_outside_data
from ..options.field import Names
from ..options.recipe import RECIPE_NAME, recipe_text, savable_values, with_recipe
from ..options.resolve import resolve
from ..options.training_arguments import HfViTTrainingArguments
from ..outputs import check_writable, file_name, free_folder, last_folder, write_atomically
from ..processes import on_first_process
from ..tasks import TASKS
from ..tasks.base import Task
from ..tasks.common.arguments import split_sources
from ..tasks.common.models import check_architecture, check_head
from ..training.callbacks.progress import SCHEDULE
from ..training.callbacks.state import Conditions, StepReport
from ..training.distillation import check_projection
from ..training.errors import (
    CheckpointError,
    ExampleError,
    NotFiniteError,
    Preempted,
    as_sentence,
    format_bytes,
    how_to_resume,
    short_message,
)
from ..training.lora import count_parameters
from ..training.output_folder import checkpoint_to_resume, lock_output_folder
from ..training.trainer import HfViTTrainer
from .assemble import build_run, open_run
from .build import Run
from .choose import choose, describe_held_out
from .conditions import describe_arguments, find_changes, find_conditions
from .plan.plan import Planner, describe_few_steps
from .plan.time_limit import TimeLimit
from .report import count_examples, describe_targets, write_report
from .report_heads import write_report_of_heads


logger = logging.get_logger(__name__)
# Maximum number of values that an optimizer stores per trained weight: AdamW stores two averages.
NUMBERS_OF_OPTIMIZER = 2
OUTPUT_FILES = "the model with its processor and code, scores, predictions, pictures, its card and recipe.yaml"


def run(
    task_class: type[Task], values: Mapping[str, Any], report: Callable[[str], None], program: Sequence[str] = ()
) -> None:
    """Call `train`. If an error occurs, exit with a one-line message."""
    with ExitStack() as stack:
        with one_line_errors(ValueError, OSError, ImportError):
            prepared = prepare(task_class, values, stack, report, program)
        with one_line_errors(NotFiniteError, OSError):
            complete(prepared)


def train(
    task_class: type[Task], values: Mapping[str, Any], report: Callable[[str], None], program: Sequence[str] = ()
) -> "Training":
    """Train, evaluate, save and, if requested, publish a model.

    Args:
        task_class: Task of the model.
        values: Option values by name. They override the values of the option `recipe`, if given.
        report: Function that prints lines of progress, called on the first process.
        program: Words at the start of the equivalent `hf-vit` command, which the model card shows; empty for a script.

    Returns:
        The finished run with its scores. A dry run returns no scores and writes nothing.

    Raises:
        ValueError: If an option, the data or the model is invalid. No model is saved in this case.
        OSError: If a file is missing or cannot be written, or an example cannot be read.
        ImportError: If a package is missing.
        NotFiniteError: If the loss becomes infinite or NaN.
    """
    with ExitStack() as stack:
        prepared = prepare(task_class, values, stack, report, program)
        complete(prepared)
    return prepared


@dataclass
class Training:
    """A training run that is ready to start, or has finished.

    Args:
        run: Specification, data and trainer.
        planner: Planner of the run.
        checkpoint: Checkpoint to resume from, None for a new run.
        command: Command that repeats the run.
        report: Function that prints lines of progress.
        scores: Scores of the trained model.
    """

    run: Run
    planner: Planner
    checkpoint: str | None
    command: str
    report: Callable[[str], None]
    scores: dict[str, float] = field(default_factory=dict)


def prepare(
    task_class: type[Task],
    values: Mapping[str, Any],
    stack: ExitStack,
    report: Callable[[str], None],
    program: Sequence[str] = (),
) -> Training:
    """Check everything before training, and lock the output folder while `stack` is open.

    Raises:
        ValueError: If an option, the data or the model is invalid.
        OSError: If a file is missing, or the output folder is not writable.
        ImportError: If a package is missing.
    """
    given = with_output_dir(task_class, resolve(task_class.argument_types(), with_recipe(values)))
    if given.get("dry_run"):
        given["push_to_hub"] = False  # a dry run must not create a repository on the Hub
    task, args = task_class.from_options(given)
    check_output_outside_data(task.options.sources, args.output_dir)
    check_writable(Path(args.output_dir))
    stack.enter_context(lock_output_folder(args))
    report = report if args.process_index == 0 else lambda _: None
    # The recipe of a multi-task model contains the data of its heads, so it does not disable default hyperparameters.
    has_recipe = values.get("recipe") is not None and task_class.pipeline != "multi-task"
    planner = Planner(task, args, given, report, has_recipe=has_recipe)
    checkpoint = checkpoint_to_resume(args)
    chosen = planner.start(checkpoint)
    run = Run(**planner.with_chosen(chosen))
    task, args = run.task, run.args
    if checkpoint is not None:
        check_architecture(checkpoint, task.model_class, task.options)
        begun = describe_arguments(task, args)
        on_first_process(args, lambda: find_changes(task, args, begun, checkpoint))
    run = open_run(run)
    if checkpoint is None:
        chosen = planner.plan(run)
        run = replace(run, **planner.with_chosen(chosen))
        args = run.args
    described = describe_arguments(run.task, args)
    set_seed(args.seed)
    run = build_run(run)
    trainer = run.trainer
    conditions = on_first_process(args, lambda: find_conditions(run, described, checkpoint))
    trainer.add_callback(Conditions({**conditions, "chosen": chosen}))
    if checkpoint is not None:
        check_head(checkpoint, trainer.model)
        check_projection(checkpoint, trainer.distillation)
    command = shlex.join(command_line(task_class, {**values, "output_dir": args.output_dir}, program, args.world_size))
    recipe = planner.recipe(chosen)
    if trainer.is_world_process_zero() and not args.dry_run:
        write_recipe(args, recipe)
    report_plan(run, report)
    if args.dry_run:
        report(describe_plan(run, recipe))
    return Training(run, planner, checkpoint, command, report)


def with_output_dir(task_class: type[Task], given: dict[str, Any]) -> dict[str, Any]:
    """Return the options with `output_dir`: the given folder, the folder of the resumed run, or a new folder.

    All processes choose the same folder, because it is only created after the processes have synchronized.
    """
    if "output_dir" in given or not given.get("dataset_name"):
        return given
    first = file_name(split_sources(given["dataset_name"])[0])
    named = Path("outputs") / f"{first}-{get_name(task_class)}"
    resumed = given.get("resume_from_checkpoint")
    if resumed is None:
        folder = free_folder(named)
    elif resumed.lower() in ("last", "true"):
        folder = last_folder(named)
    else:
        folder = Path(resumed).parent
    return {**given, "output_dir": str(folder)}


def write_recipe(args: HfViTTrainingArguments, recipe: Mapping[str, Any]) -> None:
    """Write the recipe of a training run to its output folder."""
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / RECIPE_NAME, recipe_text(recipe))


def get_name(task_class: type[Task]) -> str:
    """Return the name of a task, as used in commands."""
    return next(name for name, task in TASKS.items() if task is task_class)


def report_plan(run: Run, report: Callable[[str], None]) -> None:
    """Report the model, the training data and the output folder of a run."""
    sizes = ", ".join(f"{count:,} for {name}" for name, count in count_examples(run).items())
    report(f"{run.task.examples.capitalize()}: {sizes}; {describe_held_out(run)}.")
    if targets := describe_targets(run):
        report(targets)
    report(f"Model: {count_parameters(run.trainer.model):,} parameters. Output: {run.args.output_dir}")


def complete(training: Training) -> None:
    """Train, evaluate, save and, if requested, publish a model, unless in a dry run. Raises the errors of `train`."""
    args = training.run.args
    if args.dry_run:
        return
    try:
        finish(training)
    except Preempted:
        PartialState().destroy_process_group()
        raise
    except (CheckpointError, ExampleError):  # the messages of these errors already explain how to resume
        raise
    except (OSError, SafetensorError) as error:
        raise OSError(f"{as_sentence(error)} {how_to_resume(args.output_dir)}") from error
    try:
        if args.push_to_hub:
            training.run.trainer.push_to_hub()
    finally:
        PartialState().destroy_process_group()  # otherwise several processes can abort while they exit


def finish(training: Training) -> None:
    """Train a model, resuming from the checkpoint if there is one. Evaluate and save the model."""
    run, report, planner = training.run, training.report, training.planner
    trainer, args, options = run.trainer, run.args, run.task.options
    if planner.budget is not None and not trainer.is_deepspeed_enabled:  # DeepSpeed creates the schedule
        limit = TimeLimit(*planner.budget, planner.started)
        trainer.add_callback(limit)
        trainer.progress.limit(limit.left)
    if planner.budget is None and trainer.is_world_process_zero():
        trainer.add_callback(StepReport(report, partial(describe_few_steps, run.task)))
    if args.cached_views:
        trainer.open_features(report=report)
    result = trainer.train(resume_from_checkpoint=training.checkpoint)
    choice = choose(run)  # choose before saving, because the choice changes the saved model
    if choice.text:
        report(choice.text)
    trainer.save_model(_internal_call=True)  # upload after the report, which a failed upload would prevent
    trainer.save_state()
    if trainer.is_world_process_zero() and trainer.progress.end is not None:
        recorded = {"max_steps": trainer.progress.end, "recorded_schedule": SCHEDULE}
        write_recipe(args, planner.recipe(trainer.conditions["chosen"]) | recorded)
    trainer.save_metrics("train", result.metrics)
    facts = {"command": training.command, "license": options.license, "base_model": options.model_name_or_path}
    warnings = describe_few_steps(run.task, trainer.state.max_steps)
    write = write_report_of_heads if run.heads else write_report
    training.scores = write(replace(run, rows=choice.rows), warnings, **facts)
    if trainer.is_world_process_zero():
        report(f"Scores: {joined(training.scores)}")
        if trainer.average is not None:
            averaged = {name: value for name, value in trainer.averaged_scores.items() if name in training.scores}
            report(f"Averaged weights: {joined(averaged)}")
        report(f"The model, its scores and its card: {args.output_dir}")


def joined(scores: dict[str, float]) -> str:
    """Return scores as one line of text."""
    return ", ".join(f"{name} {value:.4f}" for name, value in scores.items())


def command_line(
    task_class: type[Task], values: Mapping[str, Any], program: Sequence[str], world_size: int
) -> list[str]:
    """Return the command that repeats the run with the same number of processes and machines. Secrets are omitted."""
    types = task_class.argument_types()
    shared = savable_values(values, types)
    recipe = {"recipe": shared.pop("recipe")} if "recipe" in shared else {}
    words = [word for name, value in (recipe | resolve(types, shared)).items() for word in words_of(name, value)]
    if world_size == 1:
        return ["hf-vit", *program, *words] if program else ["python", sys.argv[0], *words]
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    nodes = [] if processes == world_size else ["--nnodes", str(world_size // processes)]
    launcher = ["torchrun", *nodes, "--nproc_per_node", str(processes)]
    return [*launcher, *(["-m", "hf_vit", *program] if program else [sys.argv[0]]), *words]


def words_of(name: str, value: Any) -> list[str]:
    """Return the command-line words that set an option."""
    is_list = isinstance(value, list | tuple) and not isinstance(value, Names)
    return [f"--{name}", *map(as_word, value if is_list else [value])]


def as_word(value: Any) -> str:
    """Return a value as one command-line word."""
    if isinstance(value, Names) and not any(re.search(r"^\[|,", item) for item in value):
        return ",".join(value)
    return value if isinstance(value, str) else json.dumps(value)


@contextmanager
def one_line_errors(*errors: type[Exception]) -> Iterator[None]:
    """Context manager that exits with one line of text for errors that a user can fix."""
    try:
        yield
    except errors as error:
        is_on_all = isinstance(error, NotFiniteError)
        sys.exit(one_line(error) if not is_on_all or PartialState().process_index == 0 else 1)


def one_line(error: Exception) -> str:
    """Return an error as one line; the traceback is logged at debug level of `transformers.logging`."""
    logger.debug("Traceback of the error:", exc_info=error)
    return f"{os.path.basename(sys.argv[0])}: {short_message(error)}"


def describe_plan(run: Run, recipe: Mapping[str, Any]) -> str:
    """Return a description of the planned run, one fact per line.

    Args:
        run: A run that is ready to start.
        recipe: Options that the user gave or that were chosen, see `Planner.recipe`.
    """
    trainer, args, config = run.trainer, run.args, run.trainer.model.config
    _, per_epoch, *_, steps = trainer.set_initial_training_values(args, trainer.get_train_dataloader())
    batch = args.images_per_step
    size = "x".join(map(str, config.image_size)) if isinstance(config.image_size, list | tuple) else config.image_size
    is_stream = isinstance(trainer.train_dataset, IterableDataset)
    epochs = "" if is_stream else f" ({steps / per_epoch:.3g} epochs of {per_epoch:,})"
    chosen = yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True, default_flow_style=True, width=math.inf)
    return "\n".join(
        [
            *([f"Data: {' '.join(run.notes)}"] if run.notes else []),
            f"Model: {type(trainer.model).__name__}, {config.num_hidden_layers} layers of width {config.hidden_size}, "
            f"images of {size} pixels.",
            f"Steps: {steps:,}{epochs}, {batch} images each.",
            f"Options: {chosen.strip().strip('{}')}",
            f"Written to {args.output_dir}: {OUTPUT_FILES}.",
            describe_space(trainer, steps, per_epoch),
            "This was a dry run: nothing is written.",
        ]
    )


def describe_space(trainer: HfViTTrainer, steps: int, per_epoch: int) -> str:
    """Return a sentence about the disk space that the model and its checkpoints need at most, and the free space."""
    args: TrainingArguments = trainer.args
    sizes = [
        (weights.numel() * weights.element_size(), weights.requires_grad) for weights in trainer.model.parameters()
    ]
    model = sum(size for size, _ in sizes)
    checkpoint = model + NUMBERS_OF_OPTIMIZER * sum(size for size, is_trained in sizes if is_trained)
    if trainer.average is not None:
        model, checkpoint = 2 * model, checkpoint + model
    kept = count_checkpoints(args, steps, per_epoch)
    needed = model + kept * checkpoint
    nearest = next(place for place in [*Path(args.output_dir).absolute().parents] if place.exists())
    free = shutil.disk_usage(nearest).free
    verdict = "" if free > needed else f" Free {format_bytes(needed - free)} more, or reduce save_total_limit."
    many = f" and {kept} of its checkpoints, {format_bytes(checkpoint)} each" if kept else ""
    return f"Space: about {format_bytes(needed)} for the model{many}; {format_bytes(free)} are free.{verdict}"


def count_checkpoints(args: TrainingArguments, steps: int, per_epoch: int) -> int:
    """Return the maximum number of checkpoints on disk at the same time."""
    if args.save_strategy == SaveStrategy.NO:
        return 0
    state = TrainerState()
    state.compute_steps(args, steps)
    made = math.ceil(steps / (per_epoch if args.save_strategy == SaveStrategy.EPOCH else state.save_steps))
    # Count one checkpoint more than the limit, because a new checkpoint is written before an old one is deleted.
    return made if args.save_total_limit is None else min(made, args.save_total_limit + 1)
