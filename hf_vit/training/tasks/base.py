"""The course of a training by a script, whatever the task: check all that can be wrong, train, report, publish."""

import os
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from accelerate import PartialState
from safetensors import SafetensorError
from transformers import set_seed
from transformers.utils import logging

from ..arguments import HfViTTrainingArguments, ModelArguments, parse_arguments
from ..checkpoints import check_labels, checkpoint_to_resume
from ..distillation.base import check_projection
from ..errors import CheckpointError, ExampleError, NotFiniteError, Preempted, how_to_go_on, in_one_line
from ..lora import count_parameters
from ..recipe import begin_recipe, without_secrets
from ..trainer import HfViTTrainer


logger = logging.get_logger(__name__)


class TrainingTask(ABC):
    """What a script trains: its arguments, data, trainer and report.

    Args:
        model: Which model to train.
        args: How to train it.
    """

    argument_types: ClassVar[tuple[type, ...]]  # of the constructor
    examples: ClassVar[str] = "images"  # what it learns from one by one

    model: ModelArguments
    args: HfViTTrainingArguments

    @abstractmethod
    def load_data(self) -> list[str]:
        """Opens and checks the data and returns the names of its classes, none where it has no classes."""

    @abstractmethod
    def make_trainer(self) -> HfViTTrainer:
        """Returns the trainer of a new or a saved model."""

    @abstractmethod
    def count_examples(self) -> dict[str, int]:
        """Returns the number of examples of each split."""

    @abstractmethod
    def write_report(self, trainer: HfViTTrainer, **facts: Any) -> dict[str, float]:
        """Scores a trained model and writes scores, pictures and model card into its output folder.

        Args:
            trainer: Has finished its training.
            **facts: Fields of the card's `TrainingInfo`.

        Returns:
            The scores.
        """


def run(
    task_class: type[TrainingTask], arguments: Sequence[str], description: str | None, say: Callable[[str], None]
) -> None:
    """Trains, scores, saves and, on request, publishes; exits with one line that says what is wrong before that.

    Args:
        task_class: What to train.
        arguments: The command line without the program's name.
        description: What `--help` says first.
        say: Tells the user how it goes; called on the first process.
    """
    try:
        task = task_class(*parse_arguments(task_class.argument_types, arguments, description=description))
        args = task.args
        checkpoint = checkpoint_to_resume(args)
        names = task.load_data()
        if checkpoint is not None and names:
            check_labels(checkpoint, names)
        set_seed(args.seed)
        trainer = task.make_trainer()
        if checkpoint is not None:
            check_projection(checkpoint, trainer.distillation)
        if trainer.is_world_process_zero():
            begin_recipe(Path(args.output_dir), arguments, is_resumed=checkpoint is not None)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(one_line(error))
    is_first = trainer.is_world_process_zero()
    if is_first:
        sizes = ", ".join(f"{count:,} for {name}" for name, count in task.count_examples().items())
        size = f"{count_parameters(trainer.model):,} parameters"
        say(f"{task.examples.capitalize()}: {sizes}. Model: {size}. Output: {args.output_dir}")
    with leaving_in_good_order(args):
        finish(task, trainer, checkpoint, arguments, say)
    try:
        if args.push_to_hub:
            trainer.push_to_hub()
    except OSError as error:
        sys.exit(one_line(error))
    finally:
        PartialState().destroy_process_group()  # else several processes can abort while they exit


def finish(
    task: TrainingTask,
    trainer: HfViTTrainer,
    checkpoint: str | None,
    arguments: Sequence[str],
    say: Callable[[str], None],
) -> None:
    """Trains, from a checkpoint on if there is one, scores and saves."""
    args, is_first = task.args, trainer.is_world_process_zero()
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
    if is_first:
        say("Scores: " + ", ".join(f"{name} {value:.4f}" for name, value in scores.items()))
        if trainer.average is not None:
            averaged = {name: value for name, value in trainer.averaged_scores.items() if name in scores}
            say("Averaged weights: " + ", ".join(f"{name} {value:.4f}" for name, value in averaged.items()))
        say(f"The model, its scores and its card: {args.output_dir}")


def launcher(world_size: int) -> list[str]:
    """Returns what starts so many processes, on as many machines as these are on."""
    if world_size == 1:
        return ["python"]
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    nodes = [] if processes == world_size else ["--nnodes", str(world_size // processes)]
    return ["torchrun", *nodes, "--nproc_per_node", str(processes)]


@contextmanager
def leaving_in_good_order(args: HfViTTrainingArguments) -> Iterator[None]:
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
        sys.exit(f"{one_line(error).rstrip('.')}. {how_to_go_on(args.output_dir)}")


def one_line(error: Exception) -> str:
    """Returns what to say last; the traceback is for those who have set `transformers.logging` to debug."""
    logger.debug("This is where it went wrong:", exc_info=error)
    return f"{os.path.basename(sys.argv[0])}: {in_one_line(error)}"
