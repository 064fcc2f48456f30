"""Fixtures with synthetic data for each task. Tests must not change these data."""

from pathlib import Path

import pytest

from ..helpers.dense_trainings import write_scenes
from ..helpers.object_trainings import write_figures, write_objects


@pytest.fixture(scope="session")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scenes(tmp_path_factory.mktemp("scenes"))


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_objects(tmp_path_factory.mktemp("objects"))


@pytest.fixture(scope="session")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_figures(tmp_path_factory.mktemp("figures"))
