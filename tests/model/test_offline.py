"""A model that is neither a local folder nor found on a reachable Hub is reported as missing at once."""

import time
from pathlib import Path

import pytest

import hf_vit
from hf_vit.data import load_image_classification
from hf_vit.features import open_encoder
from hf_vit.model.pretrained import read_config
from hf_vit.model.remote_code import can_reach


CLOSED = "http://127.0.0.1:9"  # no server listens here
MISSING = r"There is no folder or file '{}', it is not in the cache, and the Hub cannot be reached\. Check the path"


@pytest.fixture(autouse=True)
def _closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"ENDPOINT": CLOSED, "HF_HUB_OFFLINE": False, "HF_HUB_CACHE": str(tmp_path / "hub")}.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)


def test_a_missing_model_is_reported_within_seconds(tmp_path: Path) -> None:
    start = time.monotonic()
    for name in ("outputs", "user/model"):
        with pytest.raises(OSError, match=MISSING.format(name)):
            read_config(name)
        with pytest.raises(OSError, match=MISSING.format(name)):
            open_encoder(name, ["mean"], "cpu")
        with pytest.raises(OSError, match=MISSING.format(name)):
            hf_vit.HfViTModel.from_pretrained(name)
        with pytest.raises(OSError, match=MISSING.format(name)):
            hf_vit.predict(name, [_photo(tmp_path)])
    assert time.monotonic() - start < 10


def _photo(folder: Path) -> Path:
    from PIL import Image

    Image.new("RGB", (8, 8)).save(folder / "photo.png")
    return folder / "photo.png"


def test_missing_data_are_reported_within_seconds(tmp_path: Path) -> None:
    start = time.monotonic()
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

    can_reach.cache_clear()
    monkeypatch.setattr("hf_vit.model.remote_code.get_session", Session)
    assert can_reach("http://hub")
    assert can_reach("http://hub")
    assert asked == [("http://hub", 5)]
    can_reach.cache_clear()
