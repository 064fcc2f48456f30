"""Build the parts of a run from a specification: loaded data, model, processor and trainer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

from datasets import DatasetDict
from transformers import BaseImageProcessor, PreTrainedModel
from transformers.trainer_utils import IntervalStrategy

from ..data import AugmentedDataset
from ..data.augmentation.datasets import AugmentedStream
from ..data.datasets import TargetData
from ..evaluation.base import BaseEvaluator, Evaluator, check_has_annotations
from ..extras import check_packages
from ..model.configuration_hf_vit import HfViTConfig
from ..model.task_image_classification import HfViTForImageClassification
from ..options.training_arguments import HfViTTrainingArguments, check_optimizer, check_training
from ..processes import on_first_process
from ..tasks.base import Task
from ..tasks.common.arguments import ClassificationArguments
from ..tasks.common.data_notes import (
    SplitClasses,
    check_duplicates,
    check_transparency,
    describe_missing_classes,
    find_label_classes,
    find_seen_classes,
)
from ..tasks.common.models import plan_config
from ..tasks.image_classification import ImageClassification, with_names
from ..tasks.shared import SupervisedTask
from ..training.distillation import load_teacher, make_distillation
from ..training.evaluator_trainer import EvaluationPictures, EvaluatorTrainer
from ..training.finetuning.from_probe import FromProbe


NO_DATA = TargetData(DatasetDict(), dict)  # data of a run that has not been opened


@dataclass(frozen=True)
class Run:
    """One run of a specification. It is built in order: data, then the model with its trainer.

    Several tasks in one run have a run for each head, which shares the model.

    Args:
        task: Specification with all options.
        args: Training arguments.
        data: Loaded images and targets.
        notes: Notes about missing or unusual data for the model card.
        teacher: Teacher of the model, if any.
        trainer: Trainer with the model.
        probe: The linear probe that the classifier starts from, if any.
        rows: Table rows of the model card about choices after training.
        heads: Run of each head of a multi-task model.
    """

    task: Task
    args: HfViTTrainingArguments
    data: TargetData = NO_DATA
    notes: Sequence[str] = ()
    teacher: PreTrainedModel | None = None
    trainer: Any = None
    probe: FromProbe | None = None
    rows: Mapping[str, str] = field(default_factory=dict)
    heads: Mapping[str, "Run"] = field(default_factory=dict)


def check_options(task: Task, args: HfViTTrainingArguments) -> None:
    """Check options before the data is read.

    Raises:
        ImportError: If a required package is missing.
        OSError: If the saved model does not exist.
        ValueError: If an option is invalid.
    """
    check_packages("This task", *task.packages)
    if task.has_scores and task.options.calibrate:
        check_packages("The calibration of scores (calibrate=True)", "torchmetrics")
    check_optimizer(args)
    plan_config(task.options)
    inputs = signature(task.model_class.forward).parameters
    if unknown := {*(args.label_names or ())} - inputs.keys():
        raise ValueError(
            f"label_names={args.label_names} contains {', '.join(sorted(unknown))}, which "
            f"{task.model_class.__name__}.forward does not accept. Remove label_names: labels are detected "
            "automatically."
        )


def open_task(run: Run) -> Run:
    """Open and check the data and the teacher of a training run.

    Raises:
        ImportError: If a required package is missing.
        OSError: If the data, the model or the teacher is missing.
        ValueError: If the data or an option is invalid.
    """
    task, args = run.task, run.args
    check_options(task, args)
    teacher = load_teacher(task.distillation, task.model_class) if isinstance(task, SupervisedTask) else None
    data = task.examine(task.load_data(args), args)
    return replace(run, data=data, notes=note_data(task, data, args), teacher=teacher)


def note_data(task: Task, data: TargetData, args: HfViTTrainingArguments) -> list[str]:
    """Warn about problems such as missing classes; return the warnings. Too few classes raise `ValueError`."""
    splits, names, notes, options = data.splits, data.names, [*data.notes], task.options
    if options.check_images:
        notes += [note for split, rows in splits.items() for note in check_transparency(split, rows, args)]
        if data.stream is not None and len(splits) > 1:
            notes.append("Duplicates were not searched, because the training images are a stream.")
        elif len(splits) > 1:
            accepted = options.allow_duplicates
            notes += on_first_process(args, lambda: check_duplicates(splits, data.evaluated_split, accepted))
    if not names:
        return notes
    return notes + describe_missing_classes(
        {split: find_classes(data, split, args) for split in splits},
        names,
        task.count_needed_classes(data),
        examples=task.examples,
        is_pixelwise=any("mask" in rows.column_names for rows in splits.values()),
    )


def find_classes(data: TargetData, split: str, args: HfViTTrainingArguments) -> SplitClasses:
    """Return the classes that occur in a split; for a stream, in its first images."""
    rows = data.splits[split]
    if "label" in rows.column_names:
        return find_label_classes(rows["label"][:], len(data.names), split == "train" and data.stream is not None)
    return find_seen_classes(data.examples(split), len(data.names), args)


def build_task(run: Run) -> Run:
    """Open the model of a run, and return the run with its trainer.

    Raises:
        ImportError: If torchvision is missing.
        OSError: If the model does not exist.
        ValueError: If a value is out of range, a split has no annotations, or the best model cannot be chosen.
    """
    model, processor = run.task.open_model(run.data, run.args)
    return build_trainer(start(run, model, processor), model, processor)


def start(run: Run, model: PreTrainedModel, processor: Any) -> Run:
    """Initialize weights from training images, if an option requests it. Return the run with its linear probe."""
    task = run.task
    task.start_weights(model, processor, run.data, run.args)
    if not isinstance(task, ImageClassification) or not task.options.probe_classifier:
        return run
    probe = FromProbe(task, run.args, run.data)
    return replace(run, probe=probe if probe.start(model, processor) else None)


def build_trainer(run: Run, model: PreTrainedModel, processor: Any) -> Run:
    """Return a run with the trainer of a model, given its processor. Raises the same errors as `build_task`."""
    task, args, data = run.task, run.args, run.data
    own = task.trainer_arguments(model, processor, data, args)
    if isinstance(task, SupervisedTask):
        own["distillation"] = make_distillation(task.distillation, model, processor, run.teacher)
    evaluator = open_evaluator(task, model, processor, data)
    names = evaluator.metric.score_names
    usual = task.argument_defaults.get("metric_for_best_model", HfViTTrainingArguments.metric_for_best_model)
    if args.metric_for_best_model == usual and usual not in {"loss", *names}:
        args.metric_for_best_model = names[0]  # the data decide which scores there are
    has_validation = "validation" in data.splits
    callbacks = [*check_training(args, data.num_train, has_validation, {"loss", *names}), *own.pop("callbacks", ())]
    trainer = EvaluatorTrainer(
        model=model,
        args=args,
        train_dataset=training_examples(run, processor, model.config),
        eval_dataset=data.examples("validation") if has_validation else None,
        data_collator=task.make_collator(processor, model),
        processing_class=processor,
        callbacks=callbacks,
        evaluator=evaluator,
        **own,
    )
    if has_validation and evaluator.caption and args.eval_strategy != IntervalStrategy.NO:
        trainer.add_callback(EvaluationPictures(trainer))
    return replace(run, trainer=trainer, notes=[*run.notes, *task.check_evaluator(evaluator, data)])


def open_evaluator(task: Task, model: PreTrainedModel, processor: Any, data: TargetData) -> BaseEvaluator:
    """Return the evaluator of a model, with its threshold; raise `ValueError` if a split has no usable target."""
    evaluator = task.make_evaluator(model, processor, data)
    if isinstance(evaluator, Evaluator):
        for split in data.splits:
            check_has_annotations(evaluator, split, data.examples(split))
    if task.chooses_threshold:
        evaluator.threshold = model.options.score_threshold
    return evaluator


def training_examples(run: Run, processor: Any, config: HfViTConfig) -> AugmentedDataset | AugmentedStream:
    """Return the augmented training examples."""
    task, args, data, options = run.task, run.args, run.data, run.task.options
    transform = task.augment(**task.augmentation_arguments(processor, config, data))
    if data.stream is None:
        classes = task.sampled_classes(data) if isinstance(task, ImageClassification) else None
        return AugmentedDataset(data.examples("train"), transform, args.seed, task.augmented_column, classes)
    return AugmentedStream(
        data.stream,
        transform,
        args.seed,
        options.shuffle_buffer_size,
        options.skip_unreadable,
        type(task).read_streamed,
        task.augmented_column,
        options.shard_by_process,
    )


def make_trainer(
    model: HfViTForImageClassification,
    processor: BaseImageProcessor,
    splits: DatasetDict,
    options: ClassificationArguments,
    args: HfViTTrainingArguments,
    stream: Any = None,
) -> EvaluatorTrainer:
    """Return a trainer that trains a classifier on loaded images.

    Args:
        model: The classifier.
        processor: Image processor of the classifier.
        splits: Labeled images. Without validation images, `args.eval_strategy` is set to "no".
        options: Options of augmentation and loss.
        args: Training arguments.
        stream: The training images if they are streamed. In this case, "train" in `splits` is a sample of the stream.

    Raises:
        ValueError: If the training images do not fill one batch, there are no validation images to choose the best
            model, or a regularization does not support the model.
    """
    run = Run(ImageClassification(options), args, with_names(splits, stream))
    trainer: EvaluatorTrainer = build_trainer(run, model, processor).trainer
    return trainer
