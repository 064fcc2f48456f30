"""Recipes: the arguments of a training as a file, which the scripts take at the start of a command line."""

import argparse
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from transformers.utils import logging

from ..flags.parser import ANSWERS, REFUSED, OneLineParser, Parser, unknown_option
from ..options.named_recipes import SUFFIXES, find_recipe
from .ranges import check_ranges
from .saving.output_files import RECIPE_HEADING, RECIPE_NAME, write_whole


logger = logging.get_logger(__name__)
# The words of a command line; the first of them may be the file of a recipe, or its content
Arguments = Sequence[str | Mapping[str, Any]]


class RecipeLoader(yaml.SafeLoader):
    """Reads `save_strategy: no` as the word that it is: only "true" and "false" are truth values, as in YAML 1.2."""


RecipeLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":bool")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
RecipeLoader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("(?i:true|false)$"), list("tTfF"))


def read_recipe(file: Path) -> dict[str, Any]:
    """Returns the content of a YAML or JSON file; `ValueError` if it is no mapping from names to values."""
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), RecipeLoader)  # JSON is YAML too
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is neither YAML nor JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a mapping, with lines like 'learning_rate: 0.001'.")
    return content


def split_recipe(arguments: Arguments) -> tuple[dict[str, Any], list[str]]:
    """Returns the recipe that a command line starts with, empty if there is none, and what follows it.

    A recipe is a mapping, a file, or, with `--recipe`, a file or the name of one that the package brings. What follows
    it takes the place of what is in it, and a mapping of what is in the recipe that it names.
    """
    first = arguments[0] if arguments else ""
    is_recipe = isinstance(first, Mapping) or Path(first).suffix in SUFFIXES
    parser = OneLineParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--recipe")
    given, rest = argparse.ArgumentParser.parse_known_args(parser, [str(word) for word in arguments[is_recipe:]])
    recipe = dict(first) if isinstance(first, Mapping) else read_recipe(Path(first)) if is_recipe else {}
    name = given.recipe or recipe.pop("recipe", None)
    if name is not None:
        recipe = {**read_recipe(find_recipe(str(name))), **recipe}
    return {str(option).replace("-", "_"): value for option, value in recipe.items()}, rest


def has_recipe(arguments: Arguments) -> bool:
    """Returns whether a command line starts with the file of a recipe, or names one."""
    first, *rest = arguments or [""]
    if isinstance(first, Mapping):
        return "recipe" in first
    is_named = any(str(word).partition("=")[0] == "--recipe" for word in [first, *rest])
    return is_named or Path(first).suffix in SUFFIXES


def make_parser(types: Sequence[type], recipe: Mapping[str, Any], description: str | None = None) -> Parser:
    """Returns a parser whose defaults are those of dataclasses and, before them, the values of a recipe.

    Null in a recipe stands for the default of the dataclass. A name that is no argument, or a value that is none of
    those to choose from, is a `ValueError`.
    """
    parser = Parser(types, description)
    kinds = kinds_of(types)
    for name, value in recipe.items():
        if name in REFUSED:
            raise ValueError(ANSWERS[name])
        if name not in kinds:
            raise ValueError(unknown_option(name, kinds, prefix=""))
        if value is not None:
            parser.set_defaults(**{name: as_default(name, value, kinds[name])})
    return parser


def kinds_of(types: Sequence[type]) -> dict[str, Any]:
    """Returns the types of options by their names, of dataclasses that a parser was made for, which resolves them."""
    return {option.name: option.type for arguments in types for option in fields(arguments) if option.init}


def as_default(name: str, value: Any, kind: Any) -> Any:
    """Returns a value of a recipe as text, which the parser converts, or as a list of the type that it has."""
    if get_origin(kind) is list:
        (item_type,) = get_args(kind)
        try:
            return [item_type(as_text(item)) for item in (value if isinstance(value, list | tuple) else [value])]
        except ValueError as error:
            raise ValueError(f"{name}={value!r} of the recipe does not fit: {error}") from error
    text = as_text(value)
    if get_origin(kind) is Literal and text not in map(str, get_args(kind)):
        raise ValueError(f"{name}={value!r} of the recipe is unknown. Choose {', '.join(map(str, get_args(kind)))}.")
    return text


def as_text(value: Any) -> str:
    """Returns a value of a recipe as on a command line: a list of names with commas between, see `split_names`."""
    if isinstance(value, list | tuple) and all(
        isinstance(item, str) and not re.search(r"^\[|,", item) for item in value
    ):
        return ",".join(value)
    return os.fspath(value) if isinstance(value, str | os.PathLike) else json.dumps(value, default=str)


def parse_arguments(
    types: Sequence[type], arguments: Arguments, description: str | None = None, **defaults: Any
) -> tuple[Any, ...]:
    """Parses a command line; what follows the recipe that it may start with overrides what that holds.

    Args:
        types: Dataclasses with the arguments.
        arguments: The command line without the program's name, see `split_recipe`.
        description: Beginning of `--help`.
        **defaults: Other defaults than those of the dataclasses.

    Returns:
        One instance of each type.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the file is no mapping or has an unknown name, or an argument's own check fails.
    """
    recipe, rest = split_recipe(arguments)
    parsed = make_parser(types, {**defaults, **recipe}, description).parse_args_into_dataclasses(
        rest, look_for_args_file=False
    )
    for options in parsed:
        check_ranges(options)
    return tuple(parsed)


def given_arguments(types: Sequence[type], arguments: Arguments) -> dict[str, Any]:
    """Returns the arguments that a command line gives, with its recipe, by name; access tokens are left out.

    Args:
        types: Dataclasses with the arguments.
        arguments: The command line without the program's name.
    """
    recipe, rest = split_recipe(arguments)
    parser = make_parser(types, recipe)
    values = vars(parser.parse_args(rest))
    absent = dict.fromkeys(values, parser)  # which no argument is
    on_command_line = vars(parser.parse_args(rest, argparse.Namespace(**absent)))
    return {
        name: as_mapping(value)
        for name, value in values.items()
        if (on_command_line[name] is not parser or recipe.get(name) is not None) and not is_private(name)
    }


def is_private(name: str) -> bool:
    """Whether an argument is no part of a recipe: an access token, or the request to resume."""
    return name.endswith("token") or name in ("resume_from_checkpoint", "resume_with_changes", "dry_run")


def as_mapping(value: Any) -> Any:
    """Returns what a text is in JSON if that is a mapping, and else the value."""
    if not isinstance(value, str) or not value.startswith("{"):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def as_words(types: Sequence[type], arguments: Arguments) -> list[str]:
    """Returns a command line of options of dataclasses as words, also where it starts with a mapping."""
    kinds = kinds_of(types)
    words: list[str] = []
    for part in arguments:
        if not isinstance(part, Mapping):
            words.append(part)
            continue
        for name, value in part.items():
            values = value if isinstance(value, list | tuple) and get_origin(kinds.get(name)) is list else [value]
            words += [f"--{name}", *map(as_text, values)] if value is not None else []
    return words


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """Returns a command line without access tokens, and without the request to resume a training."""
    kept: list[str] = []
    skipping = False
    for argument in arguments:
        if argument.startswith("--"):
            skipping = is_private(argument[2:].partition("=")[0].replace("-", "_"))
        if not skipping:
            kept.append(argument)
    return kept


def recipe_of(folder: Path) -> dict[str, Any]:
    """Returns the recipe that a training has left in its output folder, empty if there is none that can be read."""
    file = folder / RECIPE_NAME
    try:
        return read_recipe(file) if file.is_file() else {}
    except ValueError as error:
        logger.warning(f"The arguments in {file} are lost: {str(error).splitlines()[0]}")
        return {}


def start_recipe(folder: Path, recipe: Mapping[str, Any]) -> None:
    """Writes the recipe of a training into its output folder; see `given_arguments`."""
    folder.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True)
    write_whole(folder / RECIPE_NAME, RECIPE_HEADING + text)
