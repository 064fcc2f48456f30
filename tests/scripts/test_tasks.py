"""Test dense and object tasks end to end: train, check, resume, evaluate, and load without the package."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import load_file

import hf_vit

from ..helpers.dense_trainings import (
    A_FEW_STEPS,
    NAMES,
    OBJECT_TASKS,
    OF_TASK,
    TASKS,
    arguments_of,
    train,
    write_scenes,
)
from ..helpers.fresh import run_without_package
from ..helpers.object_trainings import CLASSES, POINTS, write_figures, write_objects
from ..helpers.options import call_command, evaluate
from .test_predict import lines_of


STEPS = ["--learning_rate", "3e-3", "--photometric", "0", "--eval_strategy", "steps", "--save_strategy", "steps"]
DENSE = ["--max_steps", "60", "--eval_steps", "30", "--save_steps", "55", "--min_scale", "0.8", "--max_scale", "1.2"]
OBJECTS = ["--max_steps", "120", "--eval_steps", "60", "--save_steps", "110", "--max_grad_norm", "1"]
OBJECTS += ["--min_scale", "0.9", "--max_scale", "1.1"]
OPTIONS = {
    **{task: [*STEPS, *DENSE, "--max_class_share", "1"] for task in TASKS},
    "object_detection": [*STEPS, *OBJECTS],
    "keypoint_detection": [*STEPS, *OBJECTS, "--max_rotation", "0", "--per_device_train_batch_size", "8"],
}
# Maps each task to its main score and its class or keypoint names.
SCORES = {
    "semantic_segmentation": ("mean_iou", NAMES),
    "universal_segmentation": ("pq", NAMES),
    "depth_estimation": ("abs_rel", []),
    "object_detection": ("map_50", CLASSES),
    "keypoint_detection": ("pck", POINTS),
}
PREDICTIONS = "validation_predictions.jsonl"
KEYS = {"semantic_segmentation": ["classes"], "universal_segmentation": ["segments"]}
KEYS["depth_estimation"] = ["unit", "min", "median", "max"]
# Number of images in the picture of a model card, if it is not 3.
PICTURES = {"depth_estimation": 2, "object_detection": 4}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with images of each task and models trained on them."""
    folder = tmp_path_factory.mktemp("workplace")
    write_scenes(folder / "scenes")
    write_objects(folder / "data" / "object_detection")
    write_figures(folder / "data" / "keypoint_detection")
    for task, options in OPTIONS.items():
        call_command(f"train {task}", arguments_of(task, data_of(folder, task), folder / task, *options))
    return folder


def data_of(workplace: Path, task: str) -> Path:
    return workplace / "data" / task if task in OBJECT_TASKS else workplace / "scenes"


def read(folder: Path, what: str = "scores") -> dict[str, Any]:
    return json.loads((folder / f"validation_{what}.json").read_text())


def flat(scores: dict[str, Any]) -> dict[str, float]:
    """Return all scores, including those of each class, in a flat dictionary. Missing scores are NaN."""
    joined = ((name, value if isinstance(value, dict) else {"": value}) for name, value in scores.items())
    return {f"{name} {key}": np.nan if v is None else v for name, values in joined for key, v in values.items()}


@pytest.mark.parametrize("task", OPTIONS)
def test_a_training_beats_the_naive_baseline_and_its_card_says_so(
    task: str, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, (name, parts) = workplace / task, SCORES[task]
    text = (folder / "README.md").read_text()
    ours, baseline = re.search(rf"\| {name} \| \*\*(.*)\*\* \| (.*) \|", text).groups()
    assert float(ours) == pytest.approx(read(folder)[name], abs=1e-4)
    assert (float(ours) < float(baseline)) if name == "abs_rel" else (float(ours) > float(baseline))
    card = ModelCard.load(folder / "README.md")
    pipeline = "image-segmentation" if "segmentation" in task else task.replace("_", "-")
    assert (card.data.pipeline_tag, card.data.eval_results[0].dataset_split) == (pipeline, "validation")
    pictures = re.findall(r"!\[.*\]\((.*)\)", text)
    assert len(pictures) == PICTURES.get(task, 3)
    pictures += [f"pictures/step-{step:06}.png" for step in ((30, 60) if task in TASKS else (60, 120))]
    assert all(Image.open(folder / picture).size[0] > 300 for picture in pictures)
    if parts:
        assert list(read(folder, "keypoints" if parts is POINTS else "classes")) == parts
    # Run the code example of the model card that imports hf_vit.
    Image.open(data_of(workplace, task) / "val" / "images" / "2.png").save(tmp_path / "image.png")
    monkeypatch.chdir(tmp_path)
    exec(re.findall("```python\n(.*?)```", text, flags=re.DOTALL)[1].replace("path/to/this/folder", str(folder)), {})
    assert capsys.readouterr().out.strip()


def test_saved_config_contains_score_threshold_and_keypoint_metadata(workplace: Path) -> None:
    config = json.loads((workplace / "object_detection" / "config.json").read_text())
    chosen = config["detection_config"]["score_threshold"]
    assert 0 < chosen < 1
    line = rf"\| score threshold \| {chosen:g}, that of the best (cross-fitted )?F1 \("
    assert re.search(line, (workplace / "object_detection" / "README.md").read_text())
    config = json.loads((workplace / "keypoint_detection" / "config.json").read_text())
    assert list(config["id2label"].values()) == POINTS
    assert config["keypoint_config"]["flip_pairs"] == [[1, 2]]
    assert config["keypoint_config"]["skeleton"] == [[0, 1], [0, 2]]
    assert json.loads((workplace / "keypoint_detection" / "preprocessor_config.json").read_text())["do_affine_crop"]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("task", OPTIONS)
def test_a_training_is_resumed_where_it_was(task: str, workplace: Path, tmp_path: Path) -> None:
    checkpoint = str(workplace / task / f"checkpoint-{55 if task in TASKS else 110}")
    train(task, data_of(workplace, task), tmp_path, *OPTIONS[task], "--resume_from_checkpoint", checkpoint)
    expected = load_file(workplace / task / "model.safetensors")
    resumed = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(weight, resumed[name]) for name, weight in expected.items())


def evaluate_task(workplace: Path, task: str, output_dir: Path, *options: str) -> str:
    """Evaluate a model and return the printed output. `data` defaults to the data of the task."""
    said: list[str] = []
    arguments = ["--model_name_or_path", str(workplace / task), "--output_dir", str(output_dir), "--use_cpu"]
    arguments += ["--disable_tqdm", "true", *(OF_TASK[task] if task in TASKS else [])]
    arguments += [] if "--dataset_name" in options else ["--dataset_name", str(data_of(workplace, task))]
    evaluate([*arguments, *options], said.append)
    return "\n".join(said)


@pytest.mark.parametrize("task", OPTIONS)
def test_evaluation_writes_what_the_training_did(task: str, workplace: Path, tmp_path: Path) -> None:
    folder, count = workplace / task, "7 validation objects" if task == "keypoint_detection" else "5 validation images"
    said = evaluate_task(workplace, task, tmp_path, "--per_device_eval_batch_size", "2" if task in TASKS else "1")
    assert f"{count}: loss {read(folder)['loss']:.4f}" in said
    kinds = {"depth_estimation": [], "keypoint_detection": ["keypoints"]}
    for what in ("scores", *kinds.get(task, ["classes"])):
        assert flat(read(tmp_path, what)) == pytest.approx(flat(read(folder, what)), rel=1e-5, nan_ok=True)
    if task in TASKS:
        assert (tmp_path / PREDICTIONS).read_text() == (folder / PREDICTIONS).read_text()
        files = {"validation_scores.json", "validation_examples.png", PREDICTIONS, ".hf_vit_outputs"}
        files |= set() if task == "depth_estimation" else {"validation_classes.json", "validation_classes.png"}
        assert {path.name for path in tmp_path.iterdir()} == files


def test_evaluation_has_the_scores_of_averaged_weights(workplace: Path, tmp_path: Path) -> None:
    train("semantic_segmentation", workplace / "scenes", tmp_path / "model", *A_FEW_STEPS, "--ema_decay", "0.5")
    evaluate_task(workplace, "semantic_segmentation", tmp_path, "--model_name_or_path", str(tmp_path / "model"))
    assert flat(read(tmp_path)) == pytest.approx(flat(read(tmp_path / "model")), rel=1e-5, nan_ok=True)


@pytest.mark.parametrize("task", TASKS)
def test_written_predictions_are_those_of_predict(task: str, workplace: Path) -> None:
    lines = lines_of((workplace / task / PREDICTIONS).read_text())
    images = sorted((workplace / "scenes" / "val" / "images").iterdir())
    assert [line["file"] for line in lines] == list(map(str, images))
    assert all({*line} == {"file", *KEYS[task]} for line in lines)
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
    scenes = shutil.copytree(workplace / "scenes", tmp_path / "scenes")
    (scenes / "classes.txt").write_text("\n".join(reversed(NAMES)))
    for file in scenes.glob("*/masks/*.png"):
        mask = np.asarray(Image.open(file))
        Image.fromarray(np.where(mask == 255, 255, 2 - mask).astype(np.uint8)).save(file)
    for task in ("semantic_segmentation", "universal_segmentation"):
        evaluate_task(workplace, task, tmp_path / task, "--dataset_name", str(scenes))
        ours, expected = (read(folder, "classes") for folder in (tmp_path / task, workplace / task))
        assert list(ours) == NAMES
        assert flat(ours) == pytest.approx(flat(expected), rel=1e-5, nan_ok=True)


def test_evaluations_have_options_of_their_task(workplace: Path, tmp_path: Path) -> None:
    evaluate_task(workplace, "depth_estimation", tmp_path / "aligned", "--eval_alignment", "median")
    assert read(tmp_path / "aligned")["abs_rel"] < read(workplace / "depth_estimation")["abs_rel"]
    evaluate_task(workplace, "semantic_segmentation", tmp_path / "flipped", "--eval_flip", "--split", "train")
    assert json.loads((tmp_path / "flipped" / "train_scores.json").read_text())["loss"] > 0


def test_mistakes_of_evaluations_are_explained(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workplace)
    of_another_task = ["--model_name_or_path", "semantic_segmentation", "--task", "depth_estimation"]
    for task, options, message in (
        ("depth_estimation", of_another_task, "no weights for depth_head"),
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
        with pytest.raises(SystemExit, match=message):
            evaluate_task(workplace, task, tmp_path / "scores", *options)
        assert not (tmp_path / "scores").exists()


def test_objects_and_keypoints_are_written(workplace: Path, tmp_path: Path) -> None:
    data, folder = data_of(workplace, "object_detection"), tmp_path / "detector"
    train("object_detection", data, folder, *A_FEW_STEPS)
    lines = lines_of((folder / PREDICTIONS).read_text())
    images = sorted((data / "val" / "images").iterdir())
    assert [line["file"] for line in lines] == list(map(str, images))
    for line, expected in zip(lines, hf_vit.predict(folder, images, threshold=0.5), strict=True):
        assert [found["label"] for found in line["objects"]] == [found["label"] for found in expected["objects"]]
        for found, other in zip(line["objects"], expected["objects"], strict=True):
            assert found["label"] in CLASSES
            assert found["box"] == pytest.approx(other["box"], abs=0.5)
    lines = lines_of((workplace / "keypoint_detection" / PREDICTIONS).read_text())
    annotations = json.loads((data_of(workplace, "keypoint_detection") / "val" / "annotations.json").read_text())
    assert len(lines) == len(annotations["annotations"])  # the file has one line per object
    for line in lines:
        assert {*line} == {"file", "box", "labels", "keypoints", "scores"}
        assert line["labels"] == POINTS
        assert [len(values) for values in (line["keypoints"], line["scores"], line["box"])] == [3, 3, 4]


OPENED = """
import re
from pathlib import Path
from PIL import Image

def open_model(task, image):
    image.save("image.png")
    card = (Path(task) / "README.md").read_text()
    print(task)
    exec(re.findall("```python\\n(.*?)```", card, flags=re.DOTALL)[0].replace("path/to/this/folder", task), globals())

scene = Image.open("scenes/val/images/0.png")
for task in ("semantic_segmentation", "universal_segmentation", "depth_estimation"):
    open_model(task, scene)
for task, subtasks in {"semantic": ["semantic"], "universal": ["semantic", "instance", "panoptic"]}.items():
    segment = pipeline("image-segmentation", model=f"{task}_segmentation", trust_remote_code=True)
    print(task, type(segment.model).__name__)
    for subtask in subtasks:
        parts = segment("image.png", subtask=subtask)
        assert all(set(part) == {"label", "score", "mask"} for part in parts)
        assert all(part["mask"].size == scene.size for part in parts)
        assert subtask == "instance" or "floor" in [part["label"] for part in parts]
depth = estimate("image.png")["predicted_depth"]
print("depth", tuple(depth.shape), depth.dtype, bool(((depth > 1) & (depth < 8)).all()))
for task in ("object_detection", "keypoint_detection"):
    open_model(task, Image.open(f"data/{task}/val/images/2.png"))
print(*sorted({found["label"] for found in detect("data/object_detection/val/images/2.png")}))
(found,) = find_keypoints("data/keypoint_detection/val/images/0.png", boxes=[(1, 4, 21, 34)])
print(type(detect.model).__name__, type(find_keypoints.model).__name__, *found["labels"])
"""


def test_the_cards_code_runs_where_the_package_is_not(workplace: Path) -> None:
    width, height = Image.open(workplace / "scenes" / "val" / "images" / "0.png").size
    printed = run_without_package(OPENED, workplace).stdout.splitlines()
    assert "semantic HfViTForSemanticSegmentation" in printed
    # The pipeline must not load the model as semantic segmentation, because that head is untrained.
    assert "universal HfViTForUniversalSegmentation" in printed
    assert f"depth {(height, width)} torch.float32 True" in printed
    assert "brick leaf" in printed
    assert "HfViTForObjectDetection HfViTForKeypointDetection top left_foot right_foot" in printed


def test_mistakes_of_trainings_are_explained(workplace: Path, tmp_path: Path) -> None:
    for task, options, message in (
        ("object_detection", ["--metric_for_best_model", "pck"], "metric_for_best_model='pck' is not a score"),
        ("object_detection", ["--min_scale", "0"], "scale"),
        ("keypoint_detection", ["--normalize_by", "top,tail"], "unknown keypoint 'tail'"),
        ("keypoint_detection", ["--normalize_by", "top"], "must name two keypoints"),
        ("keypoint_detection", ["--flip_pairs", "top,tail"], "'top,tail', which is not a pair"),
    ):
        with pytest.raises(SystemExit, match=message):
            train(task, data_of(workplace, task), tmp_path / "out", *options)
        assert not (tmp_path / "out").exists()


def test_a_saved_model_of_other_keypoints_learns_these(workplace: Path, tmp_path: Path) -> None:
    data = data_of(workplace, "keypoint_detection")
    for split in ("train", "val"):
        renamed = json.loads((data / split / "annotations.json").read_text())
        renamed["categories"][0] |= {"keypoints": ["head", "a", "b"], "skeleton": []}
        (tmp_path / "data" / split).mkdir(parents=True)
        (tmp_path / "data" / split / "images").symlink_to(data / split / "images")
        (tmp_path / "data" / split / "annotations.json").write_text(json.dumps(renamed))
    options = ["--model_name_or_path", str(workplace / "keypoint_detection"), "--max_steps", "2"]
    train("keypoint_detection", tmp_path / "data", tmp_path / "out", *options, "--eval_strategy", "no")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert list(config["id2label"].values()) == ["head", "a", "b"]
    assert config["keypoint_config"].get("flip_pairs", []) == config["keypoint_config"].get("skeleton", []) == []
