"""The recipes that the package brings, by their names."""

import re
from difflib import get_close_matches
from functools import cache
from pathlib import Path


PACKAGE = Path(__file__).parents[1]
FOLDERS = (PACKAGE / "recipes", PACKAGE.parent / "scripts" / "recipes")  # of an installed package, and of a checkout
SUFFIXES = {".yaml", ".yml", ".json"}


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
    found, script = {}, task.replace("-", "_")
    for name, file in named_recipes().items():
        heading = file.read_text(encoding="utf-8")
        if re.search(rf"^# Command: .*scripts/(?:pre)?train_{script}\.py ", heading, flags=re.MULTILINE):
            found[name] = heading.partition("\n")[0].lstrip("# ").rstrip(".")
    return found
