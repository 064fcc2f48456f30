"""Make the random numbers of every test independent of other tests, in this process and its subprocesses.

The seed of a test depends on `--seed` and the name of the test. The seed of a fixture with a wider scope depends on
the name of the fixture.
"""

import os
import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from ..helpers.seeds import VARIABLE, seed_everything


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="what all tests draw follows from it and their names")


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.getoption('seed')}"


def seed_for(name: str, config: pytest.Config) -> None:
    seed_everything(zlib.crc32(f"{config.getoption('seed')} {name}".encode()))


@contextmanager
def draws_kept() -> Iterator[None]:
    """Restore the state of all random number generators afterwards."""
    import torch  # the xdist controller does not need it

    variable, python, numpy = os.environ.get(VARIABLE, "0"), random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        os.environ[VARIABLE] = variable
        random.setstate(python)
        np.random.set_state(numpy)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Seed random numbers that are drawn when a test file is imported."""
    seed_for(collector.nodeid, collector.config)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Iterator[None]:
    """Seed fixtures shared by several tests, because any of these tests may run first."""
    if fixturedef.scope == "function":
        return (yield)
    with draws_kept():
        seed_for(f"{fixturedef.baseid}::{fixturedef.argname}[{request.param_index}]", request.config)
        return (yield)


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    seed_for(request.node.nodeid, request.config)
