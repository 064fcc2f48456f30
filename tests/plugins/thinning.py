"""Run only some parameter combinations: one in k of each thinned test or, with `--first`, one of every test."""

from collections import defaultdict
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--first", action="store_true", help="run only the first parameter combination of each test")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "thinned(k): run one in k combinations of the parameters; `-m nightly` runs the others"
    )
    config.addinivalue_line("markers", "nightly: left out unless the command line requests it")


def numbers_of(items: list[pytest.Item]) -> dict[pytest.Item, int]:
    """Return a number per test item: the sum of the indices of its parameter values.

    Each parameter value comes from a `parametrize` mark or a fixture with parameters. `callspec.indices` is not used,
    because for most parameters it contains the index of the combination instead of that of the value.
    """
    order: dict[Any, dict[str, int]] = defaultdict(dict)  # maps each mark or fixture to the indices of its values
    numbers = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            parts = [order[item.parent, item.originalname, place] for place in range(len(item.callspec._idlist))]
            names = zip(parts, item.callspec._idlist, strict=True)
            numbers[item] = sum(known.setdefault(name, len(known)) for known, name in names)
    return numbers


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the excluded combinations as nightly, and deselect nightly tests unless the command line requests them.

    A combination is kept if the sum of its parameter indices is divisible by k. Each value of a parameter is therefore
    combined with one in k values of every other parameter.
    """
    left_out, numbers = [], numbers_of(items)
    for item in items:
        number, marker = numbers.get(item, 0), item.get_closest_marker("thinned")
        if marker is not None and number % marker.args[0]:
            item.add_marker("nightly")
        is_nightly = item.get_closest_marker("nightly") and "nightly" not in config.option.markexpr
        if is_nightly or (number and config.option.first):
            left_out.append(item)
    config.hook.pytest_deselected(items=left_out)
    excluded = set(left_out)
    items[:] = [item for item in items if item not in excluded]
