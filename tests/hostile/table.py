"""Tables of invalid inputs: each raises a one-line error that quotes the value, and changes no file."""

import io
import pickle
import sys
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ..helpers.options import call_command


class Row(NamedTuple):
    """One invalid input: the result of `make` in a folder, which `call` must reject with `error` and all `words`."""

    name: str
    make: Callable[[Path], Any]
    call: Callable[[Any], Any]
    error: type[BaseException] | tuple[type[BaseException], ...]
    words: tuple[str, ...]


def rows(call: Callable[[Any], Any], error: Any, table: Iterable[tuple[str, Any, str]]) -> list[Row]:
    """Return test cases of one call. `table` lists names, inputs or their factories, and parts of error messages."""
    return [
        Row(name, value if callable(value) else lambda _, value=value: value, call, error, tuple(words.split(" | ")))
        for name, value, words in table
    ]


def script(name: str) -> Callable[[list[str]], Any]:
    """Return a function that runs a command in this process. A usage error is raised as the last line of its text."""

    def call(arguments: list[str]) -> Any:
        with redirect_stderr(io.StringIO()) as printed:
            try:
                call_command(name, arguments)
            except SystemExit as stopped:
                sys.exit(printed.getvalue().splitlines()[-1] if stopped.code == 2 else stopped.code)

    return call


def parametrize(table: list[Row]) -> pytest.MarkDecorator:
    assert len({row.name for row in table}) == len(table)
    return pytest.mark.parametrize("row", table, ids=[row.name for row in table])


def content_of(folder: Path) -> dict[Path, bytes | None]:
    """Return the contents of a folder by path: bytes for files, None for folders."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def assert_refused(row: Row, folder: Path, may_list: bool = False) -> None:
    """Assert that an input raises a one-line error (or, with `may_list`, a list), and that nothing is changed."""
    given = row.make(folder)
    files, values = content_of(folder), pickle.dumps(given)
    with pytest.raises(row.error) as caught:
        row.call(given)
    message = str(caught.value.code if isinstance(caught.value, SystemExit) else caught.value)
    assert may_list or "\n" not in message
    missing = [word for word in row.words if word.lower() not in message.lower()]
    assert not missing, message
    assert content_of(folder) == files
    assert pickle.dumps(given) == values
