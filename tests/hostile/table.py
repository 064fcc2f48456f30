"""Tables of invalid inputs. Each input must raise a one-line error with the value, and must not change files."""

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
    """Test case: `call` must reject the result of `make` with an `error` whose message contains all `words`."""

    name: str
    make: Callable[[Path], Any]
    call: Callable[[Any], Any]
    error: type[BaseException] | tuple[type[BaseException], ...]
    words: tuple[str, ...]


def rows(call: Callable[[Any], Any], error: Any, table: Iterable[tuple[str, Any, str]]) -> list[Row]:
    """Return test cases for the function `call`.

    Rows of `table` contain a name, an invalid input or a function that creates it, and parts of the error message.
    """
    return [
        Row(name, value if callable(value) else lambda _, value=value: value, call, error, tuple(words.split(" | ")))
        for name, value, words in table
    ]


def script(name: str) -> Callable[[list[str]], Any]:
    """Return a function that runs a command in this process. It raises `SystemExit` with the last line of an error."""

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
    """Return the contents of a folder, keyed by path: bytes for files, None for subfolders."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def assert_refused(row: Row, folder: Path, may_list: bool = False) -> None:
    """Assert that an input raises a one-line error and that neither the input nor any file is changed.

    If `may_list`, the message may have several lines.
    """
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
