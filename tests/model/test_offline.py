"""Test that loading a model by name quickly raises an error if there is no such folder and no access to the Hub."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import hf_vit
from hf_vit.data import load_image_classification
from hf_vit.features import open_encoder
from hf_vit.model.pretrained import read_config
from hf_vit.model.remote_code import is_hub_reachable


CLOSED = "http://127.0.0.1:9"  # a port without a server
MISSING = r"There is no folder or file '{}', it is not in the cache, and the Hub cannot be reached\. Check the path"


@pytest.fixture(autouse=True)
def _closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"ENDPOINT": CLOSED, "HF_HUB_OFFLINE": False, "HF_HUB_CACHE": str(tmp_path / "hub")}.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)


def test_missing_models_and_data_are_reported_within_seconds(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "photo.png")
    opens: list[Callable[[str], Any]] = [
        read_config,
        lambda name: open_encoder(name, ["mean"], "cpu"),
        hf_vit.HfViTModel.from_pretrained,
        lambda name: hf_vit.predict(name, [tmp_path / "photo.png"]),
    ]
    start = time.monotonic()
    for name in ("outputs", "user/model"):
        for open_model in opens:
            with pytest.raises(OSError, match=MISSING.format(name)):
                open_model(name)
    message = r"There is no file or folder 'user/pets'\. .* Cannot reach 'user/pets' on the Hub"
    with pytest.raises(FileNotFoundError, match=message):
        load_image_classification("user/pets")
    assert time.monotonic() - start < 10


def test_a_model_in_the_cache_needs_no_hub(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--user--model" / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "hf_vit", "hidden_size": 16}')
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0")
    assert read_config("user/model", cache_dir=tmp_path / "hub", local_files_only=True)["hidden_size"] == 16


def test_a_hub_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Session:
        def head(self, endpoint: str, timeout: float) -> None:
            asked.append((endpoint, timeout))

    is_hub_reachable.cache_clear()
    monkeypatch.setattr("hf_vit.model.remote_code.get_session", Session)
    assert is_hub_reachable("http://hub")
    assert is_hub_reachable("http://hub")
    assert asked == [("http://hub", 5)]
    is_hub_reachable.cache_clear()
