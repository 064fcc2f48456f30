"""Test `hf-vit search`: the ranking, the stored index, and errors."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from PIL import Image

import hf_vit
from hf_vit.commands.models import search

from ..helpers.image_text_models import build_model, build_processor
from ..helpers.models import small_config


COLORS = ("red", "green", "blue")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with an image-text model and three photos, before any search has stored an index."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    processor = build_processor(COLORS)
    model = build_model(processor)
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    (tmp_path / "photos").mkdir()
    for color in COLORS:
        Image.new("RGB", (40, 50), color).save(tmp_path / "photos" / f"{color}.png")
    return tmp_path


def encoded_images(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each forward pass appends its number of images."""
    counts, plain = list[int](), hf_vit.HfViTForZeroShotImageClassification.get_image_features

    def counting(self: Any, pixel_values: torch.Tensor, **options: Any) -> Any:
        counts.append(len(pixel_values))
        return plain(self, pixel_values, **options)

    monkeypatch.setattr(hf_vit.HfViTForZeroShotImageClassification, "get_image_features", counting)
    return counts


def test_images_are_ranked_by_cosine_similarity_and_encoded_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, lines = encoded_images(monkeypatch), list[str]()
    search(str(place / "model"), place / "photos", "red", picture=place / "found.png", report=lines.append)
    found = [json.loads(line) for line in lines]
    model = hf_vit.HfViTForZeroShotImageClassification.from_pretrained(place / "model").eval()
    processor = hf_vit.HfViTProcessor.from_pretrained(place / "model")
    images = [Image.open(line["file"]) for line in found]
    with torch.no_grad():
        outputs = model(**processor(text=["red"], images=images, return_tensors="pt"))
    expected = torch.cosine_similarity(outputs.image_embeds, outputs.text_embeds)
    torch.testing.assert_close(torch.tensor([line["score"] for line in found]), expected, rtol=0, atol=1e-5)
    assert [line["score"] for line in found] == sorted((line["score"] for line in found), reverse=True)
    assert (place / "found.png").is_file()
    counts.clear()
    Image.new("RGB", (40, 50), "green").save(place / "photos" / "copy.png")
    Image.new("RGB", (40, 50), "white").save(place / "photos" / "white.png")
    assert len(hf_vit.search(str(place / "model"), place / "photos", "blue", top_k=4)) == 4
    assert counts == [1]  # only "white.png" is new: "copy.png" has known content


def test_unreadable_images_pages_of_results_and_errors(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    (place / "photos" / "broken.png").write_bytes(b"no image")
    assert len(hf_vit.search(str(place / "model"), place / "photos", "red")) == 3
    assert "broken.png, which cannot be read" in caplog.text
    hf_vit.HfViTForImageClassification(small_config()).save_pretrained(place / "classes")
    hf_vit.HfViTImageProcessor.for_model(small_config()).save_pretrained(place / "classes")
    with pytest.raises(ValueError, match=r"trained for another task|no tokenizer"):
        hf_vit.search(str(place / "classes"), place / "photos", "red")

    for number in range(200):
        Image.new("RGB", (40, 50), (number, 0, 0)).save(place / "photos" / f"{number}.png")
    hf_vit.search(str(place / "model"), place / "photos", "red", top_k=203, picture=place / "found.png")
    assert (place / "found-2.png").is_file()
    for name in ("found.xyz", "found.mp4"):
        with pytest.raises(ValueError, match=f"Pictures cannot be saved as .*{name}"):
            hf_vit.search("no/model", place / "photos", "red", picture=place / name)
