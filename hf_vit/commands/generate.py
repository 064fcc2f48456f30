"""Write the options of all commands to `options.json`.

`hf-vit` reads `options.json`, so that it does not have to import the package for help pages. After a change of an
option, run: python -m hf_vit.commands.generate
"""

import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from enum import Enum
from itertools import chain, count
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import transformers

from ..auditing.audit import audit
from ..auditing.selection import select
from ..convert.convert_model import convert_model
from ..features import ExtractionArguments
from ..features.evaluation import evaluate_folders
from ..inference.export import export_model
from ..inference.visualization import visualize_model
from ..options.field import Range
from ..options.library import LIBRARY_GROUP, metadata_of
from ..options.names import recipes_of
from ..runs.calibrate import calibrate
from ..runs.evaluate import EVALUATED, EVALUATION_DEFAULTS, EvaluationArguments
from ..runs.info import info
from ..runs.push import push
from ..tasks import TASKS
from ..tasks.base import Task
from . import features, models


FILE = Path(__file__).with_name("options.json")
Command = Callable[..., Any]
# Maps the function of each command to the options that can also be given as positional arguments
WORDS: dict[Command, tuple[str, ...]] = {
    models.pretrain: ("data",),
    models.predict: ("model", "inputs"),
    audit: ("data",),
    select: ("pool", "model"),
    models.search: ("model", "inputs", "text"),
    evaluate_folders: ("train", "test"),
    visualize_model: ("model", "photos"),
    convert_model: ("source", "output"),
    export_model: ("model",),
    models.serve: ("models",),
    push: ("folder", "repo_id"),
    info: ("model",),
    calibrate: ("model", "data"),
}
# Option groups on the short help pages of training, evaluation and feature extraction, in the order of the pages
TRAINING = ("Data", "Model", "Training", "Output")
EVALUATION = ("Evaluation", "Data", "Hardware", "Output")
EXTRACTION = ("Extraction", "Data", "Output")
# Options that are listed only by --help all for evaluation, although they are essential for training
NOT_ESSENTIAL_IN_EVALUATION = ("resume_from_checkpoint", "dry_run")
# Options whose default is chosen from data and device; the declared default is a fallback
CHOSEN = {"image_size", "num_train_epochs", "max_steps", "learning_rate", "per_device_train_batch_size", "bf16"}
INSTALLATION_DEPENDENT = {"dataloader_pin_memory", "report_to"}  # options with a default that depends on the machine

Option = dict[str, Any]


def generate() -> str:
    """Return the content of `options.json`: all options by key, and the option keys of each command."""
    options: dict[str, Option] = {}
    pages: dict[str, dict[str, Any]] = {}

    def add(name: str, function: Command, words: Sequence[str], found: Iterator[Option], **page: Any) -> None:
        declared = list(found)
        keys = [key_of(option, options) for option in declared]
        groups = list(dict.fromkeys([*page.pop("groups", ()), *(option["group"] for option in declared)]))
        groups.sort(key=LIBRARY_GROUP.__eq__)  # the group of Trainer options comes last
        call = f"{function.__module__}:{function.__name__}"
        start = {"call": call, "recipe": False, "text": command_text(function), "words": words}
        pages[name] = {**start, **page, "groups": groups, "options": keys}

    saved = ("model_name_or_path", "dataset_name")
    for name, task in TASKS.items():
        page = {"text": describe(name), "given": {"task": name}, "recipe": True, "groups": TRAINING}
        has_data = name != "multi-task"  # its recipe contains the data of each head, and its heads are evaluated
        add(f"train {name}", models.train, ["dataset_name"] if has_data else [], training_options(task), **page)
        if has_data:
            page = {"recipe": True, "groups": EVALUATION}
            add(f"evaluate {name}", models.evaluate, saved, evaluation_options(task), **page)
    declared = options_of_types([ExtractionArguments], EXTRACTION)
    add("features extract", features.extract, saved, declared, recipe=True, groups=EXTRACTION)
    for function, words in WORDS.items():
        name = "features evaluate" if function is evaluate_folders else function.__name__.removesuffix("_model")
        add(name, function, words, options_of_function(function, words))
    tasks = textwrap.indent("\n".join(sorted(TASKS)), "    ")
    sections: dict[str, Mapping[str, Any]] = {
        "groups": {
            "train": f"{command_text(models.train)}\n{tasks}\n\nhf-vit train TASK --help lists the options of a task.",
            "features": (features.__doc__ or "").strip(),
        },
        "options": options,
        "pages": pages,
        "architectures": {
            name: [task.model_class.__name__.removeprefix("HfViT"), *task.published]
            for name, task in TASKS.items()
            if f"evaluate {name}" in pages
        },
        "versions": {"transformers": transformers.__version__},
    }
    return as_text(sections)


def key_of(option: Option, options: dict[str, Option]) -> str:
    """Return the key of an option: its name, with a number appended if different options share the name."""
    for number in count(1):
        key = option["name"] if number == 1 else f"{option['name']} {number}"
        if options.setdefault(key, option) == option:
            return str(key)
    raise AssertionError


def as_text(sections: Mapping[str, Any]) -> str:
    """Return JSON with one line for each entry of each section."""
    parts = []
    for title, section in sections.items():
        lines = [f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in section.items()]
        parts.append(f" {json.dumps(title)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


# --- Help texts of commands


def command_text(function: Callable[..., Any]) -> str:
    """Return the text above the options on a help page: the docstring of the command's module or function."""
    module = inspect.getmodule(function)
    described = function if module in (models, features) else module
    return (inspect.getdoc(described) or "").partition("\n\nArgs:")[0]


def describe(task: str) -> str:
    """Return the help text of a training command above its options."""
    purpose = "several tasks" if task == "multi-task" else task.replace("-", " ")
    lines = [
        f"Train a model for {purpose}, or fine-tune an existing one.",
        "",
        f"Usage: hf-vit train {task} {'recipe.yaml' if task == 'multi-task' else '[recipe.yaml] DATA'} [options]",
    ]
    if recipes := recipes_of(task):
        named = f"Recipes: --recipe takes a YAML file, or one of {', '.join(recipes)}."
        lines += ["", *textwrap.wrap(named, 80, break_on_hyphens=False)]
    return "\n".join(lines)


# --- Options that are fields of dataclasses


def training_options(task: type[Task]) -> Iterator[Option]:
    """Yield the training options of a task, with the defaults and help texts that are specific to the task."""
    for option in options_of_types(task.argument_types(), TRAINING):
        replaced = {"default": task.argument_defaults, "help": task.argument_help}
        yield option | {key: texts[option["name"]] for key, texts in replaced.items() if option["name"] in texts}


def evaluation_options(task: type[Task]) -> Iterator[Option]:
    """Yield the options of evaluation for a task."""
    own = sorted(
        options_of_types((EvaluationArguments,), EVALUATION),
        key=lambda option: option["name"] not in EvaluationArguments.__annotations__,  # Trainer options come last
    )
    shared = options_of_types((task.argument_types()[0],), EVALUATION)
    for option in chain(own, (option for option in shared if option["group"] in EVALUATED)):
        if option["name"] in EVALUATION_DEFAULTS & task.argument_defaults.keys():
            option["default"] = task.argument_defaults[option["name"]]
        if option["name"] in NOT_ESSENTIAL_IN_EVALUATION:
            option.pop("essential", None)
        yield option


def options_of_types(types: Sequence[type], essential_groups: Sequence[str]) -> Iterator[Option]:
    """Yield the options that the fields of dataclasses declare.

    Options in groups other than `essential_groups` are never marked as essential.
    """
    for kind in types:
        hints = get_type_hints(kind)
        for item in fields(kind):
            if item.init:
                option = option_of_field(item, hints[item.name], kind)
                if option.get("group") not in essential_groups:
                    option.pop("essential", None)
                yield option


def option_of_field(item: Field[Any], annotation: Any, kind: type) -> Option:
    """Return the option that a dataclass field declares."""
    metadata = metadata_of(item)
    default = item.default_factory() if item.default_factory is not MISSING else item.default
    group = metadata["group"] or group_title(kind, item.name)
    found = {"default": None if item.name in INSTALLATION_DEPENDENT else default, "range": metadata["range"]}
    found |= {"group": group, "const": item.metadata.get("const")}
    found |= {name: metadata[name] for name in ("help", "brief", "choices", "essential", "synonyms", "resume")}
    found["chosen"] = item.name in CHOSEN and group != LIBRARY_GROUP
    kinds = {"name": item.name, **kinds_of(annotation)}
    return compact({**kinds, **{name: value for name, value in found.items() if value is not None}})


def group_title(kind: type, name: str) -> str:
    """Return the title of a field's option group: the first docstring line of the dataclass that declares it."""
    declaring = next(base for base in kind.__mro__ if name in vars(base).get("__annotations__", {}))
    return (declaring.__doc__ or "").partition("\n")[0].rstrip(".")


# --- Options that are parameters of functions


def options_of_function(function: Callable[..., Any], words: Sequence[str]) -> Iterator[Option]:
    """Yield the options declared by the parameters of a function and by its docstring."""
    function = inspect.unwrap(function)
    hints, texts = get_type_hints(function, include_extras=True), help_of_parameters(function)
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "report" or parameter.kind is parameter.VAR_KEYWORD:
            continue
        is_required = parameter.default is parameter.empty
        group = "Arguments" if name in words and is_required else "Options"
        found = {"default": None if is_required else parameter.default, "required": is_required}
        yield compact({"name": name, **kinds_of(hints[name]), **found, "help": texts[name], "group": group})


def help_of_parameters(function: Callable[..., Any]) -> dict[str, str]:
    """Map the parameters of a function to their texts in the "Args" section of its docstring."""
    section = re.search(r"^Args:\n(.*?)(?:\n\n|\Z)", inspect.getdoc(function) or "", flags=re.MULTILINE | re.DOTALL)
    assert section is not None, function
    entries = re.findall(r"^    (\*{0,2}\w+): (.*(?:\n      .*)*)", section[1], flags=re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text).replace("`", "") for name, text in entries}


# --- Types of options


def kinds_of(annotation: Any) -> Option:
    """Return the properties of an option that its type annotation determines: type, list, choices and range."""
    found: Option = {}
    if get_origin(annotation) is Annotated:
        annotation, *notes = get_args(annotation)
        found = {"range" if isinstance(note, Range) else "choices": note for note in notes}
    parts = set(get_args(annotation)) if get_origin(annotation) in (Union, UnionType) else {annotation}
    parts -= {NoneType}
    if mapping := {part for part in parts if (get_origin(part) or part) is dict}:
        return {"type": "mapping" if parts == mapping else "mapping or text", **found}
    for part in parts:
        origin = get_origin(part)
        if origin is Literal and str not in parts:
            return {"type": "str", "choices": get_args(part), **found}
        if isinstance(part, type) and issubclass(part, Enum):
            return {"type": "str", "choices": [member.value for member in part], **found}
        if origin is tuple:
            return {"type": "size" if int in parts else "pair", **found}
        if origin in (list, Sequence):
            return {"list": True, **kinds_of(get_args(part)[0]), **found}
    if bool in parts and str not in parts:
        return {"type": "bool", "const": True, **found}
    for kind, name in ((float, "float"), (int, "int"), (Path, "path"), (str, "str")):
        if kind in parts:
            return {"type": name, **found}
    return {"type": "str", **found}


def compact(content: Option) -> Option:
    """Return a copy of an option as a JSON-compatible dict. Empty properties are omitted, except for the default."""
    known = {
        name: value
        for name, value in content.items()
        if value not in (None, MISSING) and (name == "default" or value not in ("", False, ()))
    }
    plain: Option = json.loads(
        json.dumps(known, default=lambda item: list(item) if isinstance(item, Iterable) else str(item))
    )
    return plain


if __name__ == "__main__":
    FILE.write_text(generate(), encoding="utf-8")
