"""Seed random numbers per test, in this process and its child processes.

The seed is derived from the option `--seed` and the name of the test. For a fixture that several tests share, it is
derived from the name of the fixture. Child processes use the same seed.
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
    parser.addoption("--seed", type=int, default=0, help="seed that is combined with the name of each test")


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.getoption('seed')}"


def seed_for(name: str, config: pytest.Config) -> None:
    seed_everything(zlib.crc32(f"{config.getoption('seed')} {name}".encode()))


@contextmanager
def draws_kept() -> Iterator[None]:
    """Context manager that restores the state of the random number generators on exit."""
    import torch  # a late import, because the process that distributes tests does not need torch

    variable, python, numpy = os.environ.get(VARIABLE, "0"), random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        os.environ[VARIABLE] = variable
        random.setstate(python)
        np.random.set_state(numpy)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Seed the random numbers that a test file draws while it is imported."""
    seed_for(collector.nodeid, collector.config)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Iterator[None]:
    """Seed the random numbers of fixtures that several tests share."""
    if fixturedef.scope == "function":
        return (yield)
    with draws_kept():
        seed_for(f"{fixturedef.baseid}::{fixturedef.argname}[{request.param_index}]", request.config)
        return (yield)


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    seed_for(request.node.nodeid, request.config)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread, because the number of threads changes the order of sums and thus their rounding."""
    import torch  # a late import, because the process that distributes tests does not need torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
