"""Parsers of command lines, which answer a mistake by one line that names what may have been meant."""

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import Field
from difflib import get_close_matches
from typing import Any, NoReturn

from transformers import HfArgumentParser

from ..options.library import metadata_of
from .help_page import help_page


# What other libraries call our options
SYNONYMS = {
    "dataset_name": "data data_dir data_path dataset train_dir root",
    "model_name_or_path": "weights pretrained checkpoint ckpt initial_checkpoint backbone",
    "preset": "arch architecture model_size",
    "image_size": "imgsz img_size input_size resolution size",
    "num_train_epochs": "epochs num_epochs max_epochs",
    "max_steps": "steps iterations num_steps",
    "learning_rate": "lr lr0 base_lr",
    "lr_scheduler_type": "sched scheduler lr_scheduler",
    "warmup_steps": "warmup warmup_epochs warmup_ratio",
    "weight_decay": "wd",
    "per_device_train_batch_size": "batch_size batch bs train_batch_size",
    "per_device_eval_batch_size": "eval_batch_size batch_size validation_batch_size",
    "gradient_accumulation_steps": "grad_accum_steps accumulate",
    "max_grad_norm": "clip_grad grad_clip gradient_clip_val",
    "optim": "opt optimizer",
    "bf16": "amp mixed_precision half",
    "dataloader_num_workers": "workers num_workers",
    "num_workers": "workers",
    "early_stopping_patience": "patience",
    "resume_from_checkpoint": "resume",
    "output_dir": "output out save_dir out_dir project_dir name",
    "train_val_split": "val_split validation_split holdout",
    "label_smoothing_factor": "smoothing label_smoothing",
    "mixup_alpha": "mixup",
    "cutmix_alpha": "cutmix",
    "auto_augment": "aa randaugment",
    "ema_decay": "ema model_ema model_ema_decay",
    "threshold": "conf score_threshold confidence",
    "use_cpu": "cpu no_cuda",
    "minutes": "time time_budget max_time",
}
# Of the library's scripts, which say what to do one by one
REFUSED = ("do_train", "do_eval", "do_predict")
ANSWERS = {
    **{
        name: f"{name} has nothing to switch on: a training is always followed by an evaluation, and a saved model is "
        "evaluated, or predicts, by a command of its own. Leave it out."
        for name in REFUSED
    },
    "device": "The GPU is used where there is one. Leave device out, or set use_cpu.",
}


def unknown_option(name: str, known: Iterable[str], prefix: str = "--") -> str:
    """Returns what to answer to an option that there is not: what may have been meant.

    Args:
        name: The option, without the dashes before it.
        known: The names of all options that there are.
        prefix: What stands before names where the option was given.
    """
    wanted, names = name.replace("-", "_").lower(), sorted(known)
    if wanted in ANSWERS:
        return ANSWERS[wanted]
    meant = [option for option, words in SYNONYMS.items() if option in names and wanted in words.split()]
    question = f" Did you mean {' or '.join(prefix + option for option in meant)}?" if meant else ""
    return f"There is no option {prefix}{name}.{question or nearest(wanted, names, prefix)}"


def nearest(wanted: str, names: Iterable[str], prefix: str = "") -> str:
    """Returns a question on whether the nearest of some names were meant, empty where none is near."""
    meant = get_close_matches(wanted, list(names), n=3, cutoff=0.7)
    return f" Did you mean {' or '.join(prefix + name for name in meant)}?" if meant else ""


def name_words(arguments: Sequence[str], names: Sequence[str]) -> list[str]:
    """Returns a command line whose first words have names: `photos --seed 1` with "data" is `--data photos --seed 1`.

    Args:
        arguments: The command line. It may start with as many words, or fewer.
        names: The options that these words are values of, in their order.

    Returns:
        The command line, with options alone.
    """
    options: list[str] = []
    rest = list(arguments)
    for name in names:
        if not rest or rest[0].startswith("-"):
            break
        options += [f"--{name}", rest.pop(0)]
    return [*options, *rest]


@contextmanager
def exit_in_one_line(*errors: type[Exception]) -> Iterator[None]:
    """Exits with the name of the program and one line where something fails for a reason that a user can mend."""
    try:
        yield
    except errors as error:
        sys.exit(f"{os.path.basename(sys.argv[0])}: {error}")


class OneLineParser(argparse.ArgumentParser):
    """Refuses a command line by a `ValueError` of one line, without a page on how it is used."""

    def __init__(self, description: str | None = None, command: str = "", **options: Any) -> None:
        program = os.path.basename(sys.argv[0])
        options["prog"] = f"{program} {command}".strip() if program == "hf-vit" else program
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        """Raises `ValueError`."""
        raise ValueError(f"{message}. --help lists the options.")

    def parse_known_args(  # type: ignore[override]  # which has overloads for the type of `namespace`
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Raises `ValueError` for the first argument that is not known."""
        given = list(sys.argv[1:] if args is None else args)
        for word in given:
            name = word.partition("=")[0].replace("-", "_")
            if name.removeprefix("__") in REFUSED:
                raise ValueError(ANSWERS[name.removeprefix("__")])
        namespace, rest = super().parse_known_args(given, namespace)
        names = {action.dest for action in self._actions if action.option_strings}
        for word in rest:
            if word.startswith("-"):
                raise ValueError(unknown_option(word.lstrip("-").partition("=")[0], names))
        if rest:
            raise ValueError(
                f"{shown(rest)} belongs to no option. What an option takes stands right behind it, and what stands "
                "alone comes before all options."
            )
        return namespace, rest


def shown(words: Sequence[str]) -> str:
    """Returns words in quotes."""
    return " ".join(map(repr, words))


class HelpAction(argparse.Action):
    """Prints a page on the options that matter, or, as `--help all`, on all of them."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None
    ) -> None:
        """Prints and exits."""
        if values not in (None, "all"):
            raise ValueError(f"--help {values}: there are --help, for what matters, and --help all.")
        assert isinstance(parser, Parser)
        sys.stdout.write(parser.page(has_all=values is not None))
        parser.exit()


class Parser(OneLineParser, HfArgumentParser):
    """Parses the options of dataclasses."""

    def __init__(self, types: Sequence[type], description: str | None = None) -> None:
        HfArgumentParser.__init__(self, types, description=description, allow_abbrev=False, add_help=False)
        self.add_argument("-h", "--help", nargs="?", action=HelpAction, default=argparse.SUPPRESS)

    @staticmethod
    def _parse_dataclass_field(parser: Any, field: Field[Any]) -> None:
        known, plain = metadata_of(field), copy(field)
        library = {name: field.metadata[name] for name in ("nargs", "const") if name in field.metadata}
        library |= {"choices": known["choices"]} if known["choices"] else {}
        aliases = ["--model"] if field.name == "model_name_or_path" else []
        plain.metadata = {"help": known["help"], "aliases": aliases, **library}  # type: ignore[assignment]
        HfArgumentParser._parse_dataclass_field(parser, plain)
        field.type = plain.type  # without None, as `kinds_of` expects it

    def page(self, has_all: bool) -> str:
        """Returns the help page."""
        return help_page(self.description or "", self.dataclass_types, self._actions, has_all)
