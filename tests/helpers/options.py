"""Conversion of command lines to option values of `hf_vit.training`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from hf_vit import cli, tasks
from hf_vit.commands.generate import evaluation_options, options_of_types
from hf_vit.options.recipe import savable_values, with_recipe
from hf_vit.options.resolve import build, resolve
from hf_vit.runs import Run, open_run
from hf_vit.runs.evaluate import evaluate as run_evaluation
from hf_vit.runs.evaluate import find_task
from hf_vit.runs.run import run as run_training


Arguments = Sequence[str | Mapping[str, Any]]


def values_of(types: Sequence[type], arguments: Arguments) -> dict[str, Any]:
    """Return the option values of a command line. The first argument may be a mapping of options or a recipe file."""
    first = arguments[0] if arguments else ""
    if isinstance(first, Mapping):
        return {**first, **values_of(types, arguments[1:])}
    return parsed(options_of_types(types, ()), arguments)


def parsed(options: Iterable[Mapping[str, Any]], arguments: Sequence[str]) -> dict[str, Any]:
    """Return the option values of a command line, parsed in the same way as by the command `hf-vit`."""
    first = arguments[0] if arguments else ""
    is_recipe = first.endswith((".yaml", ".json"))
    page = {"options": {option["name"]: option for option in options}, "words": [], "recipe": True}
    namespace, unknown = cli.Parser(page).parse_known_args(list(arguments[is_recipe:]))
    values = vars(namespace)
    cli.check(page, values, unknown)
    return {"recipe": first, **values} if is_recipe else values


def evaluation_values(arguments: Sequence[str]) -> dict[str, Any]:
    named = dict(pairwise(arguments))
    task_class = find_task({"model_name_or_path": named["--model_name_or_path"], "task": named.get("--task")})
    return parsed(evaluation_options(task_class), arguments)


def evaluate(arguments: Sequence[str], report: Callable[[str], None]) -> None:
    """Run an evaluation from a command line. Like `hf-vit evaluate`, exit with a one-line message on errors."""
    with cli.exit_with_error_line():
        values = evaluation_values(arguments)
    run_evaluation(values, report)


def call_command(name: str, arguments: Sequence[str]) -> None:
    """Runs `hf-vit {name}` in this process."""
    cli.main([*name.split(), *arguments])


def parse_arguments(types: Sequence[type], arguments: Arguments, **defaults: Any) -> tuple[Any, ...]:
    """Parse a command line into dataclasses of options."""
    return build(types, with_recipe(values_of(types, arguments)), **defaults)


def run_of(task_class: type[tasks.Task], arguments: Arguments) -> Run:
    """Return a run without data for a command line."""
    return Run(*task_class.from_options(with_recipe(values_of(task_class.argument_types(), arguments))))


def opened_run(task_class: type[tasks.Task], arguments: Arguments) -> Run:
    """Return a run with its data for a command line."""
    return open_run(run_of(task_class, arguments))


def given_arguments(types: Sequence[type], arguments: Arguments) -> dict[str, Any]:
    """Return the options given by a command line, in the format of a recipe."""
    return savable_values(resolve(types, with_recipe(values_of(types, arguments))), types)


def run(
    task_class: type[tasks.Task], arguments: Arguments, description: str | None, report: Callable[[str], None]
) -> None:
    """Run training from a command line. Like `hf-vit train`, exit with a one-line message on errors."""
    with cli.exit_with_error_line():
        values = values_of(task_class.argument_types(), arguments)
    run_training(task_class, values, report)
