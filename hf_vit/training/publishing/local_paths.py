"""Texts that leave this machine name its files and folders by their last names."""

import itertools
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from transformers.utils import ADAPTER_CONFIG_NAME

from ..arguments import split_sources
from ..saving.output_files import ADAPTER_FOLDER, RECIPE_NAME, REPORT_FILES, TRAINING_ARGS_JSON, is_named


# What holds the options of a training, and so the paths that it was given.
OPTIONS = (RECIPE_NAME, TRAINING_ARGS_JSON, f"{ADAPTER_FOLDER}/{ADAPTER_CONFIG_NAME}")
SCRIPT = re.compile(r"(?<![\w./-])/\S*/(?=scripts/\w+\.py)")  # where our scripts lie, in a command
TEXTS = {".json", ".jsonl", ".yaml", ".md"}


def names_of_paths(folder: Path) -> dict[str, str]:
    """Returns the last name of each path of this machine that a training was given, and of its output folder."""
    given = [str(folder), *(value for name in OPTIONS for value in _texts(_read(folder / name)))]
    names = {}
    for source in (source for value in given for source in split_sources(value)):
        place = Path(source).expanduser()
        if os.sep in source and place.name and os.path.exists(place):
            for path in (source.rstrip(os.sep), os.path.abspath(place), os.path.realpath(place)):
                names[path] = place.name
    return names


def without_local_paths(file: Path, names: dict[str, str]) -> bytes | None:
    """Returns a file of a report with names in place of local paths, and None for other files."""
    if file.suffix not in TEXTS or not is_named(file.name, (*REPORT_FILES, ADAPTER_CONFIG_NAME)):
        return None
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".yaml" and (content := _read(file)) is not None:
        heading = "".join(itertools.takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True)))
        # in which a path is on one line
        text = heading + yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=math.inf)
    for path in sorted(names, key=len, reverse=True):
        # as it is, and in JSON, in YAML and in a command
        forms = {path, json.dumps(path)[1:-1], path.replace("'", "''"), path.replace("'", "'\"'\"'")}
        for written in sorted(forms, key=len, reverse=True):
            text = re.sub(rf"(?<![\w./-]){re.escape(written)}(?![\w-])", names[path].replace("\\", r"\\"), text)
    text = SCRIPT.sub("", text)
    home = str(Path.home())
    return (text if len(home) == 1 else re.sub(rf"{re.escape(home)}(?![\w-])", "~", text)).encode()


def _read(file: Path) -> Any:
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else None
    except yaml.YAMLError:
        return None


def _texts(content: Any) -> Iterator[str]:
    """Yields all texts in what a file holds, at any depth."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict | list):
        for value in content.values() if isinstance(content, dict) else content:
            yield from _texts(value)
