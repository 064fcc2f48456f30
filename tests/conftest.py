"""What holds for every test: what is imported once is not searched for garbage again and again."""

import gc
import sys
from collections.abc import Iterator

import pytest


class Freezer:
    """Takes what imports leave behind out of the garbage collector's sight.

    The Trainer collects garbage whenever a training starts: among all objects of torch and transformers that takes
    longer than most trainings of these tests.
    """

    modules = 0

    @classmethod
    def freeze(cls) -> None:
        """Freezes once more when many modules have been imported since."""
        if len(sys.modules) > cls.modules + 200:
            gc.collect()
            gc.freeze()
            cls.modules = len(sys.modules)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    Freezer.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    Freezer.freeze()
    return (yield)
