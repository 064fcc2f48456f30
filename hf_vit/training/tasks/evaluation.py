"""Evaluation of a saved model by a script, whatever the task: open model and data, score, write."""

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

from accelerate import PartialState

from ...convert import load_image_processor
from ...evaluation.evaluator import check_truth
from ..arguments import (
    HfViTTrainingArguments,
    ImageDataArguments,
    ModelArguments,
    TrainedImagesArguments,
    parse_arguments,
)
from ..checks import check_packages
from ..distillation.arguments import DistillationArguments
from ..evaluator_trainer import EvaluatorTrainer
from ..load_data import load_scored_targets
from ..models import open_trained
from ..publishing.report import score_split
from .arguments import ScoredTrainingArguments
from .scored import ScoredTask


@dataclass
class EvaluatedModel:
    """Which model to score, and on what."""

    model_name_or_path: str = field(
        default="", metadata={"help": "Saved or published model: a folder, a file or a name on the Hub."}
    )
    split: str | None = field(
        default=None,
        metadata={
            "help": "Which images to score: test, validation (held out of train as in training where there is no such "
            "split) or train; by default the first of these that there is."
        },
    )

    def __post_init__(self) -> None:
        """Checks what can be checked without the model."""
        if not self.model_name_or_path:
            raise ValueError("Say what to score: --model_name_or_path path/to/model, or a name on the Hub.")


@dataclass
class EvaluationArguments(HfViTTrainingArguments):
    """The library's arguments, of which those on evaluation and hardware count."""

    output_dir: str = "outputs/evaluation"
    eval_strategy: str = "no"
    report_to: str = "none"


class Evaluation(ABC):
    """What a script scores: its arguments, model, data and report."""

    argument_types: ClassVar[tuple[type, ...]]  # of the constructor
    examples: ClassVar[str] = "images"  # what is scored one by one

    args: EvaluationArguments

    @abstractmethod
    def prepare(self) -> tuple[str, int]:
        """Opens and checks model and data and returns which split is scored, and the number of its examples."""

    @abstractmethod
    def score(self) -> dict[str, float]:
        """Scores the images, on all processes, and writes all there is to say of them, on the first."""


def evaluate(
    evaluation_class: type[Evaluation], arguments: Sequence[str], description: str | None, say: Callable[[str], None]
) -> None:
    """Scores a saved model; exits with one line that says what is wrong before that.

    Args:
        evaluation_class: What to score.
        arguments: The command line without the program's name.
        description: What `--help` says first.
        say: Tells the user how it went; called on the first process.
    """
    try:
        evaluation = evaluation_class(
            *parse_arguments(evaluation_class.argument_types, arguments, description=description)
        )
        split, count = evaluation.prepare()
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"{os.path.basename(sys.argv[0])}: {error}")
    scores = evaluation.score()
    if evaluation.args.process_index == 0:
        say(
            f"{count:,} {split} {evaluation.examples}: "
            + ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
        )
        say(f"The scores, and pictures of them: {evaluation.args.output_dir}")
    PartialState().destroy_process_group()  # else several processes can abort while they exit


@dataclass
class ScoredEvaluationArguments(EvaluationArguments):
    """The same, with batches that suit targets of more than a class."""

    per_device_eval_batch_size: int = ScoredTrainingArguments.per_device_eval_batch_size


class ScoredEvaluation(Evaluation):
    """Scoring of a saved model for one task; see `Evaluation`."""

    task_class: ClassVar[type[ScoredTask]]

    def __init__(
        self, scored: EvaluatedModel, data: ImageDataArguments, args: ScoredEvaluationArguments, *options: Any
    ) -> None:
        """Takes what a script was told.

        Args:
            scored: Which model to score, and on which split.
            data: On which images and targets.
            args: How to run it.
            *options: How to score it, if there is a choice.
        """
        self.scored = scored
        self.data = data
        self.args = args
        # Of the task, only how it opens data and scores is used, which takes nothing that is for training alone.
        images = cast(TrainedImagesArguments, data)
        self.task = self.task_class(ModelArguments(), images, None, args, DistillationArguments(), *options)

    def prepare(self) -> tuple[str, int]:
        """Opens model and data."""
        name, task = self.scored.model_name_or_path, self.task
        check_packages(*task.packages)
        self.model = open_trained(task.model_class, name)
        self.processor = load_image_processor(name, patch_size=self.model.config.patch_size)
        label2id = self.model.config.label2id
        split, task.loaded = load_scored_targets(task.open_data, self.data, self.scored.split, label2id, self.args)
        self.split, self.dataset = split, task.loaded.examples(split)
        self.evaluator = task.make_evaluator(self.model, self.processor)
        check_truth(self.evaluator, split, self.dataset)
        return split, len(self.dataset)

    def score(self) -> dict[str, float]:
        """Writes the scores, those of each class where there are classes, and a picture of a few images."""
        trainer = EvaluatorTrainer(
            model=self.model,
            args=self.args,
            data_collator=self.task.collator_class(self.processor),
            evaluator=self.evaluator,
        )
        scores, _ = score_split(trainer, self.split, self.dataset)
        return scores
