"""From option values by name to dataclasses: names are checked, and values get the declared types."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from enum import Enum
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..data.formats.files import split_names
from .field import Names, check_number
from .library import metadata_of, options_of
from .names import ANSWERS, unknown_option


# Pairs of options of which the first must not be larger than the second
PAIRS = (("min_scale", "max_scale"), ("min_eval_depth", "max_eval_depth"))
PLAIN = (str, Real, list, tuple, Mapping, os.PathLike, Enum)  # types of values that options are given as
EXPECTED = {
    **{bool: "true or false", int: "a whole number", float: "a number", str: "text", Names: "a list of names"},
    dict: "a mapping, or its JSON: '{\"name\": 1}'",
}


class Options:
    """Base of dataclasses of options: construction converts values to the declared types and checks them."""

    def __post_init__(self) -> None:
        convert_all(self)


def build(types: Sequence[type[Any]], values: Mapping[str, Any], **defaults: Any) -> tuple[Any, ...]:
    """Return an instance of each of some dataclasses of options, which convert and check the values.

    Args:
        types: The dataclasses.
        values: Option values by name; `None` stands for the default.
        **defaults: Defaults that replace those of the dataclasses.

    Raises:
        ValueError: if an option is unknown, or a value has the wrong type or is not legal.
    """
    given = {**defaults, **known_options(types, values)}
    return tuple(kind(**{name: given[name] for name in options_of(kind) if name in given}) for kind in types)


def known_options(types: Sequence[type[Any]], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are not `None`; raise `ValueError` if none of some dataclasses has an option."""
    known, given = options_of(*types), {name.replace("-", "_"): value for name, value in values.items()}
    for name in given:
        if name not in known or name in ANSWERS:
            synonyms = {option: metadata["synonyms"] for option, metadata in known.items()}
            raise ValueError(unknown_option(name, synonyms, prefix=""))
    return {name: value for name, value in given.items() if value is not None}


def resolve(types: Sequence[type[Any]], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are given with the declared types, as recipes and commands record them.

    Raises `ValueError` as `build` does, but for numbers out of range.
    """
    known = options_of(*types)
    kinds = {name: kind for declaring in types for name, kind in get_type_hints(declaring).items()}
    given = known_options(types, values)
    return {name: convert(name, value, kinds[name], known[name]["choices"]) for name, value in given.items()}


def convert_all(options: Any) -> None:
    """Give the values of a dataclass of options their declared types; raise `ValueError` for one that is not legal."""
    kinds, values = get_type_hints(type(options)), vars(options)
    for item in fields(options):
        value, metadata = values.get(item.name), metadata_of(item)
        # Objects of the library, such as an AcceleratorConfig, and defaults stay as they are.
        if isinstance(value, PLAIN) and value is not item.default:
            value = convert(item.name, value, kinds[item.name], metadata["choices"])
            setattr(options, item.name, value)
        check_number(item.name, value, metadata["range"], item.default)
    for low, high in PAIRS:
        if values.get(low) is not None and values.get(high) is not None and values[low] > values[high]:
            raise ValueError(f"{low}={values[low]} must not be more than {high}={values[high]}. Exchange them, say.")


def convert(name: str, value: Any, kind: Any, choices: Sequence[Any] | None = None) -> Any:
    """Return a value as an option of a type; raise `ValueError` if it does not fit or is none of the choices."""
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
    """Return the types that a union consists of, without `None`, and without `str` next to an enumeration."""
    parts = list(get_args(kind)) if get_origin(kind) in (Union, UnionType) else [kind]
    has_names = any(isinstance(part, type) and issubclass(part, Enum) for part in parts)
    return [part for part in parts if part is not NoneType and not (has_names and part is str)]


def as_type(value: Any, kind: Any) -> Any:
    """Return a value as a type that is no union; raises `TypeError` or `ValueError` if it does not fit."""
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
    """Return a list, which may also be given as its only entry, or a tuple of its length."""
    items = [value] if isinstance(value, str | os.PathLike | Real) else list(value)
    types = get_args(kind)
    if get_origin(kind) is tuple:
        return tuple(as_type(item, part) for item, part in zip(items, types, strict=True))
    return [as_type(item, types[0]) for item in items]


def expectation(kind: Any) -> str:
    """Return what a value of a type is, in words."""
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
    """Return the values of the options of some help groups, by name."""
    return {item.name: vars(options)[item.name] for item in fields(options) if item.metadata.get("group") in groups}
