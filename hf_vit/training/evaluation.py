"""The course of a scoring by a script, whatever the task: open model and data, score, write."""

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from accelerate import PartialState

from .arguments import HfViTTrainingArguments, parse_arguments


@dataclass
class ScoredModel:
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
