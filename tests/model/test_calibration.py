"""Test that models and pipelines apply the stored calibration, with and without the package."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import pipeline

from hf_vit import (
    HfViTForImageClassification,
    HfViTForObjectDetection,
    HfViTForSemanticSegmentation,
    HfViTForUniversalSegmentation,
    HfViTImageProcessor,
)
from hf_vit.evaluation.calibration import fit_features
from hf_vit.model.calibration import SIMILARITY_FILE

from ..helpers.fresh import run_without_package
from ..helpers.models import pixels
from .checks import build


SETS = {"coverages": [0.9, 0.99], "thr_thresholds": [0.85, 0.999], "aps_thresholds": [0.6, 1.0]}


def options_of(model: Any, **values: Any) -> dict[str, Any]:
    return {"model_class": type(model).__name__, "num_images": 30, **values}


@pytest.mark.parametrize(
    ("model_class", "name"),
    [
        (HfViTForImageClassification, "logits"),
        (HfViTForSemanticSegmentation, "logits"),
        (HfViTForObjectDetection, "logits"),
    ],
)
@torch.no_grad()
def test_logits_are_divided_in_evaluation_mode(model_class: Any, name: str, tmp_path: Path) -> None:
    model = build(model_class)
    images = pixels(model.config)
    plain = model(images)[name]
    offset = 0.0 if model_class in (HfViTForImageClassification, HfViTForSemanticSegmentation) else 0.5
    options = options_of(model, temperature=2.0, offset=offset)
    model.config.calibration_config = options
    found = model(images)[name]
    expected = plain / 2
    if offset:  # the offset applies to classes, not to "no object"
        expected = torch.cat([expected[..., :-1] + offset, expected[..., -1:]], dim=-1)
    torch.testing.assert_close(found, expected)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(model_class.from_pretrained(tmp_path)(images)[name], expected)
    off = model_class.from_pretrained(tmp_path, calibration_config={"enabled": False})
    assert off.config.calibration_config.temperature == 2
    torch.testing.assert_close(off(images)[name], plain)
    # Values of another class of models have no effect.
    model.config.calibration_config = {**options, "model_class": "HfViTForDepthEstimation"}
    torch.testing.assert_close(model(images)[name], plain)


def test_training_and_new_heads_remove_the_calibration() -> None:
    model = build(HfViTForImageClassification)
    labels = torch.tensor([0, 1])
    images = pixels(model.config)[:2]
    loss = model(images, labels=labels).loss
    model.config.calibration_config = options_of(model, temperature=2.0)
    assert model(images, labels=labels).loss == loss  # the loss of uncalibrated logits
    model.train()
    assert model.config.calibration_config is None
    model.config.calibration_config = options_of(model, temperature=2.0)
    model.reset_classifier(3)
    assert model.config.calibration_config is None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a calibrated classifier with a photo and a summary of training features."""
    torch.manual_seed(0)
    model = build(HfViTForImageClassification)
    model.config.calibration_config = options_of(model, temperature=2.0, **SETS)
    model.save_pretrained(tmp_path / "model")
    HfViTImageProcessor.for_model(model.config).save_pretrained(tmp_path / "model")
    features = torch.randn(40, model.config.hidden_size)
    summary = fit_features(features, torch.arange(40) % 2, torch.randn(40, model.config.hidden_size), 1e6)
    save_file(
        {name: value.contiguous() for name, value in vars(summary).items()}, tmp_path / "model" / SIMILARITY_FILE
    )
    Image.new("RGB", (40, 30), "red").save(tmp_path / "photo.png")
    return tmp_path / "model"


def test_pipelines_return_sets_abstain_and_report_similarity(folder: Path) -> None:
    photo = str(folder.parent / "photo.png")
    classify = pipeline("image-classification", model=str(folder))
    off = pipeline("image-classification", model=str(folder), model_kwargs={"calibration_config": {"enabled": False}})
    plain, usual = off(photo, top_k=5), classify(photo, top_k=5)
    raw = torch.tensor([entry["score"] for entry in plain])
    torch.testing.assert_close(torch.tensor([entry["score"] for entry in usual]), raw.log().div(2).softmax(dim=0))
    # The sets are those of uncalibrated probabilities, whether or not the model is calibrated.
    expected = int((1 - raw <= 0.85).sum())
    assert [len(pipe(photo, coverage=0.9)) for pipe in (classify, off)] == [expected, expected]
    cumulated = int((raw.cumsum(dim=0) - raw <= 0.6).sum())
    assert len(classify(photo, coverage=0.9, set_method="aps")) == cumulated
    assert len(classify([photo, photo], coverage=0.95)[1]) == 5
    best = usual[0]["score"]
    assert classify(photo, abstain_below=best + 0.01) == []
    assert classify(photo, abstain_below=best - 0.01) == classify(photo)
    alike = classify(photo, similarity=True)
    assert [{name: entry[name] for name in ("label", "score")} for entry in alike] == classify(photo)
    assert all(0 <= entry["similarity"] <= 1 for entry in alike)
    for wrong in ({"coverage": 1.5}, {"abstain_below": -1}, {"similarity": "cosine"}, {"set_method": "raps"}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
            classify(photo, **wrong)
    (folder / SIMILARITY_FILE).unlink()
    with pytest.raises(ValueError, match="hf-vit calibrate"):
        pipeline("image-classification", model=str(folder))(photo, similarity="knn")


def test_checkpoints_apply_their_calibration_without_the_package(folder: Path) -> None:
    photo = str(folder.parent / "photo.png")
    calls: list[dict[str, Any]] = [{}, {"coverage": 0.95}, {"similarity": "knn"}, {"abstain_below": 0.9}]
    classify = pipeline("image-classification", model=str(folder))
    code = """
    import json
    classify = transformers.pipeline("image-classification", model=sys.argv[1], trust_remote_code=True)
    print(json.dumps([classify(sys.argv[2], **call) for call in json.loads(sys.argv[3])]))
    """
    process = run_without_package(code, folder.parent, str(folder), photo, json.dumps(calls))
    found = json.loads(process.stdout.splitlines()[-1])
    for own, call in zip(found, calls, strict=True):
        expected = classify(photo, **call)
        assert [entry["label"] for entry in own] == [entry["label"] for entry in expected]
        for entry, other in zip(own, expected, strict=True):
            assert {k: v for k, v in entry.items() if k != "label"} == pytest.approx(
                {k: v for k, v in other.items() if k != "label"}, abs=1e-5
            )


def test_detection_uses_the_threshold_for_missed_objects(tmp_path: Path) -> None:
    model = build(
        HfViTForObjectDetection, detection_config={"num_queries": 5, "class_loss": "iou_aware", "decoder": "queries"}
    )
    model.save_pretrained(tmp_path)
    processor = HfViTImageProcessor.for_model(model.config)
    processor.save_pretrained(tmp_path)
    detect = pipeline("object-detection", model=str(tmp_path))
    photo = Image.new("RGB", (40, 30), "red")
    scores = [entry["score"] for entry in detect(photo, threshold=0.0)]
    with pytest.raises(ValueError, match=r"max_missed=0\.1 needs a calibrated model\. Run: hf-vit calibrate \S+ DATA"):
        detect(photo, max_missed=0.1)
    with pytest.raises(ValueError, match="Save or download it, and run: hf-vit calibrate FOLDER DATA"):
        pipeline("object-detection", model=build(type(model)), image_processor=processor)(photo, max_missed=0.1)
    middle = (scores[1] + scores[2]) / 2
    model.config.calibration_config = options_of(model, missed_shares=[0.1], missed_thresholds=[middle])
    model.save_pretrained(tmp_path)
    found = pipeline("object-detection", model=str(tmp_path))(photo, max_missed=0.1)
    assert [entry["score"] for entry in found] == pytest.approx(scores[:2])


def test_scores_of_segments_are_scaled_without_a_change_of_the_masks(tmp_path: Path) -> None:
    model = build(HfViTForUniversalSegmentation)
    model.config.calibration_config = options_of(model, temperature=2.0, offset=0.5)
    model.save_pretrained(tmp_path)
    HfViTImageProcessor.for_model(model.config).save_pretrained(tmp_path)
    photo = Image.effect_noise((40, 30), 90).convert("RGB")
    for subtask in ("panoptic", "instance"):
        found, plain = (
            pipeline("image-segmentation", model=str(tmp_path), model_kwargs={"calibration_config": options})(
                photo, subtask=subtask, threshold=0.0, mask_threshold=0.0
            )
            for options in ({}, {"enabled": False})
        )
        assert found
        raw = torch.tensor([part["score"] for part in plain]).double()
        expected = (raw.logit() / 2 + 0.5).sigmoid()
        assert [part["score"] for part in found] == pytest.approx(expected.tolist(), abs=1e-5)
        assert [part["mask"].tobytes() for part in found] == [part["mask"].tobytes() for part in plain]


@pytest.mark.parametrize("subtask", ["panoptic", "instance"])
def test_the_threshold_of_segments_applies_to_calibrated_scores(subtask: str, tmp_path: Path) -> None:
    model = build(HfViTForUniversalSegmentation)
    model.config.calibration_config = options_of(model, temperature=2.0, offset=2.0)
    model.save_pretrained(tmp_path)
    HfViTImageProcessor.for_model(model.config).save_pretrained(tmp_path)
    photo = Image.effect_noise((40, 30), 90).convert("RGB")

    def segment(calibration: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
        kwargs = {"calibration_config": calibration}
        pipe = pipeline("image-segmentation", model=str(tmp_path), model_kwargs=kwargs)
        return pipe(photo, subtask=subtask, mask_threshold=0.0, **options)

    every, plain = segment({}, threshold=0.0), segment({"enabled": False}, threshold=0.0)
    best, raw = (max(part["score"] for part in parts) for parts in (every, plain))
    assert raw < best - 0.01  # scores before calibration are below the threshold
    found = segment({}, threshold=best - 0.01)
    assert found
    assert all(part["score"] > best - 0.01 for part in found)
    # A threshold that is stored by training applies to scores before calibration, and selects the same segments.
    model.options.score_threshold = raw - 0.01
    model.config.universal_segmentation_config = model.options
    model.save_pretrained(tmp_path)
    masks = [[part["mask"].tobytes() for part in segment(options)] for options in ({}, {"enabled": False})]
    assert masks[0] == masks[1] != []
