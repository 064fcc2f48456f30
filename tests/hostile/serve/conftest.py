"""A small classifier that the tests serve."""

from pathlib import Path

import pytest

import hf_vit
from hf_vit.inference.serving.served_model import ServedModel, open_models

from ...helpers.models import save_model, small_config
from ...helpers.references import draw_weights


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small classifier."""
    model = hf_vit.HfViTForImageClassification(small_config())
    draw_weights(model)
    return save_model(model, tmp_path_factory.mktemp("served") / "classes")


@pytest.fixture
def models(folder: Path) -> list[ServedModel]:
    return open_models([str(folder)], {"top_k": 3})
