"""Evaluation of saved segmentation and depth models."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import hf_vit

from ..helpers.dense_trainings import A_FEW_STEPS, NAMES, OF_TASK, TASKS, train, write_scenes
from ..helpers.options import evaluate


PREDICTIONS = "validation_predictions.jsonl"
OF_ANOTHER_TASK = ["--model_name_or_path", "semantic_segmentation", "--task", "depth_estimation"]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with scenes and a model of each task that was trained on them for a few steps."""
    folder = tmp_path_factory.mktemp("workplace")
    write_scenes(folder / "scenes")
    for task in TASKS:
        train(task, folder / "scenes", folder / task, *A_FEW_STEPS, "--ema_decay", "0.5")
    return folder


def score(workplace: Path, task: str, output_dir: Path, *options: str) -> str:
    """Evaluate a model on the scenes, unless the options name other data. Return the printed output."""
    said: list[str] = []
    arguments = ["--model_name_or_path", str(workplace / task), "--output_dir", str(output_dir), "--use_cpu"]
    arguments += ["--disable_tqdm", "true", *OF_TASK[task]]
    arguments += [] if "--dataset_name" in options else ["--dataset_name", str(workplace / "scenes")]
    evaluate([*arguments, *options], said.append)
    return "\n".join(said)


def written(folder: Path, what: str = "scores", split: str = "validation") -> dict:
    return json.loads((folder / f"{split}_{what}.json").read_text())


def as_numbers(scores: dict) -> dict[str, float]:
    return {name: np.nan if value is None else value for name, value in scores.items()}


@pytest.mark.parametrize("task", TASKS)
def test_evaluation_writes_what_the_training_did(task: str, workplace: Path, tmp_path: Path) -> None:
    said = score(workplace, task, tmp_path, "--per_device_eval_batch_size", "2")
    expected = written(workplace / task)
    assert as_numbers(written(tmp_path)) == pytest.approx(as_numbers(expected), rel=1e-5, nan_ok=True)
    assert said.startswith(f"5 validation images: loss {expected['loss']:.4f}")
    files = {"validation_scores.json", "validation_examples.png", PREDICTIONS, ".hf_vit_outputs"}
    assert (tmp_path / PREDICTIONS).read_text() == (workplace / task / PREDICTIONS).read_text()
    if task != "depth_estimation":
        files |= {"validation_classes.json", "validation_classes.png"}
        assert list(written(tmp_path, "classes")) == NAMES
    assert {path.name for path in tmp_path.iterdir()} == files


KEYS = {
    "semantic_segmentation": {"classes"},
    "universal_segmentation": {"segments"},
    "depth_estimation": {"unit", "min", "median", "max"},
}


@pytest.mark.parametrize("task", TASKS)
def test_written_predictions_are_those_of_predict(task: str, workplace: Path) -> None:
    lines = [json.loads(line) for line in (workplace / task / PREDICTIONS).read_text().splitlines()]
    images = sorted((workplace / "scenes" / "val" / "images").iterdir())
    assert [line["file"] for line in lines] == list(map(str, images))
    assert all({*line} == {"file"} | KEYS[task] for line in lines)
    for line, expected in zip(lines, hf_vit.predict(workplace / task, images), strict=True):
        if task == "semantic_segmentation":
            shares = {found["label"]: found["share"] for found in expected["classes"]}
            assert {found["label"]: found["share"] for found in line["classes"]} == pytest.approx(shares, abs=0.02)
        if task == "depth_estimation":
            assert {**line, "unit": ""} == pytest.approx({**expected, "unit": ""}, abs=0.01) or line == expected
        if task == "universal_segmentation":
            assert all({*found} == {"label", "score", "area"} for found in line["segments"])
            assert [found["label"] for found in line["segments"]] == [found["label"] for found in expected["segments"]]


def test_classes_are_known_by_their_names_whatever_their_order(workplace: Path, tmp_path: Path) -> None:
    shutil.copytree(workplace / "scenes", tmp_path / "scenes")
    (tmp_path / "scenes" / "classes.txt").write_text("\n".join(reversed(NAMES)))
    for file in (tmp_path / "scenes").glob("*/masks/*.png"):
        mask = np.asarray(Image.open(file))
        Image.fromarray(np.where(mask == 255, 255, 2 - mask).astype(np.uint8)).save(file)
    for task in ("semantic_segmentation", "universal_segmentation"):
        score(workplace, task, tmp_path / task, "--dataset_name", str(tmp_path / "scenes"))
        ours, expected = (written(folder, "classes") for folder in (tmp_path / task, workplace / task))
        assert list(ours) == NAMES
        for name in NAMES:
            assert as_numbers(ours[name]) == pytest.approx(as_numbers(expected[name]), rel=1e-5, nan_ok=True)


def test_options_of_the_task_count(workplace: Path, tmp_path: Path) -> None:
    score(workplace, "depth_estimation", tmp_path / "aligned", "--eval_alignment", "median")
    assert written(tmp_path / "aligned")["abs_rel"] < written(workplace / "depth_estimation")["abs_rel"]
    score(workplace, "semantic_segmentation", tmp_path / "flipped", "--eval_flip", "--split", "train")
    assert written(tmp_path / "flipped", split="train")["loss"] > 0


def test_mistakes_are_explained(workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for task, options, message in (
        ("depth_estimation", OF_ANOTHER_TASK, "no weights for depth_head"),
        ("depth_estimation", ["--task", "flow"], r"task='flow' is unknown\. Choose one of depth-estimation, "),
        ("depth_estimation", ["--eval_flip"], "Unknown option --eval_flip"),
        ("depth_estimation", ["--dry_run"], "dry_run applies only to training"),
        ("depth_estimation", ["--max_train_samples", "3"], "max_train_samples=3 applies only to training"),
        ("semantic_segmentation", ["--dataset_license", "mit"], "dataset_license='mit' applies only to training"),
        ("semantic_segmentation", ["--class_names", "floor,cat,cow"], "The model has no classes cow"),
        ("semantic_segmentation", ["--split", "test"], "has no split 'test'. Choose train or validation"),
        ("universal_segmentation", ["--dataset_name", "no/such/folder"], "There is no file or folder 'no/such/folder"),
        ("depth_estimation", ["--model_name_or_path", "no/such/folder"], "'no/such/folder' is not a model"),
    ):
        monkeypatch.chdir(workplace)
        with pytest.raises(SystemExit, match=message):
            score(workplace, task, tmp_path / "scores", *options)
        assert not (tmp_path / "scores").exists()
