"""Evaluate a saved model, given option values."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import PartialState

from ..data.checks import check_output_outside_data
from ..data.datasets import Division, TargetDataset
from ..extras import check_packages
from ..model.configuration_hf_vit import HfViTConfig
from ..model.pretrained import find_head_of
from ..options.field import evaluation_option, option, start_option
from ..options.library import options_of
from ..options.recipe import recipe_of, with_recipe
from ..options.resolve import build
from ..options.training_arguments import HfViTTrainingArguments
from ..outputs import check_outputs, check_writable, file_name, free_folder, record_outputs
from ..processes import on_first_process
from ..tasks import TASKS
from ..tasks.base import Task
from ..tasks.common.load_data import chooses_weights, load_evaluation_targets
from ..tasks.common.models import open_processor, open_trained, read_config_of
from ..training.evaluator_trainer import EvaluatorTrainer
from ..training.output_folder import evaluation_files
from .build import Run, note_data, open_evaluator
from .report import evaluate_run
from .run import joined, one_line_errors


EVALUATED = ("Data", "Training images", "Evaluation")  # groups of options that all evaluations have
EVALUATION_DEFAULTS = {"per_device_eval_batch_size"}  # default training arguments that also apply to evaluations
NOT_REPEATED = {"dataset_name", "max_eval_samples"}  # data options that an evaluation does not read from a recipe


@dataclass
class EvaluationArguments(HfViTTrainingArguments):
    """Options of an evaluation: model, split and output folder, and the inherited batch size and hardware options."""

    model_name_or_path: str = start_option(
        "", "Saved or published model: a folder, a file or a name on the Hub.", group="Evaluation"
    )
    task: str | None = evaluation_option(
        None, "Task of the model, if its configuration names no model class for a task."
    )
    head: str | None = evaluation_option(None, "Head of a multi-task model; by default the head of the given task.")
    split: str | None = evaluation_option(
        None,
        "Split to evaluate: test, validation (or, if the data has none, the training images that were held out) or "
        "train; by default the first of these that exists.",
    )
    overwrite: bool = option(False, "Replace the files of an earlier evaluation.", group="Output", essential=True)
    output_dir: str = evaluation_option(
        "outputs/evaluation/{model}-on-{data}",
        "Folder for the scores. The default folder gets a number if it exists.",
        synonyms="output out save_dir out_dir project_dir name",
        resume="free",
    )
    holds_out: bool = field(init=False, default=False)  # whether the share of held-out images is given
    eval_strategy: str = "no"
    report_to: str = "none"

    def name_output(self, sources: Iterable[str]) -> None:
        """Unless `output_dir` is given, name the output folder after model and data, equally on all processes."""
        if self.output_dir == type(self).output_dir:
            folder = self.output_dir.format(
                model=file_name(self.model_name_or_path), data="-".join(map(file_name, sources))
            )
            self.output_dir = str(on_first_process(self, lambda: free_folder(folder)))


@dataclass(frozen=True)
class Evaluation(Run):
    """An evaluation of a saved model that is ready to start. Its data contain the evaluated split only.

    Args:
        split: Name of the evaluated split.
    """

    args: EvaluationArguments
    split: str = ""

    @property
    def examples(self) -> TargetDataset:
        """Evaluated images and targets."""
        return self.data.examples(self.split)


def evaluate(values: Mapping[str, Any], report: Callable[[str], None]) -> None:
    """Evaluate a saved model. If an error occurs before the evaluation starts, exit with a one-line message.

    Args:
        values: Option values by name. They override the values of the option `recipe`, if given.
        report: Function that prints lines of progress, called on the first process.
    """
    with one_line_errors(ValueError, OSError, ImportError):
        evaluation = prepare_evaluation(values)
    complete_evaluation(evaluation, report)


def prepare_evaluation(values: Mapping[str, Any]) -> Evaluation:
    """Open a saved model and its data, and check the output folder. Raises the errors of `prepare`."""
    task, args = plan_evaluation(values)
    check_writable(Path(args.output_dir))
    evaluation = open_evaluation(task, args)
    check_outputs(evaluation_files(args.output_dir, evaluation.split), overwrite=args.overwrite)
    return evaluation


def complete_evaluation(evaluation: Evaluation, report: Callable[[str], None]) -> dict[str, float]:
    """Evaluate a split, write its scores to files and return them."""
    task, args, split = evaluation.task, evaluation.args, evaluation.split
    scores, *_ = evaluate_run(evaluation, split)
    if evaluation.trainer.is_world_process_zero():
        record_outputs(filter(Path.is_file, evaluation_files(args.output_dir, split)))
        failures = evaluation.trainer.evaluator.find_failures()
        report("\n".join([*failures, f"{len(evaluation.examples):,} {split} {task.examples}: {joined(scores)}"]))
        report(f"Scores and pictures: {args.output_dir}")
    PartialState().destroy_process_group()  # otherwise several processes can abort while they exit
    return scores


def open_evaluation(task: Task, args: EvaluationArguments) -> Evaluation:
    """Open a saved model and its data.

    Raises:
        ImportError: If a package is missing.
        OSError: If the model or the data does not exist.
        ValueError: If the model is for another task or does not match the data.
    """
    check_packages("This task", *task.packages)
    name = args.model_name_or_path
    if not task.can_evaluate:
        raise ValueError(
            f"{name} was trained without labels and has no task to evaluate. Evaluate its features: hf-vit features "
            "extract, then hf-vit features evaluate."
        )
    model = open_trained(task.model_class, name, args.head)
    processor = open_processor(model, name, args.head, task.has_texts)
    recipe = recipe_of_head(task, args)
    was_streamed = recipe.get("streaming", False)
    whole = {**recipe_of(Path(name)), **recipe}  # options of all heads and of this head
    known = Division(
        holds_out=args.holds_out or "train_val_split" in recipe,
        chooses_weights=task.has_scores and chooses_weights(whole),
        calibrates=whole.get("calibrate", True) and not was_streamed,
    )
    split, data = load_evaluation_targets(
        task.open_data, task.options, args.split, model.config.label2id, args, was_streamed, known
    )
    data = task.examine(data, args)
    notes = note_data(task, data, args)
    evaluator = open_evaluator(task, model, processor, data)
    task.check_evaluator(evaluator, data)
    trainer = EvaluatorTrainer(
        model=model,
        args=args,
        data_collator=task.make_collator(processor, model),
        processing_class=processor,
        evaluator=evaluator,
    )
    return Evaluation(task, args, data, notes, trainer=trainer, split=split)


def recipe_of_head(task: Task | type[Task], args: EvaluationArguments) -> dict[str, Any]:
    """Return the recipe of the training run of the evaluated model or head, or an empty dictionary."""
    name = args.model_name_or_path
    return recipe_of(Path(name), find_head_of(task.model_class, read_config_of(name), args.head))


def plan_evaluation(values: Mapping[str, Any]) -> tuple[Task, EvaluationArguments]:
    """Return the specification of the saved model to evaluate, and the arguments of the evaluation."""
    values = with_recipe(values)
    task_class, head = find_task(values), values.pop("head", None)  # tasks have another `head`
    kind, _, *others = task_class.argument_types()
    values = with_data_options(task_class, values, head)
    own = options_of(EvaluationArguments)
    for name, known in options_of(kind).items():
        if name in values and name not in own and known["group"] not in EVALUATED:
            raise ValueError(f"{name}={values[name]!r} applies only to training. Remove it.")
    defaults = {name: value for name, value in task_class.argument_defaults.items() if name in EVALUATION_DEFAULTS}
    options, args = build((kind, EvaluationArguments), values, **defaults)
    if given := options.given_values("Training images"):
        name, value = next(iter(given.items()))
        raise ValueError(f"{name}={value!r} applies only to training. Remove it.")
    if useless := [name for name in ("minutes", "choose_defaults", "dry_run") if vars(args)[name]]:
        raise ValueError(f"{useless[0]} applies only to training. Remove it.")
    args.head, args.holds_out = head, options.train_val_split is not None
    args.name_output(options.sources)
    check_output_outside_data(options.sources, args.output_dir)
    options.complete(read_config_of(args.model_name_or_path, head), recipe_of_head(task_class, args))
    return task_class(options, *(other() for other in others)), args


def with_data_options(task_class: type[Task], values: Mapping[str, Any], head: str | None) -> dict[str, Any]:
    """Return the given option values and, if the model was trained on the same data, those that describe this data."""
    model, known = os.fspath(values["model_name_or_path"]), task_class.argument_types()[0]
    recipe = recipe_of(Path(model), find_head_of(task_class.model_class, read_config_of(model), head))
    used, trained = (each.get("dataset_name") for each in (values, recipe))
    if not used or not trained or Path(str(used)).absolute() != Path(str(trained)).absolute():
        return dict(values)
    data = {name for name, metadata in options_of(known).items() if metadata["group"] == "Data"} - NOT_REPEATED
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
