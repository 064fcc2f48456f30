"""`hf-vit predict` with image-text models and candidate texts."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers import pipeline

import hf_vit
from hf_vit.inference.predict import predict_files

from ..helpers.image_text_models import build_model, build_processor
from ..helpers.models import small_config


LABELS = ["cat", "a red car", "dog"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an image-text model, a classifier and two photos."""
    folder = tmp_path_factory.mktemp("place")
    processor = build_processor(LABELS)
    model = build_model(processor)
    model.save_pretrained(folder / "texts")
    processor.save_pretrained(folder / "texts")
    hf_vit.HfViTForImageClassification(small_config()).save_pretrained(folder / "classes")
    processor.image_processor.save_pretrained(folder / "classes")
    for number in range(2):
        pixels = np.random.default_rng(number).integers(0, 256, (40, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def test_lines_have_the_scores_of_the_pipeline_and_a_picture_is_drawn(place: Path, tmp_path: Path) -> None:
    photos = [place / "0.png", place / "1.png"]
    lines = list(predict_files(str(place / "texts"), photos, labels=LABELS, picture=tmp_path / "labeled.png"))
    classify = pipeline("zero-shot-image-classification", model=str(place / "texts"))
    for line, answer in zip(lines, classify([str(photo) for photo in photos], candidate_labels=LABELS), strict=True):
        assert line["label"] == answer[0]["label"]
        assert [entry["label"] for entry in line["labels"]] == [entry["label"] for entry in answer]
        assert line["score"] == pytest.approx(answer[0]["score"], abs=1e-6)
    assert (tmp_path / "labeled.png").is_file()


def test_labels_are_given_to_image_text_models_only(place: Path) -> None:
    missing = "texts is a model of images and texts: give the texts to choose from, --labels cat dog"
    unused = "classes is not a model of images and texts. Remove --labels"
    for model, labels, message in (("texts", None, missing), ("classes", LABELS, unused)):
        with pytest.raises(ValueError, match=message):
            next(predict_files(str(place / model), [place / "0.png"], labels=labels))
