"""Recipes: the options of a training run as a YAML or JSON file."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from transformers.utils import logging

from .library import options_of
from .names import find_recipe, with_underscores


logger = logging.get_logger(__name__)
RECIPE_NAME = "recipe.yaml"  # name of the recipe in the output folder of a training run
RECIPE_HEADING = "# Options of a training run, written by hf_vit.\n"


class RecipeLoader(yaml.SafeLoader):
    """YAML loader that reads scalars as in YAML 1.2: `no` is a string, and `1e-3` is a number.

    A key that occurs twice in a mapping raises `ValueError`. By default, PyYAML would keep its last value.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the content of a mapping."""
        names = [key.value for key, _ in node.value]
        for place, (key, _) in enumerate(node.value):
            if key.value in names[:place]:
                line = key.start_mark.line + 1
                raise ValueError(f"line {line}: the key {key.value!r} occurs twice. Remove or rename one of them.")
        return super().construct_mapping(node, deep)


RecipeLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":bool")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
RecipeLoader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("(?i:true|false)$"), list("tTfF"))
NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")
RecipeLoader.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, list("-+.0123456789"))


def read_recipe(file: Path) -> dict[str, Any]:
    """Return the content of a YAML or JSON file; raise `ValueError` if it is not a mapping."""
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), RecipeLoader)  # JSON is a subset of YAML
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is neither YAML nor JSON: {error}") from error
    except ValueError as error:
        raise ValueError(f"{file}, {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must contain a mapping, with lines such as 'learning_rate: 0.001'.")
    return with_underscores(content)


def with_recipe(values: Mapping[str, Any]) -> dict[str, Any]:
    """Read the recipe `values["recipe"]` and return its values, overridden by the other given values.

    Args:
        values: Option values by name. None means that an option is not given. The value of `recipe` is a file or the
            name of an included recipe.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if no recipe has this name, or the file is not a mapping.
    """
    given = with_underscores({name: value for name, value in values.items() if value is not None})
    recipe = given.pop("recipe", None)
    if recipe is None:
        return given
    file = find_recipe(str(recipe))
    values = read_recipe(file)
    if "recorded_schedule" in values:
        values["recorded_schedule"] = str(file.parent / values["recorded_schedule"])
    return {**values, **given}


def savable_values(values: Mapping[str, Any], types: Sequence[type[Any]]) -> dict[str, Any]:
    """Return the option values that are saved in recipes and commands, as plain YAML and JSON types.

    Access tokens and one-time requests, such as `resume_from_checkpoint`, are omitted.
    """
    private = {name for name, known in options_of(*types).items() if known["private"]}
    kept = {name: value for name, value in values.items() if value is not None and name not in private}
    plain: dict[str, Any] = json.loads(json.dumps(kept, default=str))
    return plain


def recipe_text(values: Mapping[str, Any]) -> str:
    """Return option values as the content of a recipe file."""
    return RECIPE_HEADING + yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)


def recipe_of(folder: Path, head: str | None = None) -> dict[str, Any]:
    """Return the recipe in the output folder of a training run, or an empty dictionary if no recipe can be read.

    For a head of a multi-task model, these are its own options, with its data as `dataset_name`.
    """
    file = folder / RECIPE_NAME
    try:
        recipe = read_recipe(file) if file.is_file() else {}
    except ValueError as error:
        logger.warning(f"Ignoring the unreadable recipe {file}: {str(error).splitlines()[0]}")
        return {}
    if head is None:
        return recipe
    heads = {name.replace("-", "_"): own for name, own in (recipe.get("tasks") or {}).items()}
    own = {"data": heads[head]} if isinstance(heads.get(head), str) else heads.get(head, {})
    return {"dataset_name" if name == "data" else name.replace("-", "_"): value for name, value in own.items()}
