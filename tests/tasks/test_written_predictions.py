"""Training and evaluation write one line with the prediction of each evaluated image."""

import json
from pathlib import Path
from typing import Any

import pytest

import hf_vit

from ..helpers.dense_trainings import A_FEW_STEPS, NUM_VALIDATION, TASKS, train, write_scenes
from ..helpers.object_trainings import CLASSES, POINTS, write_figures, write_objects


KEYS = {
    "semantic_segmentation": {"classes"},
    "universal_segmentation": {"segments"},
    "depth_estimation": {"unit", "min", "median", "max"},
}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scenes(tmp_path_factory.mktemp("scenes"))


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("task", list(TASKS))
def test_predictions_are_those_of_predict(task: str, scenes: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    train(task, scenes, folder, *A_FEW_STEPS, "--ema_decay", "0.5")
    lines = lines_of(folder / "validation_predictions.jsonl")
    images = sorted((scenes / "val" / "images").iterdir())
    assert [line["file"] for line in lines] == list(map(str, images))
    assert len(lines) == NUM_VALIDATION
    assert all({*line} == {"file"} | KEYS[task] for line in lines)
    for line, expected in zip(lines, hf_vit.predict(folder, images), strict=True):
        if task == "semantic_segmentation":
            shares = {found["label"]: found["share"] for found in expected["classes"]}
            assert {found["label"]: found["share"] for found in line["classes"]} == pytest.approx(shares, abs=0.02)
        if task == "depth_estimation":
            assert {**line, "unit": ""} == pytest.approx({**expected, "unit": ""}, abs=0.01) or line == expected
        if task == "universal_segmentation":
            assert all({*found} == {"label", "score", "area"} for found in line["segments"])
            assert [found["label"] for found in line["segments"]] == [found["label"] for found in expected["segments"]]
    options = {"report": lambda _: None, "use_cpu": True, "disable_tqdm": True}
    hf_vit.evaluate(folder, scenes, output_dir=tmp_path / "scores", **options)
    assert lines_of(tmp_path / "scores" / "validation_predictions.jsonl") == lines


def test_objects_and_keypoints_are_written(tmp_path: Path) -> None:
    data, folder = write_objects(tmp_path / "objects"), tmp_path / "detector"
    train("object_detection", data, folder, *A_FEW_STEPS)
    lines = lines_of(folder / "validation_predictions.jsonl")
    images = sorted((data / "val" / "images").iterdir())
    assert [line["file"] for line in lines] == list(map(str, images))
    for line, expected in zip(lines, hf_vit.predict(folder, images, threshold=0.5), strict=True):
        assert [found["label"] for found in line["objects"]] == [found["label"] for found in expected["objects"]]
        for found, other in zip(line["objects"], expected["objects"], strict=True):
            assert found["label"] in CLASSES
            assert found["box"] == pytest.approx(other["box"], abs=0.5)
    data, folder = write_figures(tmp_path / "figures"), tmp_path / "pose"
    train("keypoint_detection", data, folder, *A_FEW_STEPS)
    lines = lines_of(folder / "validation_predictions.jsonl")
    annotations = json.loads((data / "val" / "annotations.json").read_text())["annotations"]
    assert len(lines) == len(annotations)  # one line per object
    for line in lines:
        assert {*line} == {"file", "box", "labels", "keypoints", "scores"}
        assert line["labels"] == POINTS
        assert [len(values) for values in (line["keypoints"], line["scores"], line["box"])] == [3, 3, 4]
