"""The whole way of objects and keypoints: train by the script, look at what is left, resume, score, open elsewhere."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import load_file

from ..helpers.dense_trainings import OBJECT_TASKS, arguments_of, train
from ..helpers.fresh import run_script, run_without_package
from ..helpers.object_trainings import CLASSES, POINTS, write_figures, write_objects
from .test_demo import load_script


STEPS = ["--learning_rate", "3e-3", "--max_grad_norm", "1", "--photometric", "0"]
STEPS += ["--eval_strategy", "steps", "--save_strategy", "steps", "--max_steps", "120"]
STEPS += ["--eval_steps", "60", "--save_steps", "60", "--min_scale", "0.9", "--max_scale", "1.1"]
OF_TASK = {"object_detection": [], "keypoint_detection": ["--max_rotation", "0", "--per_device_train_batch_size", "8"]}
MAIN_SCORE = {"object_detection": "map_50", "keypoint_detection": "pck"}
PARTS = {"object_detection": ("classes", CLASSES), "keypoint_detection": ("keypoints", POINTS)}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drawn objects and figures, and a model of each task that has been trained on them by its script."""
    folder = tmp_path_factory.mktemp("workplace")
    write_objects(folder / "data" / "object_detection")
    write_figures(folder / "data" / "keypoint_detection")
    for task in OBJECT_TASKS:
        command = arguments_of(task, folder / "data" / task, folder / task, *STEPS, *OF_TASK[task])
        load_script(f"train_{task}").main(command)
    return folder


def read(folder: Path, what: str = "scores") -> dict:
    return json.loads((folder / f"validation_{what}.json").read_text())


def flat(scores: dict) -> dict[str, float]:
    """Scores, also those of each class, in one dictionary, NaN where there is none."""
    listed = ((name, value if isinstance(value, dict) else {"": value}) for name, value in scores.items())
    return {f"{name} {key}": np.nan if v is None else v for name, values in listed for key, v in values.items()}


@pytest.mark.parametrize("task", OBJECT_TASKS)
def test_a_training_beats_the_naive_baseline_and_its_card_says_so(task: str, workplace: Path) -> None:
    folder, name = workplace / task, MAIN_SCORE[task]
    text = (folder / "README.md").read_text()
    ours, baseline = re.search(rf"\| {name} \| \*\*(.*)\*\* \| (.*) \|", text).groups()
    assert float(ours) == pytest.approx(read(folder)[name], abs=1e-4)
    assert float(ours) > float(baseline)
    card = ModelCard.load(folder / "README.md")
    assert card.data.pipeline_tag == task.replace("_", "-")
    pictures = re.findall(r"!\[.*\]\((.*)\)", text)
    parts, names = PARTS[task]
    assert f"validation_{parts}.png" in pictures
    assert ("validation_precision_recall.png" in pictures) == (task == "object_detection")
    pictures += [f"pictures/step-000{step}.png" for step in ("060", "120")]
    assert all(Image.open(folder / picture).size[0] > 300 for picture in pictures)
    assert list(read(folder, parts)) == names


def test_the_threshold_of_the_answers_is_chosen_and_saved(workplace: Path) -> None:
    config = json.loads((workplace / "object_detection" / "config.json").read_text())
    chosen = config["detection_config"]["score_threshold"]
    assert 0 < chosen < 1
    line = rf"\| score threshold \| {chosen:g}, that of the best (cross-fitted )?F1 \("
    assert re.search(line, (workplace / "object_detection" / "README.md").read_text())


def test_a_model_knows_what_the_data_say_of_keypoints(workplace: Path) -> None:
    config = json.loads((workplace / "keypoint_detection" / "config.json").read_text())
    assert list(config["id2label"].values()) == POINTS
    assert config["keypoint_config"]["flip_pairs"] == [[1, 2]]
    assert config["keypoint_config"]["skeleton"] == [[0, 1], [0, 2]]
    assert json.loads((workplace / "keypoint_detection" / "preprocessor_config.json").read_text())["do_affine_crop"]


@pytest.mark.parametrize("task", OBJECT_TASKS)
def test_a_training_is_resumed_where_it_was(task: str, workplace: Path, tmp_path: Path) -> None:
    checkpoint = str(workplace / task / "checkpoint-60")
    options = [*STEPS, *OF_TASK[task], "--resume_from_checkpoint", checkpoint]
    train(task, workplace / "data" / task, tmp_path / "resumed", *options)
    expected = load_file(workplace / task / "model.safetensors")
    resumed = load_file(tmp_path / "resumed" / "model.safetensors")
    assert all(torch.equal(weight, resumed[name]) for name, weight in expected.items())


def assert_scores_are_those_of_the_training(folder: Path, task: str, workplace: Path) -> None:
    for what in ("scores", PARTS[task][0]):
        ours, expected = (flat(read(place, what)) for place in (folder, workplace / task))
        assert ours == pytest.approx(expected, rel=1e-5, nan_ok=True)


def scoring(task: str, workplace: Path, output_dir: Path, batch_size: int) -> list[str]:
    """A command line of the script that scores."""
    options = ["--use_cpu", "--disable_tqdm", "true", "--per_device_eval_batch_size", str(batch_size)]
    options += ["--model_name_or_path", str(workplace / task), "--dataset_name", str(workplace / "data" / task)]
    return [*options, "--output_dir", str(output_dir)]


@pytest.mark.parametrize("task", OBJECT_TASKS)
def test_evaluation_writes_what_the_training_did(
    task: str, workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load_script("evaluate_model").main(scoring(task, workplace, tmp_path, batch_size=1))
    count = {"object_detection": "5 validation images", "keypoint_detection": "7 validation objects"}[task]
    assert f"{count}: loss " in capsys.readouterr().out
    assert_scores_are_those_of_the_training(tmp_path, task, workplace)


@pytest.mark.parametrize("task", OBJECT_TASKS)
def test_two_processes_score_as_one(task: str, workplace: Path, tmp_path: Path) -> None:
    arguments = scoring(task, workplace, tmp_path, batch_size=2)
    finished = run_script("evaluate_model", workplace, *arguments, processes=2)
    assert finished.returncode == 0, finished.stderr
    assert_scores_are_those_of_the_training(tmp_path, task, workplace)


OPENED = """
import re
from pathlib import Path
from PIL import Image

for task in ("object_detection", "keypoint_detection"):
    Image.open(f"data/{task}/val/images/2.png").save("image.png")
    card = (Path(task) / "README.md").read_text()
    print(task)
    exec(re.findall("```python\\n(.*?)```", card, flags=re.DOTALL)[0].replace("path/to/this/folder", task))
print(*sorted({found["label"] for found in detect("data/object_detection/val/images/2.png")}))
(found,) = find_keypoints("data/keypoint_detection/val/images/0.png", boxes=[(1, 4, 21, 34)])
print(type(detect.model).__name__, type(find_keypoints.model).__name__, *found["labels"])
"""


def test_the_cards_code_runs_where_the_package_is_not(workplace: Path) -> None:
    printed = run_without_package(OPENED, workplace).stdout.splitlines()
    assert "brick leaf" in printed
    assert "HfViTForObjectDetection HfViTForKeypointDetection top left_foot right_foot" in printed


@pytest.mark.parametrize("task", OBJECT_TASKS)
def test_the_cards_code_runs_with_the_package(
    task: str, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.open(workplace / "data" / task / "val" / "images" / "2.png").save(tmp_path / "image.png")
    monkeypatch.chdir(tmp_path)
    own = re.findall("```python\n(.*?)```", (workplace / task / "README.md").read_text(), flags=re.DOTALL)[1]
    exec(own.replace("path/to/this/folder", str(workplace / task)), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("object_detection", ["--metric_for_best_model", "pck"], "There is no score 'pck'"),
        ("object_detection", ["--min_scale", "0"], "scale"),
        ("keypoint_detection", ["--normalize_by", "top,tail"], "unknown keypoint 'tail'"),
        ("keypoint_detection", ["--normalize_by", "top"], "must name two keypoints"),
        ("keypoint_detection", ["--flip_pairs", "top,tail"], "'top,tail', which is not a pair"),
    ],
)
def test_mistakes_are_explained(task: str, options: list[str], message: str, workplace: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=message):
        train(task, workplace / "data" / task, tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_a_saved_model_of_other_keypoints_learns_these(workplace: Path, tmp_path: Path) -> None:
    data = workplace / "data" / "keypoint_detection"
    content = json.loads((data / "train" / "annotations.json").read_text())
    assert content["categories"][0]["keypoints"] == POINTS
    (tmp_path / "data").mkdir()
    for split in ("train", "val"):
        renamed = json.loads((data / split / "annotations.json").read_text())
        renamed["categories"][0] |= {"keypoints": ["head", "a", "b"], "skeleton": []}
        (tmp_path / "data" / split).mkdir()
        (tmp_path / "data" / split / "images").symlink_to(data / split / "images")
        (tmp_path / "data" / split / "annotations.json").write_text(json.dumps(renamed))
    options = ["--model_name_or_path", str(workplace / "keypoint_detection"), "--max_steps", "2"]
    train("keypoint_detection", tmp_path / "data", tmp_path / "out", *options, "--eval_strategy", "no")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert list(config["id2label"].values()) == ["head", "a", "b"]
    assert config["keypoint_config"].get("flip_pairs", []) == config["keypoint_config"].get("skeleton", []) == []
