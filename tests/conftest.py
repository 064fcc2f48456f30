"""Isolate the environment of the tests before any library is imported, and load the pytest plugins."""

import shutil

from .helpers.environment import PLACE, isolate


isolate()

pytest_plugins = ("tests.plugins.isolation", "tests.plugins.seeding", "tests.plugins.slow", "tests.plugins.thinning")


def pytest_unconfigure() -> None:
    shutil.rmtree(PLACE, ignore_errors=True)
