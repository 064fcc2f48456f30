"""Base class of all tasks: training, evaluation and reports."""

import dataclasses
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Self, get_type_hints

from transformers import BaseImageProcessor, PreTrainedModel, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, IntervalStrategy
from transformers.utils import logging

from ...convert import load_image_processor
from ...data import AugmentedDataset
from ...data.augmentation.datasets import AugmentedStream
from ...data.checks import check_output_outside_data
from ...data.datasets import TargetData
from ...data.targets import image_only
from ...evaluation.base import BaseEvaluator, Evaluator, check_has_annotations
from ...extras import check_packages
from ...model.configuration_hf_vit import HfViTConfig
from ...model.pretrained import HfViTPreTrainedModel, find_head_of
from ...options.field import evaluation_option, option, start_option
from ...options.recipe import recipe_of
from ...options.resolve import build, values_of
from ...outputs import free_folder
from ...visualize.plots import draw_curves
from ..checkpoints import on_first_process
from ..data_notes import (
    SplitClasses,
    check_duplicates,
    check_transparency,
    describe_missing_classes,
    find_label_classes,
    find_seen_classes,
)
from ..evaluator_trainer import EvaluationPictures, EvaluatorTrainer
from ..load_data import HELD_OUT, chooses_step, chooses_weights, load_evaluation_targets, load_targets
from ..models import NUM_IMAGES, input_size, load_model, open_trained, plan_config, read_config_of, whiten_patches
from ..output_folder import AVERAGE_FOLDER
from ..planning.defaults import TaskDefaults
from ..publishing.model_card import TrainingInfo, Usage, compare, write_model_card
from ..publishing.report import (
    describe_data,
    describe_training,
    describe_values,
    evaluation_split,
    in_columns,
    report_average,
    score_naive_baseline,
    score_split,
)
from ..training_arguments import HfViTTrainingArguments, check_optimizer, check_training


logger = logging.get_logger(__name__)
EVALUATED = ("Data", "Training images", "Evaluation")  # groups of options that all evaluations have
CURVES = {"Loss, validation scores and learning rate": "curves.png"}


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
    eval_strategy: str = "no"
    report_to: str = "none"

    def name_output(self, sources: Iterable[str]) -> None:
        """Unless `output_dir` is given, name the output folder after model and data, equally on all processes."""
        if self.output_dir == type(self).output_dir:
            folder = self.output_dir.format(
                model=file_name(self.model_name_or_path), data="-".join(map(file_name, sources))
            )
            self.output_dir = str(on_first_process(self, lambda: free_folder(folder)))


def file_name(source: str) -> str:
    """Return a file name for the outputs of a model or dataset, with the parent folder if its name is generic."""
    file = Path(source).expanduser()
    place = file.resolve() if file.exists() else PurePosixPath(source)  # a local path, or a name on the Hub
    is_part = place.name == AVERAGE_FOLDER or place.name.startswith(f"{PREFIX_CHECKPOINT_DIR}-")
    return re.sub(r"[^\w.-]+", "-", "-".join(place.parts[-2:]) if is_part else place.name)


@dataclass
class Task(ABC):
    """Base class of tasks. A task defines options, data loading, augmentation, evaluation and model card texts.

    The fields of a subclass are the arguments of a training run. The type of each field is a dataclass of options.

    Args:
        options: Options of model, data, augmentation and evaluation.
        args: Training arguments.
    """

    model_class: ClassVar[type[HfViTPreTrainedModel]]
    pipeline: ClassVar[str]  # name of the transformers pipeline
    usage: ClassVar[Usage]
    published: ClassVar[tuple[str, ...]] = ()  # endings of the names of equivalent model classes in other libraries
    load_source: ClassVar[Callable[..., TargetData]]  # data loader, a function in `hf_vit.data`
    collator_class: ClassVar[type[Any]]  # class of the batch collator, which is created with the processor
    augmented_column: ClassVar[str | None] = None  # column passed to the transform; None passes the whole example
    read_streamed: ClassVar[Callable[..., dict[str, Any]]] = staticmethod(image_only)  # converts a row of a stream
    augment: ClassVar[Callable[..., Callable[[Any], Any]]]  # creates the transform from size, channels and options
    limits: ClassVar[str]  # model card sentences with placeholders for `num_classes` and attributes of `model`
    examples: ClassVar[str] = "images"  # plural noun for the examples in the model card
    parts: ClassVar[str] = "in {} classes"  # phrase for the classes in the model card, with their number as {}
    packages: ClassVar[tuple[str, ...]] = ("matplotlib",)  # optional dependencies of hf_vit that the task requires
    data_meaning: ClassVar[tuple[str, ...]] = ()  # data options that an evaluation reads from the training recipe
    report_passes: ClassVar[float] = 1.5  # passes over the evaluated images for the report, including the baseline
    least_held_from: ClassVar[int] = 1  # minimum number of training images required to hold out some of them
    has_scores: ClassVar[bool] = False  # whether predictions have scores that can be calibrated
    chooses_threshold: ClassVar[bool] = False  # whether a score threshold is chosen on validation images
    argument_defaults: ClassVar[Mapping[str, Any]] = {}  # values that replace defaults in `HfViTTrainingArguments`
    argument_help: ClassVar[Mapping[str, str]] = {}  # help texts that replace those of `HfViTTrainingArguments`

    options: Any
    args: HfViTTrainingArguments

    defaults: TaskDefaults = field(init=False)  # default hyperparameters of the task
    loaded: TargetData = field(init=False)
    choice: str = field(init=False, default="")  # message about the choice made on held-out images
    data_notes: list[str] = field(
        init=False, default_factory=list
    )  # notes about missing or unusual data for the model card
    other_baselines: dict[str, dict[str, float]] = field(init=False, default_factory=dict)  # additional baselines

    def __post_init__(self) -> None:
        check_output_outside_data(self.options.sources, self.args.output_dir)

    @property
    def held_out_for(self) -> str:
        """Verb phrase for the choice made on held-out images at the end of training; empty if there is no choice."""
        return "choose the threshold" if self.chooses_threshold else ""

    @property
    def num_needed_classes(self) -> int:
        """Minimum number of classes in the training images."""
        return 0

    @classmethod
    def fields(cls) -> dict[str, Any]:
        """Return the dataclasses of training arguments by field name."""
        hints = get_type_hints(cls)
        return {part.name: hints[part.name] for part in dataclasses.fields(cls) if part.init}

    @classmethod
    def argument_types(cls) -> tuple[type, ...]:
        """Return the dataclasses of training arguments in constructor order."""
        return tuple(cls.fields().values())

    @classmethod
    def evaluation_defaults(cls) -> dict[str, Any]:
        """Return the defaults of evaluation arguments that are also training arguments."""
        return {name: value for name, value in cls.argument_defaults.items() if name == "per_device_eval_batch_size"}

    @classmethod
    def from_options(cls, values: Mapping[str, Any]) -> Self:
        """Return the task of a training run, given option values by name. Raises the same errors as `build`."""
        return cls(*build(cls.argument_types(), values, **cls.argument_defaults))

    def augmentation_values(self) -> dict[str, Any]:
        """Return the augmentation options by name."""
        return values_of(self.options, "Augmentation", "Views")

    def augmentation_options(self) -> dict[str, Any]:
        """Return the arguments of `augment` other than the size and the number of channels."""
        return self.augmentation_values()

    def augmentation_size(self, processor: Any, config: HfViTConfig) -> tuple[int, int]:
        """Return the height and width of augmented images."""
        return input_size(processor)

    def open_data(self) -> TargetData:
        """Open images and targets."""
        return self.load_source(self.options.dataset_name, **self.options.source_options())

    def load_training_data(self) -> TargetData:
        """Open and check the splits of a training run."""
        given = {**vars(self.args), **vars(self.options)}
        self.options.chooses_weights |= self.has_scores and chooses_weights(given)
        return load_targets(
            self.open_data,
            self.options,
            self.args,
            needs_validation=self.least_held_from if self.held_out_for else None,
        )

    def options_of_head(self) -> dict[str, Any]:
        """Return the head options that are determined by the data."""
        return {}

    def options_of_fresh_head(self) -> dict[str, Any]:
        """Return the options of a new head that differ from the defaults."""
        return {}

    def make_processor(self, processor: BaseImageProcessor, config: HfViTConfig) -> BaseImageProcessor:
        """Return the image processor of a training run, given the image processor of the initial model."""
        return processor

    def open_model(self) -> tuple[PreTrainedModel, Any]:
        """Return the new or saved model to train, and its image processor."""
        config = self.options.task_config
        head = ({config: own} if own else {} for own in (self.options_of_head(), self.options_of_fresh_head()))
        model, processor = load_model(self.model_class, self.options, self.loaded.names, *head)
        return model, self.make_processor(processor, model.config)

    def make_collator(self, processor: Any, model: PreTrainedModel) -> Any:
        """Return the collator of training and evaluation batches, a dataclass with the field `keeps_targets`."""
        return self.collator_class(processor)

    def make_transform(self, processor: Any, config: HfViTConfig) -> Callable[[Any], Any]:
        """Return the random transform of training examples. It returns images of the model's input size."""
        size, options = self.augmentation_size(processor, config), self.augmentation_options()
        return self.augment(size, num_channels=config.num_channels, **options)

    def open_processor(self, model: PreTrainedModel, name_or_path: str, head: str | None = None) -> Any:
        """Return the image processor or processor of a trained model."""
        head = find_head_of(type(model), read_config_of(name_or_path), head)
        given: dict[str, Any] = {} if head is None else {"head": head}
        return load_image_processor(name_or_path, patch_size=model.config.patch_size, **given)

    @abstractmethod
    def make_evaluator(self, model: PreTrainedModel, processor: Any) -> BaseEvaluator:
        """Return the evaluator of a model; raise `ValueError` if the model does not support the evaluation."""

    def open_evaluator(self, model: PreTrainedModel, processor: Any) -> BaseEvaluator:
        """Return the evaluator of a model, with its threshold; raise `ValueError` if a split has no usable target."""
        evaluator = self.make_evaluator(model, processor)
        if isinstance(evaluator, Evaluator):
            for split in self.loaded.splits:
                check_has_annotations(evaluator, split, self.loaded.examples(split))
        if self.chooses_threshold:
            evaluator.threshold = model.options.score_threshold
        return evaluator

    def training_arguments(self, model: PreTrainedModel, processor: Any) -> dict[str, Any]:
        """Return additional trainer arguments of this task, such as the teacher or batch transforms."""
        return {}

    def training_examples(self, processor: Any, config: HfViTConfig) -> AugmentedDataset | AugmentedStream:
        """Return the augmented training examples."""
        transform, column, data = self.make_transform(processor, config), self.augmented_column, self.options
        if self.loaded.stream is None:
            return AugmentedDataset(self.loaded.examples("train"), transform, self.args.seed, column)
        return AugmentedStream(
            self.loaded.stream,
            transform,
            self.args.seed,
            data.shuffle_buffer_size,
            data.skip_unreadable,
            type(self).read_streamed,
            column,
            data.shard_by_process,
        )

    def count_training_images(self) -> int:
        """Return the number of training images; for a stream, the number of images that are read in advance."""
        return len(self.loaded.splits["train"])

    def count_evaluated_images(self, split: str) -> int:
        """Return the number of images that an evaluation of a split reads."""
        return len(self.loaded.splits[split])

    def callbacks(self) -> list[TrainerCallback]:
        """Return the trainer callbacks of this task."""
        return []

    def check_options(self) -> None:
        """Check the options before the data is read. Raises the errors of `load_data`."""
        check_packages("This task", *self.packages)
        if self.has_scores and self.options.calibrate:
            check_packages("The calibration of scores (calibrate=True)", "torchmetrics")
        check_optimizer(self.args)
        plan_config(self.options)
        inputs = signature(self.model_class.forward).parameters
        if unknown := {*(self.args.label_names or ())} - inputs.keys():
            raise ValueError(
                f"label_names={self.args.label_names} contains {', '.join(sorted(unknown))}, which "
                f"{self.model_class.__name__}.forward does not accept. Remove label_names: labels are detected "
                "automatically."
            )

    def load_data(self) -> list[str]:
        """Open and check the data of a training run. Return the class names, or an empty list without classes.

        Raises:
            ImportError: If a required package of this task is missing.
            OSError: If the data, the model or the teacher is missing.
            ValueError: If the data or an option is invalid.
        """
        self.check_options()
        self.loaded = self.load_training_data()
        self.data_notes = self.note_data()
        return list(self.loaded.names)

    def note_data(self) -> list[str]:
        """Warn about problems such as missing classes; return the warnings. Too few classes raise `ValueError`."""
        splits, names, notes = self.loaded.splits, self.loaded.names, [*self.loaded.notes]
        accepted = self.options.allow_duplicates
        if self.options.check_images:
            notes += [note for split, rows in splits.items() for note in check_transparency(split, rows, self.args)]
            if self.loaded.stream is not None and len(splits) > 1:
                notes.append("Duplicates were not searched, because the training images are a stream.")
            elif len(splits) > 1:
                evaluated = evaluation_split(splits)
                notes += on_first_process(self.args, lambda: check_duplicates(splits, evaluated, accepted))
        if not names:
            return notes
        return notes + describe_missing_classes(
            {split: self.find_seen_classes(split) for split in splits},
            names,
            self.num_needed_classes,
            examples=self.examples,
            is_pixelwise=any("mask" in rows.column_names for rows in splits.values()),
        )

    def find_seen_classes(self, split: str) -> SplitClasses:
        """Return the classes that occur in a split; for a stream, in its first images."""
        rows, names = self.loaded.splits[split], self.loaded.names
        if "label" in rows.column_names:
            return find_label_classes(
                rows["label"][:], len(names), split == "train" and self.loaded.stream is not None
            )
        return find_seen_classes(self.loaded.examples(split), len(names), self.args)

    def make_trainer(self) -> EvaluatorTrainer:
        """Return the trainer of a new or saved model.

        Raises:
            ImportError: If torchvision is missing.
            OSError: If the model does not exist.
            ValueError: If a value is out of range, a split has no annotations, or the best model cannot be chosen.
        """
        model, processor = self.open_model()
        self.start_weights(model, processor)
        return self.make_trainer_of(model, processor)

    def start_weights(self, model: PreTrainedModel, processor: Any) -> None:
        """Initialize weights from training images, if an option requests it."""
        if self.options.whiten_patches:
            batches = self.plain_batches(model, processor, NUM_IMAGES)
            whiten_patches(model, (batch["pixel_values"][0] for batch in batches), self.args.seed)

    def plain_batches(
        self, model: PreTrainedModel, processor: Any, most_images: int, batch_size: int = 1, split: str = "train"
    ) -> Iterator[dict[str, Any]]:
        """Yield batches of at most `most_images` images of a split, spread evenly, without augmentation."""
        name = (
            split if split in self.loaded.splits else next(iter(self.loaded.splits))
        )  # evaluated splits of a stream may not include "train"
        examples, collate = self.loaded.examples(name), self.make_collator(processor, model)
        numbers = range(0, len(examples), -(-len(examples) // most_images))
        for start in range(0, len(numbers), batch_size):
            yield collate([examples[number] for number in numbers[start : start + batch_size]])

    def make_trainer_of(self, model: PreTrainedModel, processor: Any) -> EvaluatorTrainer:
        """Return the trainer of a model, given its processor. Raises the same errors as `make_trainer`."""
        training = self.training_arguments(model, processor)
        evaluator = self.open_evaluator(model, processor)
        has_validation = "validation" in self.loaded.splits
        scores = {"loss", *evaluator.metric.score_names}
        callbacks = check_training(self.args, self.count_training_images(), has_validation, scores)
        trainer = EvaluatorTrainer(
            model=model,
            args=self.args,
            train_dataset=self.training_examples(processor, model.config),
            eval_dataset=self.loaded.examples("validation") if has_validation else None,
            data_collator=self.make_collator(processor, model),
            processing_class=processor,
            callbacks=[*callbacks, *self.callbacks()],
            evaluator=evaluator,
            **training,
        )
        if has_validation and evaluator.caption and self.args.eval_strategy != IntervalStrategy.NO:
            trainer.add_callback(EvaluationPictures(trainer))
        return trainer

    def make_evaluation_trainer(self, saved: EvaluationArguments) -> tuple[EvaluatorTrainer, str]:
        """Return the trainer that evaluates a saved model, and the name of the split.

        Raises:
            ImportError: If a package is missing.
            OSError: If the model or the data does not exist.
            ValueError: If the model is for another task or does not match the data.
        """
        check_packages("This task", *self.packages)
        model = open_trained(self.model_class, saved.model_name_or_path, saved.head)
        head = find_head_of(self.model_class, read_config_of(saved.model_name_or_path), saved.head)
        recipe = recipe_of(Path(saved.model_name_or_path), head)
        was_streamed = recipe.get("streaming", False)
        whole = {**recipe_of(Path(saved.model_name_or_path)), **recipe}  # options of all heads and of this head
        self.options.chooses_weights = self.has_scores and chooses_weights(whole)
        self.options.calibrate = whole.get("calibrate", True) and not was_streamed
        self.options.holds_out = self.options.train_val_split is not None or "train_val_split" in recipe
        if self.options.train_val_split is None and recipe:
            self.options.train_val_split = recipe.get("train_val_split", HELD_OUT)
            self.options.validation_as_test = recipe.get("validation_as_test", False)
        for name in self.data_meaning:
            if vars(self.options)[name] is None:
                setattr(self.options, name, recipe.get(name))
        processor = self.open_processor(model, saved.model_name_or_path, saved.head)
        split, self.loaded = load_evaluation_targets(
            self.open_data, self.options, saved.split, model.config.label2id, self.args, was_streamed
        )
        self.note_data()
        trainer = EvaluatorTrainer(
            model=model,
            args=self.args,
            data_collator=self.make_collator(processor, model),
            processing_class=processor,
            evaluator=self.open_evaluator(model, processor),
        )
        return trainer, split

    def count_choosing_images(self, num_trained: int) -> int:
        """Return the maximum number of images evaluated to make choices after training, excluding the report.

        Args:
            num_trained: Total number of images in all training steps.
        """
        passes = self.can_calibrate + (self.chooses_threshold and "validation" in self.loaded.splits)
        return passes * self.count_evaluated_images("validation") if passes else 0

    def choose_inference(self, trainer: EvaluatorTrainer) -> None:
        """Calibrate a trained model and choose its score threshold on the validation images, if there are any."""
        is_calibrated = self.can_calibrate and trainer.calibrate_if_possible(self.loaded, self.options)
        if self.chooses_threshold:
            trainer.choose_threshold()
        if is_calibrated:
            self.complete_calibration(trainer)

    def complete_calibration(self, trainer: EvaluatorTrainer) -> None:  # noqa: B027  # Optional hook
        """Add calibration values that depend on calibrated scores, after the trainer has chosen the threshold."""

    @property
    def can_calibrate(self) -> bool:
        """Whether scores are calibrated on validation images. This requires other images for the reported scores."""
        return self.has_scores and self.options.calibrate and {"validation", "test"} <= set(self.loaded.splits)

    def describe_threshold(self, trainer: EvaluatorTrainer) -> str:
        """Return a description of the score threshold and how it was chosen."""
        if "validation" not in self.loaded.splits:
            return "none, because there are no validation images; the caller chooses it"
        chosen = trainer.thresholds.get(False)
        if chosen is None:
            return "none, because no score separates correct from wrong predictions on the validation images"
        same = " (see above)" if evaluation_split(self.loaded.splits) == "validation" else ""
        best = f"the best {chosen.measure} ({chosen.quality:.3f})"
        return f"{chosen.value:g}, that of {best} on the validation images{same}"

    def count_examples(self) -> dict[str, int]:
        """Return the number of examples per split; for a stream, only of the evaluated splits."""
        counts = {name: len(rows) for name, rows in self.loaded.splits.items()}
        if self.loaded.stream is not None and len(counts) > 1:
            counts.pop("train", None)
        return counts

    def describe_held_out(self) -> str:
        """Return a description of the held-out training images and their purpose."""
        if not self.options.holds_out:
            return "no training images are held out"
        purposes = [
            *(["choose the best step"] if chooses_step(self.args) else []),
            *([self.held_out_for] if self.held_out_for else []),
            *([] if "test" in self.loaded.splits else ["are evaluated at the end"]),
        ]
        as_test = "; the validation split is used as test split" if self.options.validation_as_test else ""
        return f"those for validation are held out, and {' and '.join(purposes) or 'follow the training'}{as_test}"

    def evaluate(self, trainer: EvaluatorTrainer, split: str) -> tuple[dict[str, float], dict[str, str]]:
        """Evaluate a model on a split, on all processes, and write scores and pictures to the output folder.

        Returns:
            The scores, and the file names of the pictures by caption.
        """
        return score_split(trainer, split, self.loaded.examples(split))

    def evaluate_baseline(self, trainer: EvaluatorTrainer, split: str) -> tuple[str, dict[str, float]]:
        """Evaluate the baseline on all processes; return its name and scores."""
        return score_naive_baseline(trainer, self.loaded.examples("train"), self.loaded.examples(split))

    def describe_targets(self, trainer: EvaluatorTrainer) -> str:
        """Return a description of values computed from the targets; empty for most tasks."""
        return ""

    def card_texts(self) -> tuple[Usage, str, str]:
        """Return the model card fields `usage`, `limits` and `parts`, which may depend on the data."""
        return self.usage, self.limits, self.parts

    def describe_model(self, model: PreTrainedModel, processor: Any) -> dict[str, str]:
        """Return the table rows of the model card about the head and the loss of a model."""
        return {}

    def describe_size(self, config: HfViTConfig) -> str:
        """Return a description of the image size, or "" if the image processor contains the size."""
        return ""

    def describe_recipe(self, trainer: EvaluatorTrainer) -> dict[str, str]:
        """Return the table rows of the model card about settings that are not part of the trainer."""
        changes = trainer.conditions.get("changes")
        drawn = None if self.loaded.stream is None else vars(self.options)["shuffle_buffer_size"]
        size = self.describe_size(trainer.model.config)
        return {
            **self.describe_model(trainer.model, trainer.processing_class),
            **({"input size": size} if size else {}),
            "augmentation": describe_values(self.augmentation_values()),
            **({"score threshold": self.describe_threshold(trainer)} if self.chooses_threshold else {}),
            **({} if trainer.distillation is None else trainer.distillation.facts()),
            **({"resumed with changes": " / ".join(changes)} if changes else {}),
            "evaluation": trainer.evaluator.describe_evaluation(),
            **({"training images": f"a stream, each drawn among {drawn:,}"} if drawn else {}),
        }

    def write_report(self, trainer: EvaluatorTrainer, **facts: Any) -> dict[str, float]:
        """Evaluate a trained model and write scores, pictures and the model card to its output folder.

        The evaluated split is the first existing one of "test", "validation" and "train".

        Args:
            trainer: A trainer that has finished training.
            **facts: Fields of `TrainingInfo` that the trainer does not provide.

        Returns:
            The scores.
        """
        scores, info = self.report(trainer, **facts)
        if info is not None:
            write_model_card(Path(trainer.args.output_dir), info)
            names = [name for name in info.baselines if name not in self.other_baselines]
            for sentence in compare(dataclasses.replace(info, baselines={names[-1]: info.baselines[names[-1]]})):
                logger.warning(sentence)
        return scores

    def report(self, trainer: EvaluatorTrainer, **facts: Any) -> tuple[dict[str, float], TrainingInfo | None]:
        """Evaluate a trained model and write scores and pictures. Return the scores and the content of the model card.

        The content of the model card is None on all processes except the first.
        """
        split, folder = evaluation_split(self.loaded.splits), Path(trainer.args.output_dir)
        scores, pictures = self.evaluate(trainer, split)
        evaluator = trainer.evaluator
        classes = in_columns(evaluator.metric.per_class())  # computed before the baseline overwrites the metric
        calibration = evaluator.calibration_scores
        name, baseline = self.evaluate_baseline(trainer, split)
        if not trainer.is_world_process_zero():
            return scores, None
        usage, limits, parts = self.card_texts()
        (curves,) = CURVES.values()
        draw_curves(trainer.state.log_history, folder / curves)
        data = describe_data(
            self.options.dataset_name,
            self.options.dataset_license,
            self.count_examples(),
            split,
            self.loaded.names,
            examples=self.examples,
            parts=parts,
            notes=self.data_notes,
        )
        info = TrainingInfo.from_trainer(
            trainer,
            recipe=self.describe_recipe(trainer),
            task=self.pipeline,
            usage=usage,
            data=data,
            metrics={name: scores[name] for name in baseline if not math.isnan(scores[name])},
            baselines={**report_average(trainer, split, scores), **self.other_baselines, name: baseline},
            pictures={**pictures, **CURVES},
            units=evaluator.metric.units,
            parts={evaluator.parts: classes},
            calibration=calibration,
            calibration_note=evaluator.calibration_note,
            limits=limits.format(num_classes=len(self.loaded.names), model=trainer.plain_model),
            **describe_training(trainer, split),
            **facts,
        )
        return scores, info
