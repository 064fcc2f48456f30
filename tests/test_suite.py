"""Test the test suite: random numbers depend only on the seed, and no files or processes remain after a test."""

import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from .helpers.environment import HOME, TEMPORARY
from .helpers.fresh import run_python
from .helpers.seeds import seed_everything
from .plugins import isolation


pytest_plugins = ("pytester",)

PLUGINS = ("-p", "tests.plugins.isolation", "-p", "tests.plugins.seeding", "-p", "no:cacheprovider", "-s")
DRAWING = """
    import json, os, random, numpy, pytest, torch

    def draw(name):
        draws = [random.random(), numpy.random.rand(), torch.rand(()).item(), int(os.environ["PYTEST_SEED"])]
        print("\\nDREW", json.dumps([name, draws]))

    draw("file")

    @pytest.fixture(scope="session", params=["one", "other"])
    def shared(request):
        draw(request.param)

    def test_first():
        draw("first")

    def test_second(shared, request):
        draw(f"second {request.node.callspec.id}")

    def test_third(request):
        torch.rand(7)
        request.getfixturevalue("shared_by_third")
        draw("third")

    @pytest.fixture(scope="module")
    def shared_by_third():
        draw("shared by third")

    def test_fourth(shared_by_third):
        draw("fourth")
"""


def drawn(pytester: pytest.Pytester, *arguments: str) -> dict[str, list[float]]:
    """Run pytest and return the random numbers that each test and fixture has drawn, keyed by name."""
    lines = pytester.runpytest_inprocess(*PLUGINS, *arguments).outlines
    draws = [json.loads(line.removeprefix("DREW ")) for line in lines if line.startswith("DREW ")]
    assert len({name for name, _ in draws}) == len(draws), "something was drawn twice"
    return dict(draws)


def test_random_numbers_depend_only_on_the_seed_and_the_test_name(pytester: pytest.Pytester) -> None:
    file = pytester.makepyfile(DRAWING).name
    together = drawn(pytester)
    assert len(together) == 9
    for column in zip(*together.values(), strict=True):
        assert len(set(column)) == 9
    backwards = [f"{file}::test_{name}" for name in ("fourth", "third", "second", "first")]
    assert drawn(pytester, *backwards) == together == drawn(pytester, "--seed", "0")
    for name in ("first", "second", "third", "fourth"):
        alone = drawn(pytester, f"{file}::test_{name}")
        assert alone.items() < together.items()
    other = drawn(pytester, "--seed", "1")
    assert other.keys() == together.keys()
    assert all(a != b for name in together for a, b in zip(together[name], other[name], strict=True))


def test_a_process_draws_what_its_test_would(tmp_path: Path) -> None:
    code = "import random, numpy, torch; print([random.random(), numpy.random.rand(), torch.rand(()).item()])"
    printed = []
    for seed in (1, 2):
        seed_everything(seed)
        printed.append(json.loads(run_python("-c", code, workdir=tmp_path, fresh=True).stdout))
        assert printed[-1] == [random.random(), np.random.rand(), torch.rand(()).item()]
    assert all(a != b for a, b in zip(*printed, strict=True))


NETWORK, FILES, PROCESSES = "reached for the network*", "left files outside its tmp_path*", "left processes running*"
LEAVING = {
    "a name is looked up": ("socket.getaddrinfo('example.org', 80)", NETWORK),
    "an address is connected to": ("socket.create_connection(('192.0.2.1', 80))", NETWORK),
    "an address is tried": ("socket.socket().connect_ex(('192.0.2.1', 80))", NETWORK),
    "an IPv6 address is connected to": ("socket.socket(socket.AF_INET6).connect(('2001:db8::1', 80))", NETWORK),
    "a download": ("urllib.request.urlopen('http://example.org')", NETWORK),
    "a temporary file": ("tempfile.mkstemp(prefix='left')", FILES),
    "a file at home": ("pathlib.Path(HOME, 'left').touch()", FILES),
}
if sys.platform == "linux":
    LEAVING |= {
        "a process": ("subprocess.Popen(['sleep', '100'])", f"{PROCESSES}sleep 100*"),
        "a process of one that has ended": ("subprocess.run(['sh', '-c', 'sleep 100 &'])", f"{PROCESSES}sleep 100*"),
    }


@pytest.fixture
def _swept() -> Iterator[None]:
    """Remove files that nested pytest runs have left behind."""
    yield
    for folder in (HOME, TEMPORARY):
        for file in folder.glob("left*"):
            file.unlink()


@pytest.mark.usefixtures("_swept")
@pytest.mark.parametrize(("code", "message"), LEAVING.values(), ids=LEAVING)
def test_leaked_files_processes_and_network_use_fail(
    code: str, message: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "PATIENCE", 0.1)
    pytester.makepyfile(
        f"""
        import contextlib, pathlib, socket, subprocess, tempfile, urllib.request
        from tests.helpers.environment import HOME

        def test_whose_code_catches_everything():
            with contextlib.suppress(BaseException):
                {code}

        def test_after(tmp_path):
            tmp_path.joinpath("file").touch()
        """
    )
    result = pytester.runpytest_inprocess(*PLUGINS)
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(f"*AssertionError: The test {message}")


def test_refused_connection_raises_network_refused_error(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import contextlib, urllib.request

        def test_that_goes_on_without_a_network():
            with contextlib.suppress(Exception):
                urllib.request.urlopen("http://example.org")
        """
    )
    pytester.runpytest_inprocess(*PLUGINS).stdout.fnmatch_lines("*NetworkRefusedError: A test accesses example.org*")


def test_files_in_the_repository_are_refused(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation.processes, "ROOT", pytester.path)
    pytester.path.joinpath(".gitignore").write_text("outputs/\n*.egg-info/\n")
    pytester.makepyfile(
        """
        from pathlib import Path

        def test_that_writes():
            for name in ("outputs/model.json", "a.egg-info/PKG-INFO", "kept/left.txt", "old.txt"):
                Path(name).parent.mkdir(exist_ok=True)
                Path(name).write_text("new")
        """
    )
    pytester.path.joinpath("old.txt").touch()
    result = pytester.runpytest_inprocess(*PLUGINS)
    result.assert_outcomes(passed=1, errors=1)
    assert f"ran beside it, left ['{pytester.path / 'kept' / 'left.txt'}'] behind." in result.stdout.str()


def test_library_files_are_in_the_temporary_folder_of_the_tests() -> None:
    from huggingface_hub.constants import HF_HOME

    assert Path(HF_HOME).parent == Path.home().parent == Path(os.environ["TMPDIR"]).parent
