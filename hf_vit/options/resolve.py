"""Construct option dataclasses: check option names and convert values to the declared types."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from enum import Enum
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..data.reading.files import split_names
from .field import Names, check_number
from .library import metadata_of, options_of
from .names import ANSWERS, unknown_option, with_underscores


# Pairs of options in which the first value must not be larger than the second
PAIRS = (("min_scale", "max_scale"), ("min_eval_depth", "max_eval_depth"))
PLAIN = (str, Real, list, tuple, Mapping, os.PathLike, Enum)  # types of values that can be converted
EXPECTED = {
    **{bool: "true or false", int: "a whole number", float: "a number", str: "text", Names: "a list of names"},
    dict: "a mapping, or its JSON: '{\"name\": 1}'",
}


class Options:
    """Base class of option dataclasses. The constructor converts values to the declared types and checks them."""

    def __post_init__(self) -> None:
        convert_all(self)


def build(types: Sequence[type[Any]], values: Mapping[str, Any], **defaults: Any) -> tuple[Any, ...]:
    """Return an instance of each option dataclass in `types`, with converted and checked values.

    Args:
        types: Option dataclasses.
        values: Option values by name. `None` selects the default.
        **defaults: Defaults that replace those of the dataclasses.

    Raises:
        ValueError: if an option is unknown, a value has the wrong type or is invalid, or two options exclude each
            other.
    """
    given = {**defaults, **known_options(types, values)}
    made = tuple(kind(**{name: given[name] for name in options_of(kind) if name in given}) for kind in types)
    check_conflicts(*made)
    return made


def known_options(types: Sequence[type[Any]], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are not `None`; raise `ValueError` if a name is not an option of the dataclasses."""
    known, given = options_of(*types), with_underscores(values)
    for name in given:
        if name not in known or name in ANSWERS:
            synonyms = {option: metadata["synonyms"] for option, metadata in known.items()}
            raise ValueError(unknown_option(name, synonyms, prefix=""))
    return {name: value for name, value in given.items() if value is not None}


def resolve(types: Sequence[type[Any]], values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert option values to the declared types, to save them in recipes and commands.

    Raise `ValueError` for unknown options and values of a wrong type. Ranges are not checked.
    """
    known = options_of(*types)
    kinds = {name: kind for declaring in types for name, kind in get_type_hints(declaring).items()}
    given = known_options(types, values)
    return {name: convert(name, value, kinds[name], known[name]["choices"]) for name, value in given.items()}


def convert_all(options: Any) -> None:
    """Convert all values of an option dataclass to the declared types; raise `ValueError` for an invalid value."""
    kinds, values = get_type_hints(type(options)), vars(options)
    for item in fields(options):
        value, metadata = values.get(item.name), metadata_of(item)
        # Default values and objects, such as an AcceleratorConfig, are not converted.
        if isinstance(value, PLAIN) and value is not item.default:
            value = convert(item.name, value, kinds[item.name], metadata["choices"])
            setattr(options, item.name, value)
        check_number(item.name, value, metadata["range"], item.default)
    check_conflicts(options)
    for low, high in PAIRS:
        if values.get(low) is not None and values.get(high) is not None and values[low] > values[high]:
            raise ValueError(f"{low}={values[low]} must not exceed {high}={values[high]}. Swap the two values.")


def check_conflicts(*parts: Any) -> None:
    """Raise `ValueError` if options of the dataclasses exclude each other.

    An option excludes others if it is true, or a value that is neither its default nor empty nor zero.
    """
    known = {item.name: item for part in parts for item in fields(part)}
    values = {name: value for part in parts for name, value in vars(part).items() if name in known}
    active = {
        name: value for name, value in values.items() if value is True or (value and value != known[name].default)
    }
    for name in active:
        for other, reason in metadata_of(known[name])["conflicts"].items():
            if other in active:
                raise ValueError(
                    f"{name}={active[name]!r} and {other}={active[other]!r} exclude each other: {reason}. Remove one "
                    "of the two options."
                )


def convert(name: str, value: Any, kind: Any, choices: Sequence[Any] | None = None) -> Any:
    """Convert a value to the type `kind`; raise `ValueError` if this fails or the result is not in `choices`."""
    parts = members(kind)
    for part in parts:
        try:
            converted = as_type(value, part)
        except (TypeError, ValueError):
            continue
        if choices is not None and converted not in choices:
            raise ValueError(f"{name}={converted!r} is unknown. Choose one of {', '.join(map(str, choices))}.")
        return converted
    expected = " or ".join(dict.fromkeys(map(expectation, parts)))
    raise ValueError(f"{name}={value!r} must be {expected}.")


def members(kind: Any) -> list[Any]:
    """Return the member types of a union, except `None`, and except `str` if the union contains an enumeration."""
    parts = list(get_args(kind)) if get_origin(kind) in (Union, UnionType) else [kind]
    has_names = any(isinstance(part, type) and issubclass(part, Enum) for part in parts)
    return [part for part in parts if part is not NoneType and not (has_names and part is str)]


def as_type(value: Any, kind: Any) -> Any:
    """Convert a value to a type that is not a union; raise `TypeError` or `ValueError` if this fails."""
    origin = get_origin(kind) or kind
    if kind is Any:
        return value
    if origin is Literal:
        if any(choice == value and type(choice) is type(value) for choice in get_args(kind)):
            return value
        raise ValueError
    if kind is Names:
        return Names(split_names(value) if isinstance(value, str) else as_type(value, list[str]))
    if origin in (list, tuple):
        return as_sequence(value, kind)
    if origin is dict:
        content = json.loads(value) if isinstance(value, str) else value
        if isinstance(content, Mapping):
            return dict(content)
        raise TypeError
    if issubclass(origin, Enum):
        return origin(value).value
    if origin is str and not isinstance(value, bool):
        return str(value) if isinstance(value, Real) else os.fspath(value)
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if origin is int and is_number and (isinstance(value, Integral) or float(value).is_integer()):
        return int(value)
    if origin is float and is_number:
        return float(value)
    if isinstance(value, origin) and origin not in (int, float, str):
        return value
    raise TypeError


def as_sequence(value: Any, kind: Any) -> Any:
    """Convert a value to a list or a fixed-length tuple. A string, path or number becomes a sequence of one item."""
    items = [value] if isinstance(value, str | os.PathLike | Real) else list(value)
    types = get_args(kind)
    if get_origin(kind) is tuple:
        return tuple(as_type(item, part) for item, part in zip(items, types, strict=True))
    return [as_type(item, types[0]) for item in items]


def expectation(kind: Any) -> str:
    """Return a description of the valid values of a type for error messages, such as "a whole number"."""
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if origin in EXPECTED:
        return EXPECTED[origin]
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if isinstance(origin, type) and issubclass(origin, Enum):
        return f"one of {', '.join(str(member.value) for member in origin)}"
    if origin is list:
        return f"a list of {expectation(parts[0])}"
    if origin is tuple:
        return f"a tuple of {len(parts)}, each {expectation(parts[0])}"
    return f"a {origin.__name__}"


def values_of(options: Any, *groups: str) -> dict[str, Any]:
    """Return the values of all options in the given help groups, by option name."""
    return {item.name: vars(options)[item.name] for item in fields(options) if item.metadata.get("group") in groups}
