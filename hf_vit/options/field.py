"""Declaration of an option: a dataclass field whose metadata hold its help, legal values and behavior on resume."""

import math
from dataclasses import MISSING, field
from functools import partial
from typing import Any, NamedTuple


class Range(NamedTuple):
    """An interval of numbers, closed below and above unless it says otherwise."""

    least: float = -math.inf
    most: float = math.inf
    is_open_below: bool = False
    is_open_above: bool = False

    def __contains__(self, number: object) -> bool:
        assert isinstance(number, int | float)
        is_above = self.least < number if self.is_open_below else self.least <= number
        return is_above and (number < self.most if self.is_open_above else number <= self.most)

    def __str__(self) -> str:
        if self.most == math.inf:
            return f"be {'more than' if self.is_open_below else 'at least'} {self.least:g}"
        opening, closing = "[("[self.is_open_below], "])"[self.is_open_above]
        return f"lie in {opening}{self.least:g}, {self.most:.10g}{closing}"


def check_number(name: str, value: Any, legal: Range | None, default: Any) -> None:
    """Raise `ValueError` if a value is a number, or a list with one, that is infinite, NaN or out of range.

    Args:
        name: The option.
        value: Its value.
        legal: Its range, if it has one.
        default: Its default, which the error names.
    """
    for number in value if isinstance(value, list | tuple) else [value]:
        if not isinstance(number, int | float) or isinstance(number, bool):
            continue
        if not math.isfinite(number) or (legal is not None and number not in legal):
            ending = "" if default in (MISSING, None, value) else f" The default is {default}."
            raise ValueError(f"{name}={value} must {legal or 'be a finite number'}.{ending}")


class Names(list[str]):
    """A list of names, which may also be given as one text with commas between them, or as a JSON list."""

    __args__ = (str,)  # the type of its items, as transformers.HfArgumentParser reads it


COUNT = Range(least=1)
NOT_NEGATIVE = Range(least=0)
POSITIVE = Range(least=0, is_open_below=True)
PROBABILITY = Range(0, 1)
SHARE = Range(0, 1, is_open_below=True)
SHARE_LEFT_OUT = Range(0, 1, is_open_above=True)
SEED = Range(0, 2**32 - 1)


# Metadata of an option, and what they are if it does not declare them
METADATA: dict[str, Any] = {
    "help": "",  # what it does
    "brief": None,  # shorter text for the page of essential options
    "range": None,  # legal numbers
    "choices": None,  # legal values
    "group": "",  # title of its group on help pages
    "essential": False,  # whether it is on the page of essential options
    "synonyms": "",  # its names in other libraries, separated by spaces
    # "free" if a resumed run may have another value, "fixed" if the saved optimizer depends on it; by default it
    # must have the same value unless changes are accepted
    "resume": "",
    "private": False,  # whether recipes leave it out: access tokens and requests
}


def described(**metadata: Any) -> dict[str, Any]:
    """Return the metadata of an option, given those that differ from `METADATA`."""
    assert metadata.keys() <= METADATA.keys(), metadata
    return {**METADATA, **metadata}


class Metadata(dict[str, Any]):
    """Metadata of an option whose `keys` are those that transformers.HfArgumentParser may pass on to argparse."""

    def keys(self) -> Any:
        """Return the names of arguments of `ArgumentParser.add_argument` that are set."""
        return [name for name in ("help", "choices") if self[name]]


def option(default: Any, help: str, range: Range | None = None, **metadata: Any) -> Any:
    """Return the dataclass field of an option; see `METADATA`. A default list is copied."""
    given = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return field(**given, metadata=Metadata(described(help=help, range=range, **metadata)))


# Options of the groups that several tasks have
data_option = partial(option, group="Data")
training_images_option = partial(option, group="Training images")
model_option = partial(option, group="Model")
augmentation_option = partial(option, group="Augmentation")
evaluation_option = partial(option, group="Evaluation", essential=True)

# Options that several classes declare, each with its own help
source_option = partial(
    data_option, "", essential=True, synonyms="data data_dir data_path dataset train_dir root", resume="free"
)
start_option = partial(
    option, essential=True, synonyms="weights pretrained checkpoint ckpt initial_checkpoint backbone"
)
