"""Tables of hostile inputs: each must raise a one-line error that quotes the problem, without changing any file."""

import io
import pickle
import shutil
import sys
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ..scripts.test_demo import load_script


class Row(NamedTuple):
    """One hostile input.

    Args:
        name: Name of the test in the printed table.
        make: Creates the input in its own folder.
        call: Function that must reject the return value of `make`.
        error: Expected exception class.
        words: Words that the message must contain, ignoring case.
    """

    name: str
    make: Callable[[Path], Any]
    call: Callable[[Any], Any]
    error: type[BaseException] | tuple[type[BaseException], ...]
    words: tuple[str, ...]


def rows(call: Callable[[Any], Any], error: Any, table: Iterable[tuple[str, Any, str]]) -> list[Row]:
    """Return rows of one call: name, input or function that creates it, and words of the message separated by bars."""
    return [
        Row(name, value if callable(value) else lambda _, value=value: value, call, error, tuple(words.split(" | ")))
        for name, value, words in table
    ]


def script(name: str) -> Callable[[list[str]], Any]:
    """Return a function that runs a script. If the script prints its usage, the error is the last line."""

    def call(arguments: list[str]) -> Any:
        with redirect_stderr(io.StringIO()) as printed:
            try:
                load_script(name).main(arguments)
            except SystemExit as stopped:
                sys.exit(printed.getvalue().splitlines()[-1] if stopped.code == 2 else stopped.code)

    return call


def parametrize(table: list[Row]) -> pytest.MarkDecorator:
    assert len({row.name for row in table}) == len(table)
    return pytest.mark.parametrize("row", table, ids=[row.name for row in table])


def content_of(folder: Path) -> dict[Path, bytes | None]:
    """Return all paths in a folder with the bytes of files and None for folders."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def assert_refused(row: Row, folder: Path, may_list: bool = False) -> None:
    """Assert that an input raises a one-line error, and that no file or value has changed.

    With `may_list`, the error may have one line for each of several files.
    """
    given = row.make(folder)
    files, values = content_of(folder), frozen(given)
    with pytest.raises(row.error) as caught:
        row.call(given)
    message = str(caught.value.code if isinstance(caught.value, SystemExit) else caught.value)
    assert may_list or "\n" not in message
    missing = [word for word in row.words if word.lower() not in message.lower()]
    assert not missing, message
    assert content_of(folder) == files
    assert frozen(given) == values


def frozen(value: Any) -> bytes:
    """Return arrays, tensors, strings and numbers as bytes, to detect modifications."""
    return pickle.dumps(value)


def copy_of(folder: Path, to: Path) -> Path:
    """Return a copy of a folder that a row may damage."""
    shutil.copytree(folder, to)
    return to
