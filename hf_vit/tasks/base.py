"""Specification of a task: options, data, augmentation, evaluator, default hyperparameters, model card sentences.

A specification is a value: it is created with its options and does not change. The folder `runs` trains and evaluates
models according to specifications.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, get_type_hints

from transformers import BaseImageProcessor, PreTrainedModel

from ..data.datasets import TargetData, TargetDataset
from ..data.targets import image_only
from ..evaluation.base import BaseEvaluator
from ..evaluation.baseline import score_naive_baseline
from ..model.configuration_hf_vit import HfViTConfig
from ..model.pretrained import HfViTPreTrainedModel
from ..options.resolve import build, values_of
from ..options.training_arguments import HfViTTrainingArguments
from .common.card import Usage
from .common.defaults import TaskDefaults
from .common.load_data import chooses_weights, load_targets
from .common.models import NUM_IMAGES, input_size, load_model, whiten_patches


@dataclass(frozen=True)
class Choice:
    """Settings of a trained model that a task chose after the last step.

    Args:
        text: Sentence about the choice; empty if there is none.
        rows: Table rows of the model card about the choice.
    """

    text: str = ""
    rows: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class MoreEvaluation:
    """An evaluation on additional data.

    Args:
        evaluator: Evaluator of this data.
        collator: Collator of its batches.
        examples: The data.
        score: Name of the reported score.
        description: Text for the model card, with a placeholder for the score.
    """

    evaluator: BaseEvaluator
    collator: Any
    examples: TargetDataset
    score: str
    description: str


@dataclass(frozen=True)
class Task(ABC):
    """Base class of specifications. The fields of a subclass are dataclasses of options.

    Methods receive the loaded data, the model or the trainer of a run as arguments and do not store them.

    Args:
        options: Options of model, data, augmentation and evaluation.
    """

    model_class: ClassVar[type[HfViTPreTrainedModel]]
    pipeline: ClassVar[str]  # name of the transformers pipeline
    usage: ClassVar[Usage]
    defaults: ClassVar[TaskDefaults]  # default hyperparameters
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
    report_passes: ClassVar[float] = 1.5  # passes over the evaluated images for the report, including the baseline
    min_images_to_hold_out: ClassVar[int] = 1  # minimum number of training images to hold out some for a choice
    has_texts: ClassVar[bool] = False  # whether the processor of a model has a tokenizer
    can_evaluate: ClassVar[bool] = True  # whether a saved model can be evaluated for this task
    has_scores: ClassVar[bool] = False  # whether predictions have scores that can be calibrated
    chooses_threshold: ClassVar[bool] = False  # whether a score threshold is chosen on validation images
    argument_defaults: ClassVar[Mapping[str, Any]] = {}  # values that replace defaults in `HfViTTrainingArguments`
    argument_help: ClassVar[Mapping[str, str]] = {}  # help texts that replace those of `HfViTTrainingArguments`

    options: Any

    # Options

    @classmethod
    def argument_types(cls) -> tuple[type[Any], ...]:
        """Return the dataclasses of all options of a training run: of the task, of training, and others."""
        hints = get_type_hints(cls)
        own, *others = (hints[part.name] for part in dataclasses.fields(cls))
        return own, HfViTTrainingArguments, *others

    @classmethod
    def from_options(cls, values: Mapping[str, Any]) -> tuple[Self, HfViTTrainingArguments]:
        """Return the specification and the training arguments with option values; raise the errors of `build`."""
        own, args, *others = build(cls.argument_types(), values, **cls.argument_defaults)
        task = cls(own, *others)
        task.complete_arguments(args)
        return task, args

    def complete_arguments(self, args: HfViTTrainingArguments) -> None:  # noqa: B027  # Optional hook
        """Set training arguments that follow from the options; raise `ValueError` for unsuitable arguments."""

    def find_defaults(self, args: HfViTTrainingArguments) -> TaskDefaults:
        """Return the default hyperparameters."""
        return self.defaults

    # Data

    def open_data(self) -> TargetData:
        """Open images and targets."""
        return self.load_source(self.options.dataset_name, **self.options.source_options())

    def load_data(self, args: HfViTTrainingArguments) -> TargetData:
        """Open and check the splits of a training run."""
        needed = self.min_images_to_hold_out if self.held_out_for(args) else None
        given = {**vars(args), **vars(self.options)}
        is_chosen = self.has_scores and (self.options.chooses_weights or chooses_weights(given))
        return load_targets(self.open_data, self.options, args, needs_validation=needed, weights_are_chosen=is_chosen)

    def examine(self, data: TargetData, args: HfViTTrainingArguments) -> TargetData:
        """Return loaded data with everything that the task reads in addition."""
        return data

    def held_out_for(self, args: HfViTTrainingArguments) -> str:
        """Verb phrase for the choice made on held-out images at the end of training; empty if there is no choice."""
        return "choose the threshold" if self.chooses_threshold else ""

    def count_needed_classes(self, data: TargetData) -> int:
        """Return the minimum number of classes in the training images."""
        return 0

    def count_choosing_images(self, data: TargetData, args: HfViTTrainingArguments, num_trained: int) -> int:
        """Return the maximum number of images that `choose` evaluates.

        Args:
            data: Loaded data.
            args: Training arguments.
            num_trained: Total number of images in all training steps.
        """
        return 0

    # Model

    def head_options(self, data: TargetData, args: HfViTTrainingArguments) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the head options that the data determine, and the options of a new head that differ from defaults."""
        return {}, {}

    def make_processor(self, processor: BaseImageProcessor, config: HfViTConfig, data: TargetData) -> Any:
        """Return the image processor of a training run, given the image processor of the initial model."""
        return processor

    def open_model(self, data: TargetData, args: HfViTTrainingArguments) -> tuple[PreTrainedModel, Any]:
        """Return the new or saved model to train, and its image processor."""
        config = self.options.task_config
        head = ({config: options} if options else {} for options in self.head_options(data, args))
        model, processor = load_model(self.model_class, self.options, data.names, *head)
        return model, self.make_processor(processor, model.config, data)

    def start_weights(
        self, model: PreTrainedModel, processor: Any, data: TargetData, args: HfViTTrainingArguments
    ) -> None:
        """Initialize weights from training images, if an option requests it."""
        if self.options.whiten_patches:
            batches = plain_batches(self, model, processor, data, NUM_IMAGES)
            whiten_patches(model, (batch["pixel_values"][0] for batch in batches), args.seed)

    # Batches

    def augmentation_arguments(self, processor: Any, config: HfViTConfig, data: TargetData) -> dict[str, Any]:
        """Return the arguments of `augment`: the size (height, width), the number of channels and options."""
        size, options = input_size(processor), values_of(self.options, "Augmentation", "Views")
        return {"size": size, "num_channels": config.num_channels, **options}

    def make_collator(self, processor: Any, model: PreTrainedModel) -> Any:
        """Return the collator of training and evaluation batches, a dataclass with the field `keeps_targets`."""
        return self.collator_class(processor)

    # Training and evaluation

    @abstractmethod
    def make_evaluator(self, model: PreTrainedModel, processor: Any, data: TargetData) -> BaseEvaluator:
        """Return the evaluator of a model; raise `ValueError` if the model does not support the evaluation."""

    def check_evaluator(self, evaluator: BaseEvaluator, data: TargetData) -> list[str]:
        """Return notes about data that the evaluator ignores; raise `ValueError` if it ignores most of the data."""
        return []

    def trainer_arguments(
        self, model: PreTrainedModel, processor: Any, data: TargetData, args: HfViTTrainingArguments
    ) -> dict[str, Any]:
        """Return further arguments of the trainer: `batch_transforms`, `compute_loss_func` and `callbacks`."""
        return {}

    def choose(self, trainer: Any, data: TargetData) -> Choice:
        """Choose settings of a trained model, given its trainer, before scores are calibrated."""
        return Choice()

    def more_evaluations(self, trainer: Any, data: TargetData) -> dict[str, MoreEvaluation]:
        """Return evaluations on additional data of the task, by name."""
        return {}

    def evaluate_baselines(self, trainer: Any, data: TargetData, split: str) -> dict[str, dict[str, float]]:
        """Return the scores of baselines by name, evaluated on all processes. The last one is the reference."""
        return score_naive_baseline(trainer.evaluator, trainer.args, data.examples("train"), data.examples(split))

    # Model card

    def describe_targets(self, trainer: Any, data: TargetData) -> str:
        """Return a description of values computed from the targets; empty for most tasks."""
        return ""

    def card_texts(self, data: TargetData) -> tuple[Usage, str, str]:
        """Return the model card fields `usage`, `limits` and `parts`, which may depend on the data."""
        return self.usage, self.limits, self.parts

    def describe_model(
        self, model: PreTrainedModel, processor: Any, data: TargetData, args: HfViTTrainingArguments
    ) -> dict[str, str]:
        """Return the table rows of the model card about the head and the loss of a model."""
        return {}


def plain_batches(
    task: Task,
    model: PreTrainedModel,
    processor: Any,
    data: TargetData,
    most_images: int,
    batch_size: int = 1,
    split: str = "train",
) -> Iterator[dict[str, Any]]:
    """Yield batches of at most `most_images` images of a split, spread evenly, without augmentation."""
    # The evaluated splits of a stream may not include "train".
    examples = data.examples(split if split in data.splits else next(iter(data.splits)))
    collate, numbers = task.make_collator(processor, model), range(0, len(examples), -(-len(examples) // most_images))
    for start in range(0, len(numbers), batch_size):
        yield collate([examples[number] for number in numbers[start : start + batch_size]])
