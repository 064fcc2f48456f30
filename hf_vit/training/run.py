"""Runs a training or an evaluation by the arguments of a command line."""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import PartialState
from safetensors import SafetensorError
from transformers import set_seed
from transformers.utils import logging

from ..model.pretrained import read_config
from .arguments import HfViTTrainingArguments, ImageDataArguments
from .callbacks.clock import ExpectedEnd
from .checks import check_output
from .conditions import check_changes, describe_arguments, describe_data, read_conditions, with_changes
from .distillation.base import check_projection
from .errors import CheckpointError, ExampleError, NotFiniteError, Preempted, how_to_resume, in_one_line
from .lora import count_parameters
from .models import check_architecture, check_head
from .planning.plan import Planner, warn_of_few_steps
from .recipe import make_parser, parse_arguments, split_recipe, start_recipe, without_secrets
from .saving.checkpoints import check_labels, on_first_process
from .saving.output_folder import checkpoint_to_resume, occupied
from .tasks import TASKS
from .tasks.base import EvaluatedModel, EvaluationArguments, Task
from .trainer import HfViTTrainer


logger = logging.get_logger(__name__)


def run(
    task_class: type[Task], arguments: Sequence[str], description: str | None, report: Callable[[str], None]
) -> None:
    """Trains, evaluates, saves and, on request, publishes; exits with one line about what is wrong before that.

    Args:
        task_class: What to train.
        arguments: The command line without the program's name.
        description: Beginning of `--help`.
        report: Tells the user how it goes; called on the first process.
    """
    types = task_class.argument_types()
    with ExitStack() as stack:
        try:
            task = task_class(*parse_arguments(types, arguments, description))
            check_output(Path(task.args.output_dir))
            stack.enter_context(occupied(task.args))
        except (ValueError, OSError, ImportError) as error:
            sys.exit(one_line(error))
        train(task, arguments, report)


def train(task: Task, arguments: Sequence[str], report: Callable[[str], None]) -> None:
    """Trains, evaluates, saves and, on request, publishes in an output folder that no other training has."""
    try:
        planner = Planner(task, arguments, report if task.args.process_index == 0 else lambda _: None)
        checkpoint = checkpoint_to_resume(task.args)
        if checkpoint is not None:
            task, chosen = planner.resumed(checkpoint)
            check_architecture(checkpoint, task.model_class, task.model)
            begun = describe_arguments(task)
            on_first_process(task.args, lambda: check_changes(checkpoint, begun, task.args.resume_with_changes))
        else:
            task, chosen = planner.started()
        names = task.load_data()
        if checkpoint is None:
            task, chosen = planner.planned(task)
        elif names:
            check_labels(checkpoint, names)
        args = task.args
        values = describe_arguments(task)
        set_seed(args.seed)
        trainer = task.make_trainer()
        conditions = on_first_process(args, lambda: find_conditions(task, values, checkpoint))
        trainer.conditions = {**conditions, "chosen": chosen}
        if checkpoint is not None:
            check_head(checkpoint, trainer.model)
            check_projection(checkpoint, trainer.distillation)
        if trainer.is_world_process_zero():
            compares = checkpoint is not None and not read_conditions(checkpoint) and not args.resume_with_changes
            # What is compared is what was given: that is all that a checkpoint without conditions has beside it.
            recipe = planner.recipe({} if compares else chosen)
            start_recipe(Path(args.output_dir), recipe, is_resumed=compares)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(one_line(error))
    if trainer.is_world_process_zero():
        sizes = ", ".join(f"{count:,} for {name}" for name, count in task.count_examples().items())
        size = f"{count_parameters(trainer.model):,} parameters"
        report(f"{task.examples.capitalize()}: {sizes}; {task.describe_held_out()}.")
        report(f"Model: {size}. Output: {args.output_dir}")
        trainer.add_callback(ExpectedEnd(report, warn=partial(warn_of_few_steps, task)))
    with one_line_errors(args):
        finish(task, trainer, checkpoint, arguments, report)
    try:
        if args.push_to_hub:
            trainer.push_to_hub()
    except OSError as error:
        sys.exit(one_line(error))
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


def finish(
    task: Task,
    trainer: HfViTTrainer,
    checkpoint: str | None,
    arguments: Sequence[str],
    report: Callable[[str], None],
) -> None:
    """Trains, from a checkpoint on if there is one, evaluates and saves."""
    args = task.args
    result = trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model(_internal_call=True)  # uploads come last, lest a failure keep the report out
    trainer.save_state()
    trainer.save_metrics("train", result.metrics)
    scores = task.write_report(
        trainer,
        command=shlex.join([*launcher(args.world_size), sys.argv[0], *without_secrets(arguments)]),
        license=task.model.license,
        base_model=task.model.model_name_or_path,
    )
    if trainer.is_world_process_zero():
        report(f"Scores: {listed(scores)}")
        if trainer.average is not None:
            averaged = {name: value for name, value in trainer.averaged_scores.items() if name in scores}
            report(f"Averaged weights: {listed(averaged)}")
        report(f"The model, its scores and its card: {args.output_dir}")


def listed(scores: dict[str, float]) -> str:
    """Returns scores in one line."""
    return ", ".join(f"{name} {value:.4f}" for name, value in scores.items())


def launcher(world_size: int) -> list[str]:
    """Returns the command that starts so many processes, on as many machines as these are on."""
    if world_size == 1:
        return ["python"]
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    nodes = [] if processes == world_size else ["--nnodes", str(world_size // processes)]
    return ["torchrun", *nodes, "--nproc_per_node", str(processes)]


@contextmanager
def one_line_errors(args: HfViTTrainingArguments) -> Iterator[None]:
    """Exits with one line where a training fails for a reason that a user can mend."""
    try:
        yield
    except Preempted:
        PartialState().destroy_process_group()
        raise
    except NotFiniteError as error:  # which all processes have
        sys.exit(one_line(error) if args.process_index == 0 else 1)
    except (CheckpointError, ExampleError) as error:
        sys.exit(one_line(error))
    except (OSError, SafetensorError) as error:
        sys.exit(f"{one_line(error).rstrip('.')}. {how_to_resume(args.output_dir)}")


def one_line(error: Exception) -> str:
    """Returns the last line of a script; the traceback is for those who have set `transformers.logging` to debug."""
    logger.debug("This is where it went wrong:", exc_info=error)
    return f"{os.path.basename(sys.argv[0])}: {in_one_line(error)}"


def evaluate(arguments: Sequence[str], description: str | None, report: Callable[[str], None]) -> None:
    """Evaluates a saved model; exits with one line about what is wrong before that.

    Args:
        arguments: The command line without the program's name.
        description: Beginning of `--help`.
        report: Tells the user how it went; called on the first process.
    """
    try:
        task, saved = parse_evaluation(arguments, description)
        check_output(Path(task.args.output_dir))
        trainer, split = task.make_evaluation_trainer(saved)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(one_line(error))
    scores, _ = task.evaluate(trainer, split)
    if trainer.is_world_process_zero():
        count = len(task.loaded.examples(split))
        report(f"{count:,} {split} {task.examples}: {listed(scores)}")
        report(f"The scores, and pictures of them: {task.args.output_dir}")
    PartialState().destroy_process_group()  # else several processes can abort while they exit


def parse_evaluation(arguments: Sequence[str], description: str | None = None) -> tuple[Task, EvaluatedModel]:
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
    return task_class(**{name: given[name] if name in given else kind() for name, kind in kinds.items()}), saved


def find_task(arguments: Sequence[str]) -> type[Task] | None:
    """Returns the task of the model that a command line names, None if it names no model."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model_name_or_path", "--model-name-or-path")
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
