"""Base class of task options, with functions that declare, validate and serialize options."""

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Self

from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN


# Tasks of the heads that can share a backbone.
HEAD_TASKS = (
    *("image-classification", "semantic-segmentation", "universal-segmentation", "depth-estimation"),
    *("object-detection", "keypoint-detection", "zero-shot-image-classification"),
)
RULES = {"(0, inf)": "be positive", "[0, inf)": "not be negative", "(-inf, inf)": "be finite"}


def option(default: Any, interval: str = "", hint: str = "", of: str = "") -> Any:
    """Declares a dataclass field and the values that it accepts.

    Args:
        default: Default value.
        interval: Interval of accepted numbers, such as "[0, 1)" or "(0, inf)". For a list, the interval applies to
            each number. None is always accepted; infinity and NaN are never accepted.
        hint: Text for the error message that explains a bound of the interval.
        of: Value of the field `HfViTTaskConfig.choice` for which the option has an effect. If a checkpoint is loaded
            with a different value of this field, the saved option is dropped.
    """
    return field(default=default, metadata={"interval": interval, "hint": hint, "of": of})


def check_intervals(options: Any) -> None:
    """Raises `ValueError` if a dataclass field declared with `option` has a value outside its interval."""
    for entry in fields(options):
        interval, hint = entry.metadata.get("interval"), entry.metadata.get("hint")
        value = vars(options)[entry.name] if interval else None
        if interval and value is not None and not is_within(value, interval):
            least = f"be at least {interval[1:].partition(',')[0]}"
            rule = RULES.get(interval) or (least if interval.endswith("inf)") else f"lie in {interval}")
            raise ValueError(f"{entry.name}={value} must {rule}{f'; {hint}' if hint else ''}.")


def is_within(value: Any, interval: str) -> bool:
    """Returns whether a number, or every number of a non-empty list, lies in an interval such as "[0, 1)"."""
    low, high = map(float, interval[1:-1].split(", "))
    numbers = value if isinstance(value, list | tuple) else [value]
    ends = {end for end, bracket in ((low, interval[0]), (high, interval[-1])) if bracket in "[]"}
    return bool(numbers) and all(low < number < high or number in ends for number in numbers)


@dataclass
class HfViTTaskConfig:
    """Base class of the options of one task."""

    # Name of the field, such as "decoder", that determines which other options have an effect; "" if there is none
    choice: ClassVar[str] = ""
    # Names of the loss weights, at least one of which must be positive
    losses: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def make(cls, options: dict[str, Any]) -> Self:
        """Builds the options from a dictionary in config.json; raises `ValueError` if names or values are invalid."""
        names = [field.name for field in fields(cls)]
        if unknown := sorted(set(options) - set(names)):
            raise ValueError(f"{cls.__name__} has no option {', '.join(unknown)}. Options: {', '.join(names)}.")
        return cls(**options)

    @classmethod
    def of(cls, options: Self | dict[str, Any] | None) -> Self:
        """Converts the value of a field of `HfViTConfig` to an instance of this class; `None` gives the defaults."""
        return cls.make(options or {}) if options is None or isinstance(options, dict) else options

    @classmethod
    def merge(cls, saved: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        """Overrides saved options by given ones. If `choice` changes, drops the options of its old value."""
        chosen = saved.get(cls.choice, vars(cls).get(cls.choice))
        if given.get(cls.choice, chosen) != chosen:
            saved = {name: value for name, value in saved.items() if name not in cls.options_of()}
        return {**saved, **given}

    @classmethod
    def options_of(cls, chosen: str | None = None) -> tuple[str, ...]:
        """Returns the options that apply only to the value `chosen` of the field `choice`; None means any value."""
        owners = {entry.name: entry.metadata.get("of") for entry in fields(cls)}
        return tuple(name for name, owner in owners.items() if owner and chosen in (None, owner))

    def to_full_dict(self) -> dict[str, Any]:
        """Returns all options as stored in JSON, with lists in place of tuples."""
        return {name: tuples_to_lists(value) for name, value in asdict(self).items()}

    def to_dict(self) -> dict[str, Any]:
        """Returns the options that differ from their defaults, as stored in JSON."""
        defaults = type(self)().to_full_dict()
        return {name: value for name, value in self.to_full_dict().items() if value != defaults[name]}

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises `ValueError` if values are invalid or inconsistent."""
        check_intervals(self)
        self._check_choice()
        values = {name: vars(self)[name] for name in self.losses}
        if values and not any(values.values()):
            raise ValueError(
                f"{', '.join(values)} are all 0, so there is no loss. Set at least one to a positive value."
            )
        self._check()

    def _check_choice(self) -> None:
        chosen = vars(self).get(self.choice)
        for entry in fields(self):
            other, value = entry.metadata.get("of"), tuples_to_lists(vars(self)[entry.name])
            if other and other != chosen and value != tuples_to_lists(entry.default):
                raise ValueError(
                    f"{entry.name}={value} applies only to {self.choice}={other!r} and has no effect with {chosen!r}. "
                    f"Remove it, or set {self.choice}={other!r}."
                )

    def _check(self) -> None: ...


@strict
@dataclass
class HfViTMultiTaskConfig(HfViTTaskConfig):
    """Options of the heads of `HfViTForMultiTask`.

    Args:
        heads: Options of each head by its name: `task`, the name of its task; `config`, the fields of `HfViTConfig`
            that belong to the head, such as `depth_config` and `id2label`; `processor`, the options of its image
            processor; and `default`, whether single-task classes open this head if several heads have the same task.
            Without a default, they open the first one. Heads are ordered by name.
        learns_loss_weights: Whether the weights of the losses are learned (see `HfViTForMultiTask.forward`).
    """

    heads: dict[str, dict[str, Any]] | None = None
    learns_loss_weights: bool = False

    def __post_init__(self) -> None:
        # Normalize values to those in config.json.
        self.heads = None if self.heads is None else json.loads(json.dumps(self.heads, sort_keys=True))
        super().__post_init__()

    def _check(self) -> None:
        for name, head in (self.heads or {}).items():
            if not name.isidentifier():
                raise ValueError(f"The head name {name!r} must consist of letters, digits and underscores.")
            if head.get("task") not in HEAD_TASKS:
                raise ValueError(
                    f"The head {name!r} has the task {head.get('task')!r}. Choose one of {', '.join(HEAD_TASKS)}."
                )

    def head(self, name: str) -> dict[str, Any]:
        """Returns the options of a head; raises `ValueError` if it does not exist."""
        heads = self.heads or {}
        if name not in heads:
            raise ValueError(f"head={name!r} is not a head of the model. Heads: {', '.join(heads) or 'none'}.")
        return heads[name]

    def find_head(self, task: str, name: str | None = None) -> str | None:
        """Returns the name of the head that a model of `task` opens, or None if there is no such head.

        Raises `ValueError` if there is no head `name`, or it has another task.
        """
        heads = self.heads or {}
        found = [own for own in heads if heads[own]["task"] == task]
        if name is not None and name not in found:
            names = ", ".join(f"{own} ({head['task']})" for own, head in heads.items()) or "none"
            raise ValueError(f"There is no head {name!r} for {task}. Heads of the checkpoint: {names}.")
        preferred = [own for own in found if heads[own].get("default")] or found
        return name or (preferred[0] if preferred else None)


def tuples_to_lists(value: Any) -> Any:
    """Converts tuples to lists, including nested ones."""
    return [tuples_to_lists(entry) for entry in value] if isinstance(value, list | tuple) else value


def check_thresholds(**thresholds: Any) -> None:
    """Raises `ValueError` if a threshold is neither None nor in [0, 1]."""
    for name, value in thresholds.items():
        if value is not None and (isinstance(value, str) or not 0 <= value <= 1):
            raise ValueError(f"{name}={value!r} must lie in [0, 1].")


def check_activation(name: str) -> None:
    """Raises `ValueError` if transformers has no activation of this name."""
    if name not in ACT2FN:
        raise ValueError(f"hidden_act={name!r} is unknown. Choose one of {', '.join(sorted(ACT2FN))}.")
