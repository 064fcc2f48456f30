"""Names of options and recipes, with errors that suggest the closest valid one. Needs the standard library only."""

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path


# Options of other libraries that have no counterpart here, and the error that answers them
ANSWERS = {
    **{
        name: f"{name} has nothing to switch on: evaluation follows training by itself, and a saved model is "
        "evaluated or predicts by a command of its own. Leave it out."
        for name in ("do_train", "do_eval", "do_predict")
    },
    "device": "A GPU is used if there is one. Leave device out, or set use_cpu.",
}
PACKAGE = Path(__file__).parents[1]
FOLDERS = (PACKAGE / "recipes", PACKAGE.parent / "scripts" / "recipes")  # of an installed package, and of a checkout
SUFFIXES = {".yaml", ".yml", ".json"}


def unknown_option(name: str, synonyms: Mapping[str, str], prefix: str = "--") -> str:
    """Return the error for an unknown option.

    Args:
        name: The option, without the dashes before it.
        synonyms: The names that other libraries give to each valid option, separated by spaces.
        prefix: Text before each name that the error suggests.
    """
    wanted = name.replace("-", "_").lower()
    if wanted in ANSWERS:
        return ANSWERS[wanted]
    meant = [option for option, words in synonyms.items() if wanted in words.split()]
    question = f" Did you mean {' or '.join(prefix + option for option in meant)}?" if meant else ""
    return f"There is no option {prefix}{name}.{question or nearest(wanted, synonyms, prefix)}"


def nearest(wanted: str, names: Iterable[str], prefix: str = "") -> str:
    """Return a question that suggests the closest of some names, empty if none is close."""
    meant = get_close_matches(wanted, sorted(names), n=3, cutoff=0.7)
    return f" Did you mean {' or '.join(prefix + name for name in meant)}?" if meant else ""


@cache
def named_recipes() -> dict[str, Path]:
    """Returns the files of all recipes by their names."""
    return {file.stem: file for folder in reversed(FOLDERS) for file in sorted(folder.glob("*.yaml"))}


def list_recipes() -> list[str]:
    """Returns the names of the recipes that come with the package."""
    return list(named_recipes())


def find_recipe(name: str) -> Path:
    """Returns the file of a recipe, given itself or its name; raises `ValueError` if there is none of that name."""
    if Path(name).suffix in SUFFIXES:
        return Path(name)
    files = named_recipes()
    if name not in files:
        meant = get_close_matches(name, files, n=3)
        choice = f"Did you mean {' or '.join(meant)}?" if meant else f"Choose one of {', '.join(files)}."
        raise ValueError(f"There is no recipe {name!r}. {choice} A recipe of your own is given as a file: my.yaml.")
    return files[name]


def recipes_of(task: str) -> dict[str, str]:
    """Returns the first line on each recipe of a task, by their names."""
    found = {}
    for name, file in named_recipes().items():
        heading = file.read_text(encoding="utf-8")
        if re.search(rf"^# Command: .* train {task} ", heading, flags=re.MULTILINE):
            found[name] = heading.partition("\n")[0].lstrip("# ").rstrip(".")
    return found
