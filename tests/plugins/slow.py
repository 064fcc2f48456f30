"""Mark slow tests, and exclude imported objects from garbage collection."""

import gc
import inspect
import subprocess
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

from ..helpers.processes import Process


# A test is slow if it uses one of the objects below directly, through a fixture, or through a helper function.
STARTS_A_PROCESS = (Process, subprocess.run, subprocess.Popen)
TRAINS = {"build_run", "call_command", "load_script", "make_trainer", "run", "run_task"}
SWEEPS = ("convert", "visualize")  # test files that run many models or draw with matplotlib
OWN_PACKAGE = __name__.partition(".")[0]
NEW_MODULES = 200  # number of newly imported modules after which their objects are excluded from garbage collection


class Imports:
    """Exclude objects created by imports from garbage collection.

    The Trainer collects garbage when training starts. With all objects of torch and transformers, this would take
    longer than most training runs of these tests.
    """

    frozen = 0

    @classmethod
    def freeze(cls) -> None:
        if len(sys.modules) > cls.frozen + NEW_MODULES:
            gc.collect()
            gc.freeze()
            cls.frozen = len(sys.modules)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    Imports.freeze()
    return (yield)


def codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code object of a function and of all functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def used_by(function: FunctionType) -> Iterator[Any]:
    """Yield the default arguments of a function and all module-level objects that the function uses."""
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    for code in codes(function.__code__):
        for name in code.co_names:
            value = function.__globals__.get(name)
            if isinstance(value, ModuleType):
                yield from (getattr(value, other) for other in code.co_names if other in vars(value))
            else:
                yield value


def is_slow(function: Any, known: dict[Any, bool]) -> bool:
    """Return whether a function starts a process, trains or compiles, directly or through functions that it calls."""
    import torch  # a late import, because the process that distributes tests does not need torch
    from transformers import Trainer

    function = inspect.unwrap(function) if callable(function) else function
    if function is torch.optim:
        return True
    if isinstance(function, type):
        if issubclass(function, Trainer):
            return True
        methods = vars(function).values() if function.__module__.startswith(f"{OWN_PACKAGE}.") else ()
        return function in STARTS_A_PROCESS or any(is_slow(m, known) for m in methods if isinstance(m, FunctionType))
    if not isinstance(function, FunctionType):
        return False
    if function not in known:
        known[function] = False  # prevents infinite recursion for recursive functions
        known[function] = (
            function in STARTS_A_PROCESS
            or function is torch.compile
            or (
                function.__module__.startswith(f"{OWN_PACKAGE}.")
                and (
                    any(TRAINS.intersection(code.co_names) for code in codes(function.__code__))
                    or any(is_slow(used, known) for used in used_by(function))
                )
            )
        )
    return known[function]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every slow test automatically."""
    known: dict[Any, bool] = {}
    for item in items:
        if isinstance(item, pytest.Function):
            fixtures = (f.func for name in item.fixturenames for f in item._fixtureinfo.name2fixturedefs.get(name, ()))
            is_sweep = item.path.parent.name in SWEEPS
            if is_sweep or any(is_slow(function, known) for function in (item.function, *fixtures)):
                item.add_marker(pytest.mark.slow)
