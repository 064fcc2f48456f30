"""What the options of all tasks share: how they are read and written, and checks of their values."""

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Self


@dataclass
class HfViTTaskConfig:
    """Base class of the options of a task."""

    @classmethod
    def make(cls, options: dict[str, Any]) -> Self:
        """Returns the options in a dictionary, as config.json has them; `ValueError` for wrong names or values."""
        names = [field.name for field in fields(cls)]
        if unknown := sorted(set(options) - set(names)):
            raise ValueError(f"{cls.__name__} has no option {', '.join(unknown)}. It has: {', '.join(names)}.")
        return cls(**options)

    @classmethod
    def of(cls, options: Self | dict[str, Any] | None) -> Self:
        """Returns the options that a field of `HfViTConfig` holds; `None` means the defaults."""
        return cls.make(options or {}) if options is None or isinstance(options, dict) else options

    @classmethod
    def merge(cls, saved: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        """Returns saved options with those that are given in their places."""
        return {**saved, **given}

    def to_full_dict(self) -> dict[str, Any]:
        """Returns all options, as they come back from JSON: tuples as lists."""
        return {name: with_lists(value) for name, value in asdict(self).items()}

    def to_dict(self) -> dict[str, Any]:
        """Returns the options that differ from their defaults, as they come back from JSON."""
        defaults = type(self)().to_full_dict()
        return {name: value for name, value in self.to_full_dict().items() if value != defaults[name]}

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises `ValueError` where the values do not fit together."""
        self._check()

    def _check(self) -> None: ...


def with_lists(value: Any) -> Any:
    """Returns a value with lists in place of tuples, also within them."""
    return [with_lists(entry) for entry in value] if isinstance(value, list | tuple) else value


def check_positive(values: dict[str, Any]) -> None:
    """Raises `ValueError` if a number, or one of a list, is not positive and finite."""
    for name, value in values.items():
        numbers = value if isinstance(value, list | tuple) else [value]
        if not numbers or not all(0 < number < math.inf for number in numbers):
            raise ValueError(f"{name}={value} must be positive.")


def check_weights(values: dict[str, Any]) -> None:
    """Raises `ValueError` if a weight is negative or not finite, or all are 0."""
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}={value} must not be negative; 0 switches it off.")
    if not any(values.values()):
        raise ValueError(f"{', '.join(values)} are all 0, which leaves no loss. One at least must be positive.")


def check_thresholds(**thresholds: Any) -> None:
    """Raises `ValueError` if a threshold is given and does not lie in [0, 1]."""
    for name, value in thresholds.items():
        if value is not None and (isinstance(value, str) or not 0 <= value <= 1):
            raise ValueError(f"{name}={value!r} must lie in [0, 1].")


def check_defaults(options: HfViTTaskConfig, names: tuple[str, ...], choice: str, other: str) -> None:
    """Raises `ValueError` if options `names` have no effect for what is chosen and differ from their defaults."""
    # `choice` is the option that makes them so, such as "decoder", `other` its value for which they have an effect.
    defaults = {field.name: with_lists(field.default) for field in fields(options)}
    for name in names:
        value = with_lists(vars(options)[name])
        if value != defaults[name]:
            raise ValueError(
                f"{name}={value} is an option of {choice}={other!r} and does nothing for {vars(options)[choice]!r}. "
                f"Leave it out, or set {choice}={other!r}."
            )
