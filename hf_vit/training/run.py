"""Plan or execute a training run, or evaluate a saved model, given option values."""

import json
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
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

from ..model.configuration_hf_vit import HfViTConfig
from ..model.pretrained import find_head_of
from ..options.field import Names
from ..options.library import options_of
from ..options.recipe import RECIPE_NAME, recipe_of, recipe_text, savable_values, with_recipe
from ..options.resolve import build, resolve
from ..outputs import check_outputs, check_writable, free_folder, last_folder, record_outputs, write_atomically
from .arguments import split_sources
from .callbacks.state import StepReport
from .checkpoints import on_first_process
from .conditions import describe_arguments, find_changes, find_conditions
from .distillation import check_projection
from .errors import (
    CheckpointError,
    ExampleError,
    NotFiniteError,
    NoUpdateError,
    Preempted,
    as_sentence,
    format_bytes,
    how_to_resume,
    short_message,
)
from .lora import count_parameters
from .models import check_architecture, check_head, read_config_of
from .output_folder import checkpoint_to_resume, evaluation_files, lock_output_folder
from .planning.keep_budget import KeepBudget, LengthChanges
from .planning.plan import Planner, describe_few_steps
from .tasks import TASKS
from .tasks.base import EVALUATED, EvaluationArguments, Task, file_name
from .trainer import HfViTTrainer
from .training_arguments import HfViTTrainingArguments


logger = logging.get_logger(__name__)
TOLD_CHANGE = 0.1  # minimum relative change of the number of steps that is reported
# Maximum number of values that an optimizer stores per trained weight: AdamW stores two averages.
NUMBERS_OF_OPTIMIZER = 2
NOT_REPEATED = {"dataset_name", "max_eval_samples"}  # data options that an evaluation does not read from a recipe
OUTPUT_FILES = "the model with its processor and code, scores, predictions, pictures, its card and recipe.yaml"


def run(
    task_class: type[Task], values: Mapping[str, Any], report: Callable[[str], None], program: Sequence[str] = ()
) -> None:
    """Call `train`. If an error occurs, exit with a one-line message."""
    with ExitStack() as stack:
        with one_line_errors(ValueError, OSError, ImportError):
            training = prepare(task_class, values, stack, report, program)
        with one_line_errors(NotFiniteError, NoUpdateError, OSError):
            complete(training)


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
        ValueError: If an option, the data or the model is invalid, or no step changes the weights. No model is saved
            in this case.
        OSError: If a file is missing or cannot be written, or an example cannot be read.
        ImportError: If a package is missing.
        NotFiniteError: If the loss becomes infinite or NaN.
    """
    with ExitStack() as stack:
        training = prepare(task_class, values, stack, report, program)
        complete(training)
    return training


@dataclass
class Training:
    """A training run that is ready to start, or has finished."""

    task: Task
    trainer: HfViTTrainer
    checkpoint: str | None  # checkpoint to resume from, None for a new run
    command: str  # command that repeats the run
    report: Callable[[str], None]
    planner: Planner
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
    task = task_class.from_options(given)
    check_writable(Path(task.args.output_dir))
    stack.enter_context(lock_output_folder(task.args))
    report = report if task.args.process_index == 0 else lambda _: None
    # The recipe of a multi-task model contains the data of its heads, so it does not disable default hyperparameters.
    has_recipe = values.get("recipe") is not None and task_class.pipeline != "multi-task"
    planner = Planner(task, given, report, has_recipe=has_recipe)
    checkpoint = checkpoint_to_resume(task.args)
    if checkpoint is not None:
        task, chosen = planner.resumed(checkpoint)
        check_architecture(checkpoint, task.model_class, task.options)
        begun = describe_arguments(task)
        on_first_process(task.args, lambda: find_changes(task, begun, checkpoint))
    else:
        task, chosen = planner.started()
    task.load_data()
    if checkpoint is None:
        task, chosen = planner.planned(task)
    args = task.args
    described = describe_arguments(task)
    set_seed(args.seed)
    trainer = task.make_trainer()
    conditions = on_first_process(args, lambda: find_conditions(task, described, checkpoint))
    trainer.conditions, trainer.report = {**conditions, "chosen": chosen}, report
    if checkpoint is not None:
        check_head(checkpoint, trainer.model)
        check_projection(checkpoint, trainer.distillation)
    command = shlex.join(command_line(task_class, {**values, "output_dir": args.output_dir}, program, args.world_size))
    training = Training(task, trainer, checkpoint, command, report, planner)
    recipe = planner.recipe(chosen)
    if trainer.is_world_process_zero() and not args.dry_run:
        write_recipe(args, recipe)
    report_plan(training)
    if args.dry_run:
        report(describe_plan(trainer, recipe, task.data_notes))
    return training


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


def report_plan(training: Training) -> None:
    """Report the model, the training data and the output folder of a run."""
    task = training.task
    sizes = ", ".join(f"{count:,} for {name}" for name, count in task.count_examples().items())
    size = f"{count_parameters(training.trainer.model):,} parameters"
    training.report(f"{task.examples.capitalize()}: {sizes}; {task.describe_held_out()}.")
    if targets := task.describe_targets(training.trainer):
        training.report(targets)
    training.report(f"Model: {size}. Output: {task.args.output_dir}")


def complete(training: Training) -> None:
    """Train, evaluate, save and, if requested, publish a model, unless in a dry run. Raises the errors of `train`."""
    args = training.task.args
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
            training.trainer.push_to_hub()
    finally:
        PartialState().destroy_process_group()  # otherwise several processes can abort while they exit


def finish(training: Training) -> None:
    """Train a model, resuming from the checkpoint if there is one. Evaluate and save the model."""
    task, trainer, report, args = training.task, training.trainer, training.report, training.task.args
    follow_budget(training)
    if training.planner.budget is None and trainer.is_world_process_zero():
        trainer.add_callback(StepReport(report, partial(describe_few_steps, task)))
    result = trainer.train(resume_from_checkpoint=training.checkpoint)
    if not trainer.has_learned:
        raise NoUpdateError(f"No step changed the weights. Increase --learning_rate {args.learning_rate:g}.")
    task.choose_inference(trainer)  # choose before saving, because the choice changes the saved model
    if task.choice:
        report(task.choice)
    trainer.save_model(_internal_call=True)  # upload after the report, which a failed upload would prevent
    trainer.save_state()
    trainer.save_metrics("train", result.metrics)
    warnings, options = describe_few_steps(task, trainer.state.max_steps), task.options
    facts = {"command": training.command, "license": options.license, "base_model": options.model_name_or_path}
    training.scores = task.write_report(trainer, warnings=warnings, **facts)
    if trainer.is_world_process_zero():
        report(f"Scores: {joined(training.scores)}")
        if trainer.average is not None:
            averaged = {name: value for name, value in trainer.averaged_scores.items() if name in training.scores}
            report(f"Averaged weights: {joined(averaged)}")
        report(f"The model, its scores and its card: {task.args.output_dir}")


def follow_budget(training: Training) -> None:
    """Adapt the number of steps to the measured time. Resumed and repeated runs repeat the recorded changes.

    With DeepSpeed, the number of steps does not change, because DeepSpeed creates the schedule.
    """
    trainer, planner = training.trainer, training.planner
    if planner.budget is None or trainer.is_deepspeed_enabled:
        trainer.add_callback(LengthChanges(trainer, training.checkpoint))
        return
    planned = report_lines = trainer.args.max_steps

    def changed(steps: int) -> None:
        nonlocal report_lines
        chosen = {**trainer.conditions["chosen"], "length_changes": trainer.args.length_changes}
        trainer.conditions["chosen"] = chosen
        if trainer.is_world_process_zero():
            write_recipe(trainer.args, planner.recipe(chosen))
        if abs(steps - report_lines) > TOLD_CHANGE * report_lines:
            report_lines = steps
            training.report(f"Steps: {steps:,} instead of the planned {planned:,}, given the measured time per step.")

    trainer.add_callback(KeepBudget(trainer, *planner.budget, changed))


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


def evaluate(values: Mapping[str, Any], report: Callable[[str], None]) -> None:
    """Evaluate a saved model. If an error occurs before the evaluation starts, exit with a one-line message.

    Args:
        values: Option values by name. They override the values of the option `recipe`, if given.
        report: Function that prints lines of progress, called on the first process.
    """
    with one_line_errors(ValueError, OSError, ImportError):
        task, trainer, split = prepare_evaluation(values)
    complete_evaluation(task, trainer, split, report)


def prepare_evaluation(values: Mapping[str, Any]) -> tuple[Task, HfViTTrainer, str]:
    """Return the task of a saved model, a trainer to evaluate it, and its split. Raises the errors of `prepare`."""
    task, saved = plan_evaluation(values)
    check_writable(Path(task.args.output_dir))
    trainer, split = task.make_evaluation_trainer(saved)
    check_outputs(evaluation_files(task.args.output_dir, split), overwrite=saved.overwrite)
    return task, trainer, split


def complete_evaluation(
    task: Task, trainer: HfViTTrainer, split: str, report: Callable[[str], None]
) -> dict[str, float]:
    """Evaluate a split, write its scores to files and return them."""
    scores, _ = task.evaluate(trainer, split)
    if trainer.is_world_process_zero():
        record_outputs(filter(Path.is_file, evaluation_files(task.args.output_dir, split)))
        count = len(task.loaded.examples(split))
        report("\n".join([*trainer.evaluator.find_failures(), f"{count:,} {split} {task.examples}: {joined(scores)}"]))
        report(f"Scores and pictures: {task.args.output_dir}")
    PartialState().destroy_process_group()  # otherwise several processes can abort while they exit
    return scores


def plan_evaluation(values: Mapping[str, Any]) -> tuple[Task, EvaluationArguments]:
    """Return the task of the saved model to evaluate, and its arguments."""
    values = with_recipe(values)
    task_class, head = find_task(values), values.pop("head", None)  # tasks have another `head`
    kinds = task_class.fields()
    values = with_data_options(task_class, values, head)
    own = options_of(EvaluationArguments)
    for name, option in options_of(kinds["options"]).items():
        if name in values and name not in own and option["group"] not in EVALUATED:
            raise ValueError(f"{name}={values[name]!r} applies only to training. Remove it.")
    options, args = build((kinds["options"], EvaluationArguments), values, **task_class.evaluation_defaults())
    if given := options.given_values("Training images"):
        name, value = next(iter(given.items()))
        raise ValueError(f"{name}={value!r} applies only to training. Remove it.")
    if useless := [name for name in ("minutes", "choose_defaults", "dry_run") if vars(args)[name]]:
        raise ValueError(f"{useless[0]} applies only to training. Remove it.")
    args.head = head
    args.name_output(options.sources)
    others = {name: kind() for name, kind in kinds.items() if name not in ("options", "args")}
    return task_class(options, args, **others), args


def with_data_options(task_class: type[Task], values: Mapping[str, Any], head: str | None) -> dict[str, Any]:
    """Return the given option values and, if the model was trained on the same data, those that describe this data."""
    model, known = os.fspath(values["model_name_or_path"]), task_class.fields()["options"]
    recipe = recipe_of(Path(model), find_head_of(task_class.model_class, read_config_of(model), head))
    used, trained = (each.get("dataset_name") for each in (values, recipe))
    if not used or not trained or Path(str(used)).absolute() != Path(str(trained)).absolute():
        return dict(values)
    data = {name for name, option in options_of(known).items() if option["group"] == "Data"} - NOT_REPEATED
    return {**{name: value for name, value in recipe.items() if name in data}, **values}


def find_task(values: Mapping[str, Any]) -> type[Task]:
    """Return the task class of the model to evaluate."""
    model = values.get("model_name_or_path")
    if not model:
        raise ValueError("No model is given. Set --model_name_or_path to a path, or to a name on the Hub.")
    name = str(values.get("task") or task_of_model(os.fspath(model), values.get("head"))).replace("_", "-")
    if name not in TASKS:
        raise ValueError(f"task={name!r} is unknown. Choose one of {', '.join(TASKS)}.")
    if name == "multi-task":
        heads = HfViTConfig.from_dict(read_config_of(model)).heads
        raise ValueError(f"{model} has several heads. Set --head to one of {', '.join(heads)}.")
    return TASKS[name]


def task_of_model(name_or_path: str, head: str | None = None) -> str:
    """Return the task name of a saved or published model, or of its head, from the class in its configuration.

    If there is no class, as for weight files and timm checkpoints, the model is assumed to be a classifier.
    """
    config = read_config_of(name_or_path, head)
    architecture = str((config.get("architectures") or ["ForImageClassification"])[0])
    for name, task in TASKS.items():
        if any(part in architecture for part in (task.model_class.__name__.removeprefix("HfViT"), *task.published)):
            return name
    raise ValueError(
        f"{name_or_path} was saved as {architecture}, which belongs to no task. If it has a trained head, set --task "
        f"to one of {', '.join(TASKS)}."
    )


def describe_plan(trainer: HfViTTrainer, recipe: Mapping[str, Any], notes: Sequence[str]) -> str:
    """Return a description of the planned run, one fact per line.

    Args:
        trainer: A trainer that is ready to train.
        recipe: Options that the user gave or that were chosen, see `Planner.recipe`.
        notes: Notes about missing or unusual data.
    """
    args, config = trainer.args, trainer.model.config
    _, per_epoch, *_, steps = trainer.set_initial_training_values(args, trainer.get_train_dataloader())
    batch = args.images_per_step
    size = "x".join(map(str, config.image_size)) if isinstance(config.image_size, list | tuple) else config.image_size
    is_stream = isinstance(trainer.train_dataset, IterableDataset)
    epochs = "" if is_stream else f" ({steps / per_epoch:.3g} epochs of {per_epoch:,})"
    chosen = yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True, default_flow_style=True, width=math.inf)
    return "\n".join(
        [
            *([f"Data: {' '.join(notes)}"] if notes else []),
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
