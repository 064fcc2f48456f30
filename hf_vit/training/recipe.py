"""Recipes: the arguments of a training as a file, which the scripts take in place of a command line."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml


RECIPE_NAME = "recipe.yaml"
SUFFIXES = {".yaml", ".yml", ".json"}
# What may change when a training is taken up again: where it runs and what it reports, and how long it goes on.
FREE = {
    *("dataset_name", "dataset_license", "license", "skip_unreadable", "check_images", "output_dir"),
    *("num_train_epochs", "max_steps", "use_cpu", "ddp_timeout", "disable_tqdm", "report_to", "run_name"),
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
}
FREE_PREFIXES = ("dataloader_num", "eval_", "hub_", "log", "push_to_hub", "save_")


class RecipeLoader(yaml.SafeLoader):
    """Reads `save_strategy: no` as the word that it is: only "true" and "false" are truth values, as in YAML 1.2."""


RecipeLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":bool")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
RecipeLoader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("(?i:true|false)$"), list("tTfF"))


def read_mapping(file: Path) -> dict[str, Any]:
    """Returns the content of a YAML or JSON file.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is no mapping from names to values.
    """
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), RecipeLoader)  # JSON is YAML too
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is neither YAML nor JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a mapping, with lines like 'learning_rate: 0.001'.")
    return content


def read_recipe(file: Path) -> list[str]:
    """Returns the content of a YAML or JSON file as the command line that says the same; raises as `read_mapping`."""
    arguments = []
    for name, value in read_mapping(file).items():
        values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict | bool) else value]
        arguments += [f"--{name}", *map(str, values)] if value is not None else []
    return arguments


def expand(arguments: Sequence[str]) -> list[str]:
    """Puts the content of a recipe that a command line starts with in its place; what follows overrides it."""
    if arguments and Path(arguments[0]).suffix in SUFFIXES:
        return [*read_recipe(Path(arguments[0])), *arguments[1:]]
    return list(arguments)


def split_flag(argument: str) -> tuple[str, str]:
    """Returns the name of a flag as Python spells it, and its value in the form `--name=value`."""
    name, _, value = argument[2:].partition("=")
    return name.replace("-", "_"), value


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """Returns a command line without access tokens, and without the request to take a training up again."""
    kept: list[str] = []
    skipping = False
    for argument in arguments:
        if argument.startswith("--"):
            name, _ = split_flag(argument)
            skipping = name.endswith("token") or name == "resume_from_checkpoint"
        if not skipping:
            kept.append(argument)
    return kept


def to_recipe(arguments: Sequence[str]) -> dict[str, Any]:
    """Returns a command line as a mapping from names to values; of a name that is given twice, the last counts."""
    values: dict[str, list[str]] = {}
    name = ""
    for argument in without_secrets(expand(arguments)):
        if argument.startswith("--"):
            name, value = split_flag(argument)
            values[name] = [value] if value else []
        else:
            values[name].append(argument)
    parsed = {name: [parse(item) for item in items] for name, items in values.items()}
    return {name: items[0] if len(items) == 1 else items or True for name, items in parsed.items()}


def parse(value: str) -> Any:
    """Returns what a text is in JSON, a number, a truth value or a mapping, and else the text."""
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def begun_with(folder: Path) -> dict[str, Any]:
    """Returns the recipe that a training has left in its output folder, empty if there is none."""
    file = folder / RECIPE_NAME
    return read_mapping(file) if file.is_file() else {}


def begin_recipe(folder: Path, arguments: Sequence[str], is_resumed: bool) -> None:
    """Writes the recipe of a training into its output folder, or compares it with the one that stands there.

    Args:
        folder: Output folder of the training.
        arguments: Its command line.
        is_resumed: Whether the training is taken up again.

    Raises:
        ValueError: if a training is taken up with other arguments, which would make it another training.
    """
    file, recipe = folder / RECIPE_NAME, to_recipe(arguments)
    if is_resumed and (begun := begun_with(folder)):
        changed = sorted(
            name
            for name in begun.keys() | recipe.keys()
            if begun.get(name) != recipe.get(name) and name not in FREE and not name.startswith(FREE_PREFIXES)
        )
        if changed:
            differences = "; ".join(f"{name}: {begun.get(name)} then, {recipe.get(name)} now" for name in changed)
            raise ValueError(
                f"The training in {folder} was begun with other arguments ({differences}). Go on as {file} says, or "
                "begin another training in another --output_dir."
            )
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True), encoding="utf-8")
