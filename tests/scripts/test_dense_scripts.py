"""The whole way of segmentation and depth: train by the script, look at what is left, resume, open elsewhere."""

import json
import re
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import load_file

from ..helpers.dense_trainings import NAMES, TASKS, arguments_of, train, write_scenes
from ..helpers.fresh import run_without_package
from .test_demo import load_script


STEPS = ["--learning_rate", "3e-3", "--eval_strategy", "steps", "--save_strategy", "steps"]
STEPS += ["--min_scale", "0.8", "--max_scale", "1.2", "--photometric", "0", "--max_class_share", "1"]
MAIN_SCORE = {"semantic_segmentation": "mean_iou", "universal_segmentation": "pq", "depth_estimation": "abs_rel"}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scenes, and a model of each task that has been trained on them by its script."""
    folder = tmp_path_factory.mktemp("workplace")
    write_scenes(folder / "scenes")
    for task in TASKS:
        options = ["--max_steps", "60", "--eval_steps", "30", "--save_steps", "30"]
        load_script(f"train_{task}").main(arguments_of(task, folder / "scenes", folder / task, *STEPS, *options))
    return folder


def read(file: Path) -> dict:
    return json.loads(file.read_text())


@pytest.mark.parametrize("task", TASKS)
def test_a_training_beats_the_naive_baseline_and_its_card_says_so(task: str, workplace: Path) -> None:
    folder, name = workplace / task, MAIN_SCORE[task]
    score = read(folder / "validation_scores.json")[name]
    text = (folder / "README.md").read_text()
    ours, baseline = re.search(rf"\| {name} \| \*\*(.*)\*\* \| (.*) \|", text).groups()
    assert float(ours) == pytest.approx(score, abs=1e-4)
    assert (float(ours) < float(baseline)) if task == "depth_estimation" else (float(ours) > float(baseline))
    card = ModelCard.load(folder / "README.md")
    pipeline = "depth-estimation" if task == "depth_estimation" else "image-segmentation"
    assert (card.data.pipeline_tag, card.data.eval_results[0].dataset_split) == (pipeline, "validation")
    pictures = re.findall(r"!\[.*\]\((.*)\)", text)
    assert len(pictures) == (2 if task == "depth_estimation" else 3)
    pictures += [f"pictures/step-0000{step}.png" for step in (30, 60)]
    assert all(Image.open(folder / picture).size[0] > 300 for picture in pictures)
    if task != "depth_estimation":
        assert list(read(folder / "validation_classes.json")) == NAMES


@pytest.mark.parametrize("task", TASKS)
def test_a_training_is_resumed_where_it_was(task: str, workplace: Path, tmp_path: Path) -> None:
    options = [*STEPS, "--max_steps", "60", "--eval_steps", "30", "--save_steps", "30"]
    checkpoint = str(workplace / task / "checkpoint-30")
    train(task, workplace / "scenes", tmp_path / "resumed", *options, "--resume_from_checkpoint", checkpoint)
    expected = load_file(workplace / task / "model.safetensors")
    resumed = load_file(tmp_path / "resumed" / "model.safetensors")
    assert all(torch.equal(weight, resumed[name]) for name, weight in expected.items())


OPENED = """
import re, sys
from pathlib import Path
from PIL import Image

for task in ("semantic_segmentation", "universal_segmentation", "depth_estimation"):
    card = (Path(task) / "README.md").read_text()
    print(task)
    exec(re.findall("```python\\n(.*?)```", card, flags=re.DOTALL)[0].replace("path/to/this/folder", task))
for task, subtasks in {"semantic": ["semantic"], "universal": ["semantic", "instance", "panoptic"]}.items():
    segment = pipeline("image-segmentation", model=f"{task}_segmentation", trust_remote_code=True)
    print(task, type(segment.model).__name__)
    for subtask in subtasks:
        parts = segment("image.png", subtask=subtask)
        assert all(set(part) == {"label", "score", "mask"} for part in parts)
        assert all(part["mask"].size == Image.open("image.png").size for part in parts)
        assert subtask == "instance" or "floor" in [part["label"] for part in parts]
depth = estimate("image.png")["predicted_depth"]
print("depth", tuple(depth.shape), depth.dtype, bool(((depth > 1) & (depth < 8)).all()))
"""


def test_the_cards_code_runs_where_the_package_is_not(workplace: Path) -> None:
    image = Image.open(workplace / "scenes" / "val" / "images" / "0.png")
    image.save(workplace / "image.png")
    printed = run_without_package(OPENED, workplace).stdout.splitlines()
    assert "semantic HfViTForSemanticSegmentation" in printed
    assert "universal HfViTForUniversalSegmentation" in printed  # and not one of the other task, with a fresh head
    assert f"depth {(image.height, image.width)} torch.float32 True" in printed


@pytest.mark.parametrize("task", TASKS)
def test_the_cards_code_runs_with_the_package(
    task: str, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.open(workplace / "scenes" / "val" / "images" / "0.png").save(tmp_path / "image.png")
    monkeypatch.chdir(tmp_path)
    own = re.findall("```python\n(.*?)```", (workplace / task / "README.md").read_text(), flags=re.DOTALL)[1]
    exec(own.replace("path/to/this/folder", str(workplace / task)), {})
    assert capsys.readouterr().out.strip()
