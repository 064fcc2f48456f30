"""Look up names of options and recipes. Errors suggest the closest valid name.

This module imports only the standard library.
"""

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, TypeVar


T = TypeVar("T")

# Error messages for options of other libraries that have no equivalent in hf_vit
ANSWERS = {
    **{
        name: f"{name} is not needed: evaluation runs automatically after training, and separate commands evaluate a "
        "saved model or predict with it. Remove the option."
        for name in ("do_train", "do_eval", "do_predict")
    },
    "device": "A GPU is used if available. Remove device, or set use_cpu.",
}
PACKAGE = Path(__file__).parents[1]
FOLDERS = (
    PACKAGE / "recipes",
    PACKAGE.parent / "scripts" / "recipes",
)  # folders of recipes in an installed package and in a Git checkout
SUFFIXES = {".yaml", ".yml", ".json"}


def with_underscores(values: Mapping[Any, T]) -> dict[str, T]:
    """Replace hyphens in names by underscores; raise `ValueError` if two names become equal."""
    names: dict[str, Any] = {}
    for name in values:
        if (other := names.setdefault(str(name).replace("-", "_"), name)) != name:
            raise ValueError(f"{other!r} and {name!r} are the same name. Remove or rename one of them.")
    return dict(zip(names, values.values(), strict=True))


def unknown_option(name: str, synonyms: Mapping[str, str], prefix: str = "--") -> str:
    """Return the error message for an unknown option.

    Args:
        name: Name of the option without leading dashes.
        synonyms: Maps each valid option to its names in other libraries, separated by spaces.
        prefix: Text inserted before each option name in the message.
    """
    wanted = name.replace("-", "_").lower()
    if wanted in ANSWERS:
        return ANSWERS[wanted]
    meant = [option for option, words in synonyms.items() if wanted in words.split()]
    question = f" Did you mean {' or '.join(prefix + option for option in meant)}?" if meant else ""
    return f"Unknown option {prefix}{name}.{question or nearest(wanted, synonyms, prefix)}"


def nearest(wanted: str, names: Iterable[str], prefix: str = "") -> str:
    """Return a question that suggests the names most similar to `wanted`, or an empty string if no name is similar."""
    meant = get_close_matches(wanted, sorted(names), n=3, cutoff=0.7)
    return f" Did you mean {' or '.join(prefix + name for name in meant)}?" if meant else ""


@cache
def named_recipes() -> dict[str, Path]:
    """Return the files of all included recipes by recipe name."""
    return {file.stem: file for folder in reversed(FOLDERS) for file in sorted(folder.glob("*.yaml"))}


def list_recipes() -> list[str]:
    """Return the names of the recipes included in the package."""
    return list(named_recipes())


def find_recipe(name: str) -> Path:
    """Return the file of a recipe, given the recipe name or the file; raise `ValueError` for an unknown name."""
    if Path(name).suffix in SUFFIXES:
        return Path(name)
    files = named_recipes()
    if name not in files:
        meant = get_close_matches(name, files, n=3)
        choice = f"Did you mean {' or '.join(meant)}?" if meant else f"Choose one of {', '.join(files)}."
        raise ValueError(f"Unknown recipe {name!r}. {choice} Or give the path of a recipe file, such as my.yaml.")
    return files[name]


def recipes_of(task: str) -> dict[str, str]:
    """Return the one-line descriptions of all recipes of a task by recipe name."""
    found = {}
    for name, file in named_recipes().items():
        heading = file.read_text(encoding="utf-8")
        if re.search(rf"^# Command: .* train {task} ", heading, flags=re.MULTILINE):
            found[name] = heading.partition("\n")[0].lstrip("# ").rstrip(".")
    return found
