"""Declare options: dataclass fields with metadata for help texts, valid values, conflicts and resumed runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple


class Range(NamedTuple):
    """An interval of numbers. The bounds are included unless `is_open_below` or `is_open_above` is set."""

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
    """Raise `ValueError` if a number, or a number in a list, is infinite, NaN or out of range.

    Args:
        name: Name of the option.
        value: Value of the option.
        legal: Valid range, or None if all finite numbers are valid.
        default: Default value, which is named in the error message.
    """
    for number in value if isinstance(value, list | tuple) else [value]:
        if not isinstance(number, int | float) or isinstance(number, bool):
            continue
        if not math.isfinite(number) or (legal is not None and number not in legal):
            ending = "" if default in (MISSING, None, value) else f" The default is {default}."
            raise ValueError(f"{name}={value} must {legal or 'be a finite number'}.{ending}")


class Names(list[str]):
    """Type of options that take a list of names: a list, a comma-separated string, or a JSON list."""

    __args__ = (str,)  # item type for transformers.HfArgumentParser


COUNT = Range(least=1)
NOT_NEGATIVE = Range(least=0)
POSITIVE = Range(least=0, is_open_below=True)
PROBABILITY = Range(0, 1)
SHARE = Range(0, 1, is_open_below=True)
SHARE_LEFT_OUT = Range(0, 1, is_open_above=True)
SEED = Range(0, 2**32 - 1)


class Metadata(dict[str, Any]):
    """Metadata of an option. `keys` returns only keys that transformers.HfArgumentParser may pass to argparse."""

    def keys(self) -> Any:
        """Return the keys that are arguments of `ArgumentParser.add_argument` and have a value."""
        return [name for name in ("help", "choices") if self[name]]


def option(
    default: Any = MISSING,
    help: str = "",
    range: Range | None = None,
    *,
    brief: str = "",
    choices: Sequence[Any] | None = None,
    group: str = "",
    essential: bool = False,
    synonyms: str = "",
    conflicts: Mapping[str, str] = MappingProxyType({}),
    resume: str = "",
    private: bool = False,
) -> Any:
    """Return the dataclass field of an option.

    Args:
        default: Default value. A list is copied for each instance. Options of `LIBRARY_OPTIONS` have none, because
            transformers declares it.
        help: Text on help pages.
        range: Valid range of numbers.
        brief: Shorter text for the page of essential options.
        choices: Valid values.
        group: Title of the group on help pages.
        essential: Whether the page of essential options lists the option.
        synonyms: Names in other libraries, separated by spaces.
        conflicts: Options that exclude this option, with the reasons, see `check_conflicts`.
        resume: Whether a resumed run may change the option. "free" allows any change, "fixed" allows none because the
            saved optimizer depends on the value, and "" allows changes if `resume_with_changes` is set.
        private: Whether recipes omit the option, because it is an access token or a one-time request.
    """
    given: dict[str, Any] = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    metadata = Metadata(help=help, range=range, brief=brief, choices=choices, group=group, essential=essential)
    metadata.update(synonyms=synonyms, conflicts=conflicts, resume=resume, private=private)
    return field(**given, metadata=metadata)


# Conflict of options that change images or their size in each step
CHANGES_IMAGES = {"cached_views": "the images change in each step, so that their features cannot be stored"}

# Functions that declare options in a help group that several tasks share
data_option = partial(option, group="Data")
training_images_option = partial(option, group="Training images")
model_option = partial(option, group="Model")
augmentation_option = partial(option, group="Augmentation")
evaluation_option = partial(option, group="Evaluation", essential=True)

# Functions that declare options with a different help text in each of several classes
source_option = partial(
    data_option, "", essential=True, synonyms="data data_dir data_path dataset train_dir root", resume="free"
)
start_option = partial(
    option, essential=True, synonyms="model weights pretrained checkpoint ckpt initial_checkpoint backbone"
)
