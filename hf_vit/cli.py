"""Train, evaluate, run and publish Vision Transformers.

Usage: hf-vit COMMAND ...
"""

# Help pages and errors about options must not import torch, because the import takes seconds. Therefore, this module
# imports only the standard library, and `hf_vit/start.py` runs it as a file. The options of all commands are read from
# options.json, which `python -m hf_vit.commands.generate` writes.
import argparse
import json
import math
import os
import runpy
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn


PACKAGE = Path(__file__).parent
COMMANDS = {
    "train": "train a model for a task, or pretrain one on unlabeled images",
    "pretrain": "pretrain on your images and measure the gain on labeled ones",
    "evaluate": "evaluate a saved model on a dataset",
    "calibrate": "calibrate the scores of a saved model on held-out images",
    "predict": "predict labels, segments, depth, objects or keypoints of images",
    "search": "rank images by their similarity to a text",
    "serve": "serve models over HTTP, with a web page to try them",
    "audit": "find wrong labels, duplicates and bad images in a dataset",
    "select": "select images to label next",
    "features": "extract features of images, or evaluate extracted features",
    "visualize": "draw attention, saliency and features of a model on photos",
    "convert": "convert published checkpoints to hf_vit models and back",
    "export": "export a model to ONNX, OpenVINO, torch.export or ExecuTorch",
    "push": "upload a saved model to the Hugging Face Hub",
    "info": "show installed versions, or describe a model",
}
EXAMPLES = """\
Examples:
    hf-vit train image-classification photos --minutes 10
    hf-vit evaluate outputs/photos-image-classification photos
    hf-vit predict outputs/photos-image-classification photo.jpg --picture labeled.png

hf-vit COMMAND --help shows the arguments and options of a command."""
TASKS = {"image-text": "zero-shot-image-classification", "mim": "masked-image-modeling"}  # short names of tasks
ALIASES = {"model_name_or_path": ["--model"]}
# Layout of help pages in characters: column at which descriptions start, and minimum and maximum page width
COLUMN, LEAST_WIDTH, MOST_WIDTH = 34, 80, 120
MOST_CHOICES = 40  # maximum length of a list of choices; a longer list is replaced by a placeholder such as TEXT
TRAINING_NOTE = """\
Each option is also a keyword argument of hf_vit.train and a key of recipes.
Options marked "chosen" depend on data and device, unless a recipe is given; then
they have the listed default. When a run is resumed, options with "resume: free"
may change, those with "resume: fixed" may not, and all others may with
--resume_with_changes."""
PLACEHOLDERS = {"int": "N", "float": "X", "mapping": "JSON", "mapping or text": "JSON", "pair": "X,Y", "size": "N"}
USER_ERRORS = (FloatingPointError, ImportError, OSError, ValueError)

Option = dict[str, Any]
Page = dict[str, Any]


def print_text(text: str) -> None:
    """Print a text with a single write, so that lines of several processes are not mixed."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None, description: str | None = None) -> None:
    """Run a command. If an error occurs that the user can fix, exit with a one-line message.

    Args:
        arguments: Command line without the program name; by default `sys.argv[1:]`.
        description: Text above the options of the help page; by default the description of the command.
    """
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # class names may contain characters outside the encoding
    if words[0] in ("-h", "--help"):
        print_text(help_page())
        return
    if words[0] == "--version":
        print_text(f"hf-vit {import_module('importlib.metadata').version('hf-vit')}")
        return
    with exit_with_error_line():
        if words[0] not in COMMANDS:
            meant = " or ".join(get_close_matches(words[0], COMMANDS))
            question = f" Did you mean {meant}?" if meant else ""
            raise ValueError(f"There is no command {words[0]!r}.{question} Run hf-vit --help for a list of commands.")
        try:
            os.getcwd()
        except FileNotFoundError:  # The import of transformers fails if the working directory does not exist.
            sys.exit("hf-vit: The working directory no longer exists. Change to another one: cd ~")
        if words[0] in table()["groups"] and words[1:2] in ([], ["-h"], ["--help"]):
            print_text(table()["groups"][words[0]])
            return
        name, rest = split_name(words)
        page, values = prepare(name, rest, description)
    if page is not None:
        run(page, values)


def help_page() -> str:
    """Return the help page of `hf-vit --help`."""
    rows = [f"    {name:<12}{use}" for name, use in COMMANDS.items()]
    return "\n".join([(__doc__ or "").strip(), "", "Commands:", *rows, "", EXAMPLES])


@contextmanager
def exit_with_error_line() -> Iterator[None]:
    """Context manager that exits with a one-line message if an error occurs that the user can fix."""
    try:
        yield
    except USER_ERRORS as error:
        sys.exit(f"{os.path.basename(sys.argv[0])}: {error}")


@cache
def table() -> dict[str, Any]:
    """Return the content of `options.json`: the options and help pages of all commands."""
    content: dict[str, Any] = json.loads((PACKAGE / "commands" / "options.json").read_text(encoding="utf-8"))
    return content


@cache
def module(file: str) -> dict[str, Any]:
    """Run a file of the package without importing the package, and return its namespace.

    The file must import only the standard library.
    """
    return runpy.run_path(str(PACKAGE / file))


def split_name(words: Sequence[str]) -> tuple[str, list[str]]:
    """Split a command line into the name of a command and its arguments.

    The name includes the task or subcommand, as in "train depth-estimation".
    """
    command, *rest = words
    pages = table()["pages"]
    parts = [name.removeprefix(f"{command} ") for name in pages if name.startswith(f"{command} ")]
    if command not in table()["groups"]:
        return command, rest
    part, *rest = rest
    name = part.replace("_", "-").lower()
    name = TASKS.get(name, name)
    if name in parts:
        return f"{command} {name}", rest
    if command == "features":
        raise ValueError(f"There is no command hf-vit features {part}. Choose {' or '.join(parts)}.")
    question = module("options/names.py")["nearest"](name, parts)
    raise ValueError(f"There is no task {part!r}.{question} Choose one of {', '.join(parts)}: hf-vit train TASK DATA.")


def prepare(name: str, words: Sequence[str], description: str | None) -> tuple[Page | None, dict[str, Any]]:
    """Return the page of a command and the given option values. If help is requested, print it and return None."""
    help_wanted, words = split_help(words)
    is_help, page = help_wanted is not None, merged() if name == "evaluate" else load_page(name)
    values, unknown = ({}, []) if is_help and name != "evaluate" else read(page, words)
    if name == "evaluate":
        task = find_task(values, is_help)
        page = load_page(f"evaluate {task}") if task else merged(shared=is_help)
        values |= {"task": TASKS.get(values["task"], values["task"])} if "task" in values else {}
    if is_help:
        print_text(page_text(name, page, description, has_all=help_wanted == "all"))
        return None, {}
    check(page, values, unknown)
    return page, values


def run(page: Page, values: Mapping[str, Any]) -> None:
    """Run a command.

    Training, evaluation and feature extraction already report user errors. Any other error that they raise is a bug
    and is printed with its traceback.
    """
    module_name, _, name = page["call"].partition(":")
    function = getattr(import_module(module_name), name)
    with nullcontext() if page["recipe"] else exit_with_error_line():
        function(**page.get("given", {}), **values, report=print_text)


def split_help(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the word after `--help` and all other words of a command line.

    The first value is "" if no word follows, and None if there is no `--help`.
    """
    start = next((index for index, word in enumerate(words) if word in ("-h", "--help")), None)
    if start is None:
        return None, list(words)
    wanted = next(iter(words[start + 1 : start + 2]), "")
    if wanted in ("", "all") or wanted.startswith("-"):
        return wanted, [*words[:start], *words[start + 1 + (wanted == "all") :]]
    raise ValueError(
        f"--help {wanted} is not valid. Use --help for the most important options, or --help all for all options."
    )


# --- Parsing of option values


class Parser(argparse.ArgumentParser):
    """Parser for the options of a command. It raises `ValueError` on errors, and sets no defaults."""

    def __init__(self, page: Page) -> None:
        super().__init__(argument_default=argparse.SUPPRESS, add_help=False, allow_abbrev=False)
        options = page["options"]
        for name in page["words"]:
            option = options[name]
            nargs = "+" if option.get("list") else None if option.get("required") else "?"
            self.add_argument(name, nargs=nargs, type=TYPES[option["type"]])
        for name, option in options.items():
            if name not in page["words"] or not option.get("required"):
                self.add_option(name, option)
        if page["recipe"]:
            self.add_argument("--recipe")

    def add_option(self, name: str, option: Option) -> None:
        """Add an option, spelled with underscores or dashes, and a `--no_` flag if its default is true."""
        settings: dict[str, Any] = {"choices": option.get("choices"), "required": option.get("required", False)}
        if "const" in option:
            settings |= {"nargs": "?", "const": option["const"]}
        elif option.get("list"):
            settings |= {"nargs": "+", "action": "extend" if option["type"] == "pair" else "store"}
        flags = [*spellings(name), *ALIASES.get(name, [])]
        self.add_argument(*flags, dest=name, type=TYPES[option["type"]], **settings)
        if option.get("default") is True:
            self.add_argument(*spellings(f"no_{name}"), dest=name, action="store_false")

    def error(self, message: str) -> NoReturn:
        """Raise `ValueError` with the message of argparse."""
        raise ValueError(f"{message}. Use --help for a list of options.")


def spellings(name: str) -> list[str]:
    """Return the flag of an option in both spellings, with underscores and with dashes."""
    return list(dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"]))


def read(page: Page, words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Parse a command line. Return the values of the given options, and the words that belong to no option."""
    recipe = page["recipe"] and words[:1] and words[0].endswith((".yaml", ".yml"))
    namespace, unknown = Parser(page).parse_known_args(words[1:] if recipe else words)
    values = vars(namespace)
    if recipe and values.setdefault("recipe", words[0]) != words[0]:
        raise ValueError(f"Two recipes are given, {words[0]} and {values['recipe']}. Remove one of them.")
    return values, unknown


def load_page(name: str) -> Page:
    """Return the page (help text and options) of a command, with its options in a dict by name."""
    page: Page = table()["pages"][name]
    options = [table()["options"][key] for key in page["options"]]
    return {**page, "options": {option["name"]: option for option in options}}


def merged(shared: bool = False) -> Page:
    """Return the help page of `hf-vit evaluate` for a model of unknown task.

    The page contains the options of all tasks or, with `shared`, only the options that all tasks have in common.
    Defaults and help texts that differ between tasks are left out.
    """
    pages = [load_page(name) for name in table()["pages"] if name.startswith("evaluate ")]
    options: dict[str, Option] = {}
    for name, option in (item for page in pages for item in page["options"].items()):
        options[name] = {key: value for key, value in option.items() if options.get(name, option).get(key) == value}
    options["dataset_name"]["help"] = "Data for the task of the model. hf-vit evaluate MODEL --help lists the formats."
    if shared:
        options = {name: options[name] for name in options if all(name in page["options"] for page in pages)}
    groups = dict.fromkeys(title for page in pages for title in page["groups"])
    return {**pages[0], "groups": list(groups), "options": options}


def find_task(values: Mapping[str, Any], is_help: bool) -> str:
    """Return the task of the model to evaluate, or "" if it can be found only by importing the package.

    For help pages, the package is imported to read the configuration of a model on the Hub. The import takes seconds.
    """
    architectures: dict[str, list[str]] = table()["architectures"]
    task, model = values.get("task"), values.get("model_name_or_path")
    if task is not None:
        task = task.replace("_", "-")
        return TASKS.get(task, task if task in architectures else "")
    if model is None:
        return ""
    file = Path(model) / "config.json"
    if not file.is_file():
        return str(import_module("hf_vit.runs.evaluate").task_of_model(model)) if is_help else ""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        names = config.get("architectures") or ["ForImageClassification"]
        if head := values.get("head"):
            return str(config["multi_task_config"]["heads"][head]["task"])
    except (ValueError, AttributeError, LookupError, TypeError):  # The evaluation reports an invalid config.json.
        return ""
    saved = str(names[0])
    return next((task for task, parts in architectures.items() if any(part in saved for part in parts)), "")


def to_bool(text: str) -> bool:
    """Convert a word such as "yes" or "false" to a bool."""
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"{text!r} is not a boolean. Use true or false")
    return words[text.lower()]


def to_mapping(text: str) -> dict[str, Any]:
    """Convert a JSON object to a dict."""
    from .data.reading.files import parse_json  # imported lazily, because help pages need no datasets

    try:
        content = parse_json(text)
    except ValueError as error:
        content = f"invalid JSON: {error}"
    if not isinstance(content, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object ({content}). Use the form '{{\"name\": 1}}'")
    return content


def to_path(text: str) -> Path | str:
    """Convert a word to a path. `argparse.SUPPRESS`, which marks a missing argument, is returned unchanged."""
    return text if text is argparse.SUPPRESS else Path(text)


def to_pair(text: str) -> tuple[float, float]:
    """Convert "x,y" to a pair of finite numbers."""
    try:
        x, y = map(float, text.split(","))
    except ValueError:
        x = y = math.nan
    if not (math.isfinite(x) and math.isfinite(y)):
        raise argparse.ArgumentTypeError(f"{text!r} must be two numbers, such as 320,200")
    return x, y


def to_size(text: str) -> int | tuple[int, int]:
    """Convert "256" to the side of a square, or "256,192" to height and width."""
    try:
        sides = [int(part) for part in text.split(",")]
    except ValueError:
        sides = []
    if len(sides) not in (1, 2):
        raise argparse.ArgumentTypeError(f"invalid int value: {text!r}")
    return sides[0] if len(sides) == 1 else (sides[0], sides[1])


TYPES: dict[str, Callable[[str], Any]] = {
    **{"str": str, "int": int, "float": float, "path": to_path, "bool": to_bool, "pair": to_pair, "size": to_size},
    "mapping": to_mapping,
    "mapping or text": lambda text: to_mapping(text) if text.startswith("{") else text,  # else a file name
}


def check(page: Page, values: Mapping[str, Any], unknown: Sequence[str]) -> None:
    """Raise `ValueError` for unknown options, unexpected words, numbers out of range and unknown recipes."""
    names = module("options/names.py")
    options: dict[str, Option] = page["options"]
    for name in (name for name in values if name in names["ANSWERS"]):
        raise ValueError(names["ANSWERS"][name])
    flags = [word.lstrip("-").partition("=")[0] for word in unknown if word.startswith("-")]
    for name in [*flags, *(name for name in values if name not in options and name != "recipe")]:
        synonyms = {option: content.get("synonyms", "") for option, content in options.items()}
        raise ValueError(names["unknown_option"](name, synonyms))
    if unknown:
        raise ValueError(
            f"Unexpected arguments: {' '.join(map(repr, unknown))}. Write the value of an option directly after the "
            "option, and positional arguments before all options."
        )
    declaring = module("options/field.py")
    for name, value in values.items():
        option = options.get(name, {})
        legal = declaring["Range"](*option["range"]) if "range" in option else None
        declaring["check_number"](name, value, legal, option.get("default"))
    if "recipe" in values:
        names["find_recipe"](values["recipe"])


# --- Help pages


def page_text(name: str, page: Page, description: str | None, has_all: bool) -> str:
    """Return the help page of a command with its essential options or, if `has_all`, all options."""
    text = (description or page["text"]).strip()
    options: dict[str, Option] = page["options"]
    if "Usage:" not in text:
        words = [usage_notation(word, options[word]) for word in page["words"]]
        program = os.path.basename(sys.argv[0])
        program = f"{program} {name}" if program == "hf-vit" else program
        text = f"Usage: {' '.join([program, *words])} [options]\n\n{text}"
    essential = [option for option in options.values() if option.get("essential")]
    is_short = bool(essential) and not has_all
    shown = essential if is_short else options.values()
    parts = [text]
    for title in page["groups"]:
        if rows := [row(option, page, is_short) for option in shown if option["group"] == title]:
            parts.append("\n".join([f"{title}:", *rows]))
    if is_short:
        parts.append(f"Defaults marked (chosen) depend on the data. --help all lists all {len(options)} options.")
    elif is_training(page):
        parts.append(TRAINING_NOTE)
    return "\n\n".join(parts)


def usage_notation(name: str, option: Option) -> str:
    """Return the notation of a positional argument in the usage line."""
    word = f"{name.upper()}{' ...' if option.get('list') else ''}"
    return word if option.get("required") else f"[{word}]"


def row(option: Option, page: Page, is_short: bool) -> str:
    """Return the text of an option on a help page, in one or more lines."""
    width = min(max(shutil.get_terminal_size().columns, LEAST_WIDTH), MOST_WIDTH)
    name = option["name"]
    is_word = name in page["words"] and option.get("required")
    flag = name.upper() if is_word else ", ".join([f"--{name}", *ALIASES.get(name, [])])
    flag = f"  {' '.join([flag, *([] if is_word else takes(option))])}"
    short = ["chosen"] if option.get("chosen") else default_notes(option)
    notes = list(short if is_short else all_notes(option, page))
    ending = [f"({'; '.join(notes)})"] if notes else []
    text = " ".join([(is_short and option.get("brief")) or option.get("help", ""), *ending])
    lines = [" " * COLUMN + line for line in textwrap.wrap(text, width - COLUMN, break_on_hyphens=False)]
    if len(flag) > COLUMN - 2 or not lines:
        return "\n".join([flag, *lines])
    return "\n".join([flag + lines[0][len(flag) :], *lines[1:]])


def takes(option: Option) -> Iterator[str]:
    """Yield the placeholder for the value of an option on a help page, unless the option is a flag."""
    if option["type"] == "bool":
        yield from ["false"] if option.get("default") is True else []
        return
    name = "|".join(map(str, option.get("choices", ())))
    if not 0 < len(name) <= MOST_CHOICES:
        name = PLACEHOLDERS.get(option["type"], "TEXT")
    yield f"{name} ..." if option.get("list") else name


def default_notes(option: Option) -> Iterator[str]:
    """Yield the default of an option for a help page, if it has one."""
    value = option.get("default")
    if value not in (None, "", [], False, -1):
        yield f"default: {' '.join(map(str, value)) if isinstance(value, list) else value}"


def all_notes(option: Option, page: Page) -> Iterator[str]:
    """Yield choices, range, default and, for training, the resume rule of an option for the page of all options."""
    choices = list(map(str, option.get("choices", ())))
    if len("|".join(choices)) > MOST_CHOICES:
        yield ", ".join(choices)
    if "range" in option:
        yield str(module("options/field.py")["Range"](*option["range"])).removeprefix("be ").removeprefix("lie ")
    yield from default_notes(option)
    yield from ["chosen"] if option.get("chosen") else []
    yield from [f"resume: {option['resume']}"] if "resume" in option and is_training(page) else []


def is_training(page: Page) -> bool:
    """Return whether a page lists the options of a training run."""
    return bool(page["call"].endswith(":train"))
