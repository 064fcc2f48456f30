"""The command `hf-vit`: train, evaluate, predict, convert, export and publish.

Usage: hf-vit COMMAND ...
"""

# Help pages and errors about options do not import torch, which takes seconds. This file therefore imports the
# standard library only and is run by its path (`hf_vit/start.py`), and the options of all commands are in a file that
# `python -m hf_vit.commands.generate` writes.
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
from functools import cache, partial
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn


PACKAGE = Path(__file__).parent
COMMANDS = {
    "train": "train a model of any task, pretraining too",
    "pretrain": "pretrain on your images, and measure what that is worth",
    "evaluate": "score a saved model",
    "predict": "predict labels, segments, depth, objects or keypoints of images",
    "features": "write the features of images to files, or score them",
    "visualize": "draw what a model attends to",
    "convert": "turn published checkpoints into ours, and ours into theirs",
    "export": "write a model for ONNX, OpenVINO, torch.export or ExecuTorch, checked at other sizes",
    "push": "publish a saved model on the Hugging Face Hub",
    "info": "tell what is installed, or what a model is",
}
EXAMPLES = """\
Examples:
    hf-vit train image-classification photos --minutes 10
    hf-vit evaluate outputs/photos-image-classification photos
    hf-vit predict outputs/photos-image-classification photo.jpg --picture labeled.png

hf-vit COMMAND --help tells more of a command."""
TASKS = {"image-text": "zero-shot-image-classification", "mim": "masked-image-modeling"}  # by other names
ALIASES = {"model_name_or_path": ["--model"]}
COLUMN, LEAST_WIDTH, MOST_WIDTH = 34, 80, 120  # where descriptions begin, and letters of a line
MOST_CHOICES = 40  # letters
PLACEHOLDERS = {"int": "N", "float": "X", "mapping": "JSON", "mapping or text": "JSON", "pair": "X,Y", "size": "N"}
USER_ERRORS = (FloatingPointError, ImportError, OSError, ValueError)

Option = dict[str, Any]
Page = dict[str, Any]
say = partial(print, flush=True)


def main(arguments: Sequence[str] | None = None, description: str | None = None) -> None:
    """Runs a command; exits with one line about what is wrong with it.

    Args:
        arguments: The command line without the program's name; by default that of this process.
        description: Text above the options of the help page, in place of that of the command.
    """
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of classes in a locale that cannot print them
    if words[0] in ("-h", "--help"):
        say(help_page())
        return
    if words[0] == "--version":
        say(f"hf-vit {import_module('importlib.metadata').version('hf-vit')}")
        return
    with exit_in_one_line():
        if words[0] not in COMMANDS:
            meant = " or ".join(get_close_matches(words[0], COMMANDS))
            question = f" Did you mean {meant}?" if meant else ""
            raise ValueError(f"There is no command {words[0]!r}.{question} --help names all.")
        try:
            os.getcwd()
        except FileNotFoundError:  # transformers cannot be imported from there
            sys.exit("hf-vit: The working directory no longer exists. Change to another one: cd ~")
        if words[0] in table()["groups"] and words[1:2] in ([], ["-h"], ["--help"]):
            say(table()["groups"][words[0]])
            return
        name, rest = split_name(words)
        page, values = prepare(name, rest, description)
    if page is not None:
        run(page, values)


def help_page() -> str:
    """Returns what `hf-vit --help` prints."""
    rows = [f"    {name:<12}{use}" for name, use in COMMANDS.items()]
    return "\n".join([(__doc__ or "").strip(), "", "Commands:", *rows, "", EXAMPLES])


@contextmanager
def exit_in_one_line() -> Iterator[None]:
    """Exits with the name of the program and one line if something fails for a reason that a user can mend."""
    try:
        yield
    except USER_ERRORS as error:
        sys.exit(f"{os.path.basename(sys.argv[0])}: {error}")


@cache
def table() -> dict[str, Any]:
    """Returns the options of all commands, see `hf_vit.commands.generate`."""
    content: dict[str, Any] = json.loads((PACKAGE / "commands" / "options.json").read_text(encoding="utf-8"))
    return content


@cache
def module(file: str) -> dict[str, Any]:
    """Returns the names of a file of the package that imports the standard library only."""
    return runpy.run_path(str(PACKAGE / file))


def split_name(words: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the name of a command with its task or part, as in "train depth-estimation", and the other words."""
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
        raise ValueError(f"There is no hf-vit features {part}. Choose {' or '.join(parts)}.")
    question = module("options/names.py")["nearest"](name, parts)
    raise ValueError(f"There is no task {part!r}.{question} The tasks are {', '.join(parts)}: hf-vit train TASK DATA.")


def prepare(name: str, words: Sequence[str], description: str | None) -> tuple[Page | None, dict[str, Any]]:
    """Returns the page of a command and the values of its options, or prints its help page and returns None."""
    help_wanted, words = split_help(words)
    is_help, page = help_wanted is not None, merged() if name == "evaluate" else page_of(name)
    values, unknown = ({}, []) if is_help and name != "evaluate" else read(page, words)
    if name == "evaluate":
        task = find_task(values, is_help)
        page = page_of(f"evaluate {task}") if task else merged(shared=is_help)
        values |= {"task": TASKS.get(values["task"], values["task"])} if "task" in values else {}
    if is_help:
        say(page_text(name, page, description, has_all=help_wanted == "all"))
        return None, {}
    check(page, values, unknown)
    return page, values


def run(page: Page, values: Mapping[str, Any]) -> None:
    """Runs a command.

    Training, evaluation and extraction report errors of users themselves. A `ValueError` that they raise later is a
    fault of the program and keeps its traceback.
    """
    module_name, _, name = page["call"].partition(":")
    function = getattr(import_module(module_name), name)
    with nullcontext() if page["recipe"] else exit_in_one_line():
        function(**page.get("given", {}), **values, report=say)


def split_help(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Returns what follows `--help`, "" for nothing and None if there is no such option, and the other words."""
    start = next((index for index, word in enumerate(words) if word in ("-h", "--help")), None)
    if start is None:
        return None, list(words)
    wanted = next(iter(words[start + 1 : start + 2]), "")
    if wanted in ("", "all") or wanted.startswith("-"):
        return wanted, [*words[:start], *words[start + 1 + (wanted == "all") :]]
    raise ValueError(f"--help {wanted}: there are --help, for what matters, and --help all.")


# --- From text to values


class Parser(argparse.ArgumentParser):
    """Reads the options of a command; an error is a `ValueError` of one line, and what is not given is left out."""

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
        """Adds an option with either kind of dashes, and the opposite of one that is true by default."""
        settings: dict[str, Any] = {"choices": option.get("choices"), "required": option.get("required", False)}
        if "const" in option:
            settings |= {"nargs": "?", "const": option["const"]}
        elif option.get("list"):
            settings["nargs"] = "+"
        flags = [*spellings(name), *ALIASES.get(name, [])]
        self.add_argument(*flags, dest=name, type=TYPES[option["type"]], **settings)
        if option.get("default") is True:
            self.add_argument(*spellings(f"no_{name}"), dest=name, action="store_false")

    def error(self, message: str) -> NoReturn:
        """Raises `ValueError`."""
        raise ValueError(f"{message}. --help lists the options.")


def spellings(name: str) -> list[str]:
    """Returns the flags of an option, with underscores and with dashes."""
    return list(dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"]))


def read(page: Page, words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Returns the values of the options that are given, and the words that belong to none."""
    recipe = page["recipe"] and words[:1] and words[0].endswith((".yaml", ".yml"))
    namespace, unknown = Parser(page).parse_known_args(words[1:] if recipe else words)
    values = vars(namespace)
    if recipe and values.setdefault("recipe", words[0]) != words[0]:
        raise ValueError(f"The recipes {words[0]} and {values['recipe']} are given. Leave one of the two out.")
    return values, unknown


def page_of(name: str) -> Page:
    """Returns the page of a command with its options by name."""
    page: Page = table()["pages"][name]
    options = [table()["options"][key] for key in page["options"]]
    return {**page, "options": {option["name"]: option for option in options}}


def merged(shared: bool = False) -> Page:
    """Returns the page of evaluations with the options of all tasks, or with those that all tasks share."""
    pages = [page_of(name) for name in table()["pages"] if name.startswith("evaluate ")]
    options = {name: option for page in pages for name, option in page["options"].items()}
    if shared:
        options = {name: options[name] for name in options if all(name in page["options"] for page in pages)}
    groups = dict.fromkeys(title for page in pages for title in page["groups"])
    return {**pages[0], "groups": list(groups), "options": options}


def find_task(values: Mapping[str, Any], is_help: bool) -> str:
    """Returns the task of the model of an evaluation, "" if it is not known without the package.

    The package, which takes seconds to import, is asked about models on the Hub only for a help page.
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
        return str(import_module("hf_vit.training.run").task_of_model(model)) if is_help else ""
    try:
        names = json.loads(file.read_text(encoding="utf-8")).get("architectures") or ["ForImageClassification"]
    except (ValueError, AttributeError):  # the package reports them
        return ""
    saved = str(names[0])
    return next((task for task, parts in architectures.items() if any(part in saved for part in parts)), "")


def to_bool(text: str) -> bool:
    """Returns the truth value of a word."""
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return words[text.lower()]


def to_mapping(text: str) -> dict[str, Any]:
    """Returns a mapping in JSON."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        content = f"no JSON: {error}"
    if not isinstance(content, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object ({content}). Write it like '{{\"name\": 1}}'")
    return content


def to_path(text: str) -> Path | str:
    """Returns a path; argparse converts its mark of a missing word too, which must stay as it is."""
    return text if text is argparse.SUPPRESS else Path(text)


def to_pair(text: str) -> tuple[float, float]:
    """Returns x and y of "x,y"."""
    try:
        x, y = map(float, text.split(","))
    except ValueError:
        x = y = math.nan
    if not (math.isfinite(x) and math.isfinite(y)):
        raise argparse.ArgumentTypeError(f"{text!r} must be two numbers, like 320,200")
    return x, y


def to_size(text: str) -> int | tuple[int, int]:
    """Returns the side of a square, or the height and width of "256,192"."""
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
    "mapping or text": lambda text: to_mapping(text) if text.startswith("{") else text,  # such as a file's name
}


def check(page: Page, values: Mapping[str, Any], unknown: Sequence[str]) -> None:
    """Raises `ValueError` for options that the command does not have, or a number out of range."""
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
            f"{' '.join(map(repr, unknown))} belongs to no option. What an option takes stands right behind it, and "
            "what stands alone comes before all options."
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
    """Returns the help page of a command: the essential options, or all of them."""
    text = (description or page["text"]).strip()
    options: dict[str, Option] = page["options"]
    if "Usage:" not in text:
        words = [usage_of(word, options[word]) for word in page["words"]]
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
        parts.append(f"--help all lists all {len(options)} options. Those that are chosen follow data and device.")
    return "\n\n".join(parts)


def usage_of(name: str, option: Option) -> str:
    """Returns how a word that is given without the name of its option stands in the usage line."""
    word = f"{name.upper()}{' ...' if option.get('list') else ''}"
    return word if option.get("required") else f"[{word}]"


def row(option: Option, page: Page, is_short: bool) -> str:
    """Returns the lines on an option."""
    width = min(max(shutil.get_terminal_size().columns, LEAST_WIDTH), MOST_WIDTH)
    name = option["name"]
    is_word = name in page["words"] and option.get("required")
    flag = name.upper() if is_word else ", ".join([f"--{name}", *ALIASES.get(name, [])])
    flag = f"  {' '.join([flag, *([] if is_word else takes(option))])}"
    ending = ["(chosen)"] if is_short and option.get("chosen") else default_of(option)
    help_text = (is_short and option.get("brief")) or option.get("help", "")
    lines = [" " * COLUMN + line for line in textwrap.wrap(" ".join([help_text, *ending]), width - COLUMN)]
    if len(flag) > COLUMN - 2 or not lines:
        return "\n".join([flag, *lines])
    return "\n".join([flag + lines[0][len(flag) :], *lines[1:]])


def takes(option: Option) -> Iterator[str]:
    """Yields what an option takes, if that is more than true or false."""
    if option["type"] == "bool":
        yield from ["false"] if option.get("default") is True else []
        return
    name = "|".join(map(str, option.get("choices", ())))
    if not 0 < len(name) <= MOST_CHOICES:
        name = PLACEHOLDERS.get(option["type"], "TEXT")
    yield f"{name} ..." if option.get("list") else name


def default_of(option: Option) -> Iterator[str]:
    """Yields the default of an option, if it has one."""
    value = option.get("default")
    if value not in (None, "", [], False, -1):
        yield f"(default: {' '.join(map(str, value)) if isinstance(value, list) else value})"
