"""What the options of backbone and tasks share: how they are declared, checked, read and written."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Self

from transformers.activations import ACT2FN


RULES = {"(0, inf)": "be positive", "[0, inf)": "not be negative", "(-inf, inf)": "be finite"}


def option(default: Any, interval: str = "", hint: str = "", of: str = "") -> Any:
    """Declares a field with the values that it may have.

    Args:
        default: Its default.
        interval: Such as "[0, 1)" or "(0, inf)", for a number or each of a list; None passes, infinity and NaN never.
        hint: What one end stands for, for the error.
        of: The value of the class's `choice` for which the option has an effect. Saved options do not go over to
            another choice.
    """
    return field(default=default, metadata={"interval": interval, "hint": hint, "of": of})


def check_intervals(options: Any) -> None:
    """Raises `ValueError` if a field of a dataclass that `option` declares is not in its interval."""
    for entry in fields(options):
        interval, hint = entry.metadata.get("interval"), entry.metadata.get("hint")
        value = vars(options)[entry.name] if interval else None
        if interval and value is not None and not is_within(value, interval):
            least = f"be at least {interval[1:].partition(',')[0]}"
            rule = RULES.get(interval) or (least if interval.endswith("inf)") else f"lie in {interval}")
            raise ValueError(f"{entry.name}={value} must {rule}{f'; {hint}' if hint else ''}.")


def is_within(value: Any, interval: str) -> bool:
    """Returns whether a number, or each of a list with one at least, is in an interval such as "[0, 1)"."""
    low, high = map(float, interval[1:-1].split(", "))
    numbers = value if isinstance(value, list | tuple) else [value]
    ends = {end for end, bracket in ((low, interval[0]), (high, interval[-1])) if bracket in "[]"}
    return bool(numbers) and all(low < number < high or number in ends for number in numbers)


@dataclass
class HfViTTaskConfig:
    """Base class of the options of a task."""

    # The field, if any, that decides which other options have an effect, and losses of which one must have weight
    choice: ClassVar[str] = ""
    losses: ClassVar[tuple[str, ...]] = ()

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
        """Returns saved options with those that are given in their places; those of another choice are left behind."""
        chosen = saved.get(cls.choice, vars(cls).get(cls.choice))
        if given.get(cls.choice, chosen) != chosen:
            saved = {name: value for name, value in saved.items() if name not in cls.options_of()}
        return {**saved, **given}

    @classmethod
    def options_of(cls, chosen: str | None = None) -> tuple[str, ...]:
        """Returns the names of the options of one value of `choice`, or those of all values."""
        owners = {entry.name: entry.metadata.get("of") for entry in fields(cls)}
        return tuple(name for name, owner in owners.items() if owner and chosen in (None, owner))

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
        check_intervals(self)
        self._check_choice()
        values = {name: vars(self)[name] for name in self.losses}
        if values and not any(values.values()):
            raise ValueError(f"{', '.join(values)} are all 0, which leaves no loss. One at least must be positive.")
        self._check()

    def _check_choice(self) -> None:
        chosen = vars(self).get(self.choice)
        for entry in fields(self):
            other, value = entry.metadata.get("of"), with_lists(vars(self)[entry.name])
            if other and other != chosen and value != with_lists(entry.default):
                raise ValueError(
                    f"{entry.name}={value} is an option of {self.choice}={other!r} and does nothing for {chosen!r}. "
                    f"Leave it out, or set {self.choice}={other!r}."
                )

    def _check(self) -> None: ...


def with_lists(value: Any) -> Any:
    """Returns a value with lists in place of tuples, also within them."""
    return [with_lists(entry) for entry in value] if isinstance(value, list | tuple) else value


def check_thresholds(**thresholds: Any) -> None:
    """Raises `ValueError` if a threshold is given and does not lie in [0, 1]."""
    for name, value in thresholds.items():
        if value is not None and (isinstance(value, str) or not 0 <= value <= 1):
            raise ValueError(f"{name}={value!r} must lie in [0, 1].")


def check_activation(name: str) -> None:
    """Raises `ValueError` if the library has no activation of this name."""
    if name not in ACT2FN:
        raise ValueError(f"hidden_act={name!r} is unknown. Choose one of {', '.join(sorted(ACT2FN))}.")
