"""What holds for every test: an environment of its own, before any library reads it, and the plugins."""

from .helpers.environment import isolate


isolate()

pytest_plugins = ("tests.plugins.isolation", "tests.plugins.seeding", "tests.plugins.slow")
