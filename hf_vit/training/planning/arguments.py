"""Options of how a training is planned."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...options.field import Range, option


MINUTES = Range(0.01)


@dataclass
class PlanArguments:
    """Options of how a training is planned; like `resume_from_checkpoint`, the Trainer itself does not use them."""

    minutes: float | None = option(
        default=None,
        help="Time for all of it, report included: a few steps are timed, then size of model and images, batch "
        "and steps chosen to fit. 10 by default without a GPU, where neither steps, epochs nor a size is given.",
        range=MINUTES,
        group="Training",
        essential=True,
        synonyms="time time_budget max_time",
        resume="free",
    )
    choose_defaults: bool | None = option(
        default=None,
        help="Choose what is not given by data and device; false takes the defaults listed here. True by "
        "default, but for a recipe, which stands as it is.",
        group="Training",
        resume="free",
    )

    def check_plan(self) -> None:
        """Raises `ValueError` if a time is to be planned with nothing to choose."""
        if self.minutes is not None and self.choose_defaults is False:
            raise ValueError(
                f"minutes={self.minutes:g} leaves the number of steps to be chosen, and choose_defaults=False chooses "
                "nothing. Give one of the two."
            )


def parse_changes(changes: Sequence[str] | None) -> dict[int, int]:
    """Returns all steps of a training from some step on, by that step.

    Args:
        changes: Like "143:812", by which a training has 812 steps from its 143rd on.

    Raises:
        ValueError: if one is something else.
    """
    found = dict[int, int]()
    for change in changes or ():
        step, _, length = change.partition(":")
        if not (step.isdecimal() and length.isdecimal() and 0 < int(step) < int(length)):
            raise ValueError(f"length_changes={change!r} must be like 143:812: a step, and the steps from it on.")
        found[int(step)] = int(length)
    return found
