"""Run part of the parameter combinations: one in k of thinned tests by default, one per test with `--first`."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--first", action="store_true", help="run only the first parameter combination of each test")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "thinned(k): run one in k combinations of the parameters; `-m nightly` runs the others"
    )
    config.addinivalue_line("markers", "nightly: a combination that `thinned` leaves out")


def number_of(item: pytest.Function) -> int:
    """Return the sum of the indices of a combination, one for each `parametrize` and each fixture with parameters."""
    indices = dict(item.callspec.indices)
    for marker in item.iter_markers("parametrize"):
        names = marker.args[0].split(",") if isinstance(marker.args[0], str) else marker.args[0]
        for name in list(names)[1:]:  # all have the index of the first
            indices.pop(name.strip(), None)
    return sum(indices.values())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the excluded combinations as nightly, and deselect them unless the command line requests them.

    A combination is kept if the sum of its parameter indices is divisible by k. Each value of a parameter is therefore
    combined with one in k values of every other parameter.
    """
    left_out = []
    for item in items:
        if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            continue
        marker, number = item.get_closest_marker("thinned"), number_of(item)
        is_nightly = marker is not None and number % marker.args[0]
        if is_nightly:
            item.add_marker("nightly")
        if (is_nightly and "nightly" not in config.option.markexpr) or (number and config.option.first):
            left_out.append(item)
    config.hook.pytest_deselected(items=left_out)
    excluded = set(left_out)
    items[:] = [item for item in items if item not in excluded]
