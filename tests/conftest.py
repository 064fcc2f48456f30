"""What holds for every test: an environment of its own, before any library reads it, and the plugins."""

import shutil

from .helpers.environment import PLACE, isolate


isolate()

pytest_plugins = ("tests.plugins.isolation", "tests.plugins.seeding", "tests.plugins.slow", "tests.plugins.thinning")


def pytest_unconfigure() -> None:
    shutil.rmtree(PLACE, ignore_errors=True)
