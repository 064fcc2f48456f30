"""Runs a training or an evaluation by the arguments of a command line."""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import PartialState
from safetensors import SafetensorError
from transformers import set_seed
from transformers.utils import logging

from ..model.pretrained import read_config
from ..outputs import check_outputs, check_writable, free_folder, last_folder, record_outputs
from .arguments import ImageDataArguments, split_sources
from .callbacks.clock import StepReport
from .conditions import check_changes, describe_arguments, describe_data, with_changes
from .distillation.base import check_projection
from .dry_run import describe_plan
from .errors import (
    CheckpointError,
    ExampleError,
    NotFiniteError,
    NoUpdateError,
    Preempted,
    as_sentence,
    how_to_resume,
    in_one_line,
)
from .lora import count_parameters
from .models import check_architecture, check_head
from .planning.keep_budget import KeepBudget, LengthChanges
from .planning.plan import Planner, warn_of_few_steps
from .recipe import (
    Arguments,
    as_words,
    make_parser,
    parse_arguments,
    split_recipe,
    start_recipe,
    without_secrets,
)
from .saving.checkpoints import on_first_process
from .saving.output_files import evaluation_files
from .saving.output_folder import checkpoint_to_resume, occupied
from .tasks import TASKS
from .tasks.base import EvaluatedModel, EvaluationArguments, Task, file_name
from .trainer import HfViTTrainer


logger = logging.get_logger(__name__)
TOLD_CHANGE = 0.1  # of the steps


def run(
    task_class: type[Task],
    arguments: Arguments,
    description: str | None,
    report: Callable[[str], None],
    program: Sequence[str] = (),
) -> None:
    """Trains, evaluates, saves and, on request, publishes; exits with one line about what is wrong before that.

    Args:
        task_class: What to train.
        arguments: The command line without the program's name.
        description: Beginning of `--help`.
        report: Tells the user how it goes; called on the first process.
        program: See `train`.
    """
    with ExitStack() as stack:
        with one_line_errors(ValueError, OSError, ImportError):
            training = prepare(task_class, arguments, stack, report, description, program)
        with one_line_errors(NotFiniteError, NoUpdateError, OSError):
            complete(training)


def train(
    task_class: type[Task], arguments: Arguments, report: Callable[[str], None], program: Sequence[str] = ()
) -> "Training":
    """Trains, evaluates, saves and, on request, publishes.

    Args:
        task_class: What to train.
        arguments: As of a command line; the first may be a recipe, as a file or as a mapping.
        report: Tells the user how it goes; called on the first process.
        program: Words of the command `hf-vit` that do the same, for the card; none for the script that runs.

    Returns:
        The training that has ended, with its scores; if it is a dry run it has none, and nothing is written.

    Raises:
        ValueError: if an option, the data or the model is bad, or no step changes the weights; no model is saved then.
        OSError: if a file is missing or cannot be written, or an example cannot be read.
        ImportError: if a package is missing.
        NotFiniteError: if the loss becomes infinite or NaN.
    """
    with ExitStack() as stack:
        training = prepare(task_class, arguments, stack, report, None, program)
        complete(training)
    return training


@dataclass
class Training:
    """A training that can start, or has ended."""

    task: Task
    trainer: HfViTTrainer
    checkpoint: str | None  # that it starts from
    command: str  # that repeats it
    report: Callable[[str], None]
    planner: Planner
    scores: dict[str, float] = field(default_factory=dict)


def prepare(
    task_class: type[Task],
    arguments: Arguments,
    stack: ExitStack,
    report: Callable[[str], None],
    description: str | None = None,
    program: Sequence[str] = (),
) -> Training:
    """Checks all that can be wrong with a training, and keeps others out of its output folder while `stack` is open.

    Raises:
        ValueError: if an option, the data or the model is bad.
        OSError: if something is missing, or nothing can be written.
        ImportError: if a package is missing.
    """
    arguments = with_output_dir(task_class, arguments, description)
    task = task_class(*parse_arguments(task_class.argument_types(), arguments, description))
    if task.args.dry_run:
        arguments = [*arguments, "--push_to_hub", "false"]  # which would make a repository before the first step
    check_writable(Path(task.args.output_dir))
    stack.enter_context(occupied(task.args))
    report = report if task.args.process_index == 0 else lambda _: None
    planner = Planner(task, arguments, report)
    checkpoint = checkpoint_to_resume(task.args)
    if checkpoint is not None:
        task, chosen = planner.resumed(checkpoint)
        check_architecture(checkpoint, task.model_class, task.model)
        begun = describe_arguments(task)
        on_first_process(task.args, lambda: check_changes(checkpoint, begun, task.args.resume_with_changes))
    else:
        task, chosen = planner.started()
    task.load_data()
    if checkpoint is None:
        task, chosen = planner.planned(task)
    args = task.args
    values = describe_arguments(task)
    set_seed(args.seed)
    trainer = task.make_trainer()
    conditions = on_first_process(args, lambda: find_conditions(task, values, checkpoint))
    trainer.conditions = {**conditions, "chosen": chosen}
    if checkpoint is not None:
        check_head(checkpoint, trainer.model)
        check_projection(checkpoint, trainer.distillation)
    command = shlex.join(command_line(task.argument_types(), arguments, program, args.world_size))
    training = Training(task, trainer, checkpoint, command, report, planner)
    recipe = planner.recipe(chosen)
    if trainer.is_world_process_zero() and not args.dry_run:
        start_recipe(Path(args.output_dir), recipe)
    report_plan(training)
    if args.dry_run:
        report(describe_plan(trainer, recipe, task.data_notes))
    return training


def with_output_dir(task_class: type[Task], arguments: Arguments, description: str | None) -> Arguments:
    """Returns arguments with an output folder: where none is given, a new one, or that of what resumes.

    All processes find the same one, as none makes it before they have met.
    """
    recipe, rest = split_recipe(arguments)
    given = make_parser(task_class.argument_types(), recipe, description).parse_args(rest)
    if given.output_dir is not None or not given.dataset_name:
        return arguments
    first = file_name(split_sources(given.dataset_name)[0])
    named = Path("outputs") / f"{first}-{name_of(task_class).replace('_', '-')}"
    resumed = given.resume_from_checkpoint
    if resumed is None:
        folder = free_folder(named)
    elif resumed.lower() in ("last", "true"):
        folder = last_folder(named)
    else:
        folder = Path(resumed).parent
    return [*arguments, "--output_dir", str(folder)]


def name_of(task_class: type[Task]) -> str:
    """Returns the name of a task."""
    return next(name for name, task in TASKS.items() if task is task_class)


def report_plan(training: Training) -> None:
    """Reports on what is trained, and where it is written."""
    task = training.task
    sizes = ", ".join(f"{count:,} for {name}" for name, count in task.count_examples().items())
    size = f"{count_parameters(training.trainer.model):,} parameters"
    training.report(f"{task.examples.capitalize()}: {sizes}; {task.describe_held_out()}.")
    if targets := task.describe_targets(training.trainer):
        training.report(targets)
    training.report(f"Model: {size}. Output: {task.args.output_dir}")


def complete(training: Training) -> None:
    """Trains, evaluates, saves and, on request, publishes, unless it is a dry run; raises as `train`."""
    args = training.task.args
    if args.dry_run:
        return
    try:
        finish(training)
    except Preempted:
        PartialState().destroy_process_group()
        raise
    except (CheckpointError, ExampleError):  # which say how to resume
        raise
    except (OSError, SafetensorError) as error:
        raise OSError(f"{as_sentence(error)} {how_to_resume(args.output_dir)}") from error
    try:
        if args.push_to_hub:
            training.trainer.push_to_hub()
    finally:
        PartialState().destroy_process_group()  # else several processes can abort while they exit


def find_conditions(task: Task, values: dict[str, Any], checkpoint: str | None) -> dict[str, Any]:
    """Returns the conditions of a training, whose arguments are `values`; raises as `check_changes`."""
    values = {**values, **describe_data(task)}
    changes: list[str] = []
    if checkpoint is not None:
        changes = check_changes(checkpoint, values, task.args.resume_with_changes)
    if changes:
        logger.warning(f"The training of {checkpoint} resumes with changes: {'; '.join(changes)}.")
    return with_changes(values, checkpoint, changes)


def finish(training: Training) -> None:
    """Trains, from a checkpoint on if there is one, evaluates and saves."""
    task, trainer, report, args = training.task, training.trainer, training.report, training.task.args
    follow_budget(training)
    if training.planner.budget is None and trainer.is_world_process_zero():
        trainer.add_callback(StepReport(report, warn=partial(warn_of_few_steps, task)))
    result = trainer.train(resume_from_checkpoint=training.checkpoint)
    if not trainer.has_learned:
        raise NoUpdateError(f"No step changed the weights, at --learning_rate {args.learning_rate:g}. Set it higher.")
    task.choose_threshold(trainer)  # before it is saved
    trainer.save_model(_internal_call=True)  # uploads come last, lest a failure keep the report out
    trainer.save_state()
    trainer.save_metrics("train", result.metrics)
    training.scores = task.write_report(
        trainer,
        command=training.command,
        license=task.model.license,
        base_model=task.model.model_name_or_path,
    )
    if trainer.is_world_process_zero():
        report(f"Scores: {listed(training.scores)}")
        if trainer.average is not None:
            averaged = {name: value for name, value in trainer.averaged_scores.items() if name in training.scores}
            report(f"Averaged weights: {listed(averaged)}")
        report(f"The model, its scores and its card: {task.args.output_dir}")


def follow_budget(training: Training) -> None:
    """Lets the number of steps follow the time that they take; what resumes or repeats a training repeats the changes.

    Where DeepSpeed makes the schedule, it stays as planned.
    """
    trainer, planner = training.trainer, training.planner
    if planner.budget is None or trainer.is_deepspeed_enabled:
        trainer.add_callback(LengthChanges(trainer, training.checkpoint))
        return
    planned = told = trainer.args.max_steps

    def changed(steps: int) -> None:
        nonlocal told
        chosen = {**trainer.conditions["chosen"], "length_changes": trainer.args.length_changes}
        trainer.conditions["chosen"] = chosen
        if trainer.is_world_process_zero():
            start_recipe(Path(trainer.args.output_dir), planner.recipe(chosen))
        if abs(steps - told) > TOLD_CHANGE * told:
            told = steps
            training.report(f"Steps: {steps:,} in place of {planned:,}, by the time that those until now have taken.")

    trainer.add_callback(KeepBudget(trainer, *planner.budget, changed))


def listed(scores: dict[str, float]) -> str:
    """Returns scores in one line."""
    return ", ".join(f"{name} {value:.4f}" for name, value in scores.items())


def command_line(types: Sequence[type], arguments: Arguments, program: Sequence[str], world_size: int) -> list[str]:
    """Returns the command that trains once more, on as many processes and machines, without secrets."""
    words = without_secrets(as_words(types, arguments))
    if world_size == 1:
        return ["hf-vit", *program, *words] if program else ["python", sys.argv[0], *words]
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    nodes = [] if processes == world_size else ["--nnodes", str(world_size // processes)]
    launcher = ["torchrun", *nodes, "--nproc_per_node", str(processes)]
    return [*launcher, *(["-m", "hf_vit", *program] if program else [sys.argv[0]]), *words]


@contextmanager
def one_line_errors(*errors: type[Exception]) -> Iterator[None]:
    """Exits with one line where something fails for a reason that a user can mend."""
    try:
        yield
    except errors as error:
        is_on_all = isinstance(error, NotFiniteError)
        sys.exit(one_line(error) if not is_on_all or PartialState().process_index == 0 else 1)


def one_line(error: Exception) -> str:
    """Returns the last line of a script; the traceback is for those who have set `transformers.logging` to debug."""
    logger.debug("This is where it went wrong:", exc_info=error)
    return f"{os.path.basename(sys.argv[0])}: {in_one_line(error)}"


def evaluate(arguments: Arguments, description: str | None, report: Callable[[str], None]) -> None:
    """Evaluates a saved model; exits with one line about what is wrong before that.

    Args:
        arguments: The command line without the program's name.
        description: Beginning of `--help`.
        report: Tells the user how it goes; called on the first process.
    """
    with one_line_errors(ValueError, OSError, ImportError):
        task, trainer, split = prepare_evaluation(arguments, description)
    complete_evaluation(task, trainer, split, report)


def prepare_evaluation(arguments: Arguments, description: str | None = None) -> tuple[Task, HfViTTrainer, str]:
    """Returns the task of a saved model, the trainer that evaluates it, and the split; raises as `prepare`."""
    task, saved = parse_evaluation(arguments, description)
    check_writable(Path(task.args.output_dir))
    trainer, split = task.make_evaluation_trainer(saved)
    check_outputs(evaluation_files(task.args.output_dir, split), overwrite=saved.overwrite)
    return task, trainer, split


def complete_evaluation(
    task: Task, trainer: HfViTTrainer, split: str, report: Callable[[str], None]
) -> dict[str, float]:
    """Evaluates a split, writes the scores and returns them."""
    scores, _ = task.evaluate(trainer, split)
    if trainer.is_world_process_zero():
        record_outputs(filter(Path.is_file, evaluation_files(task.args.output_dir, split)))
        count = len(task.loaded.examples(split))
        report(f"{count:,} {split} {task.examples}: {listed(scores)}")
        report(f"The scores, and pictures of them: {task.args.output_dir}")
    PartialState().destroy_process_group()  # else several processes can abort while they exit
    return scores


def parse_evaluation(arguments: Arguments, description: str | None = None) -> tuple[Task, EvaluatedModel]:
    """Returns the task that a command line evaluates, and the saved model."""
    task_class = find_task(arguments)
    if task_class is None:
        shared = (EvaluatedModel, EvaluationArguments, ImageDataArguments)
        make_parser(shared, {}, description).parse_known_args(split_recipe(arguments)[1])  # exits at --help
        raise ValueError("Say what to evaluate: --model_name_or_path path/to/model, or a name on the Hub.")
    kinds = task_class.fields()
    options = {name: kinds[name] for name in ("data", *task_class.evaluation_options)}
    batch_size = kinds["args"].per_device_eval_batch_size
    saved, args, *parsed = parse_arguments(
        (EvaluatedModel, EvaluationArguments, *options.values()),
        arguments,
        description,
        per_device_eval_batch_size=batch_size,
    )
    given = {"args": args, **dict(zip(options, parsed, strict=True))}
    given["data"].refuse_training_options()
    if useless := [name for name in ("minutes", "choose_defaults", "dry_run") if vars(args)[name]]:
        raise ValueError(f"{useless[0]} is an option of trainings. Leave it out.")
    args.name_output(saved.model_name_or_path, given["data"].sources)
    return task_class(**{name: given[name] if name in given else kind() for name, kind in kinds.items()}), saved


def find_task(arguments: Arguments) -> type[Task] | None:
    """Returns the task of the model that a command line names, None if it names no model."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model_name_or_path", "--model-name-or-path", "--model")
    parser.add_argument("--task")
    recipe, rest = split_recipe(arguments)
    parser.set_defaults(**{name: recipe[name] for name in ("model_name_or_path", "task") if name in recipe})
    given, _ = parser.parse_known_args(rest)
    if not given.model_name_or_path:
        return None
    name = given.task or task_of_model(given.model_name_or_path)
    if name not in TASKS:
        raise ValueError(f"task={name!r} is unknown. Choose one of {', '.join(TASKS)}.")
    return TASKS[name]


def task_of_model(name_or_path: str) -> str:
    """Returns the name of the task that a saved or published model is for, by the class in its configuration.

    What names no class, as files of weights and checkpoints of timm do not, is taken for a classifier.
    """
    try:
        config = read_config(name_or_path)
    except OSError as error:
        raise OSError(
            f"No model can be read from {name_or_path!r}, be it a folder, a file or a name on the Hub: {error}"
        ) from error
    architecture = str((config.get("architectures") or ["ForImageClassification"])[0])
    for name, task in TASKS.items():
        if any(part in architecture for part in (task.model_class.__name__.removeprefix("HfViT"), *task.published)):
            return name
    raise ValueError(
        f"{name_or_path} was saved as {architecture}, which is of no task. If it has a trained head, say for what: "
        f"--task, one of {', '.join(TASKS)}."
    )
