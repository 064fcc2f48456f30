"""Thinned tests run one in k combinations of their parameters; `-m nightly` runs the others."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "thinned(k): run one in k combinations of the parameters; `-m nightly` runs the others"
    )
    config.addinivalue_line("markers", "nightly: a combination that `thinned` leaves out")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the omitted combinations, and deselect them unless the command line selects them.

    A combination runs if the sum of its parameter indices is divisible by k. Each value of a parameter is thus
    combined with one in k values of every other parameter.
    """
    for item in items:
        marker = item.get_closest_marker("thinned")
        if (
            marker is not None
            and isinstance(item, pytest.Function)
            and sum(item.callspec.indices.values()) % marker.args[0]
        ):
            item.add_marker("nightly")
    if "nightly" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("nightly") is not None]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.get_closest_marker("nightly") is None]
