"""Test commands end to end: train, kill, resume, evaluate, predict, publish, and load without the package."""

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import load_file
from torch.distributed.elastic.utils.distributed import get_free_port

from hf_vit import __version__

from ..helpers import distributed
from ..helpers.fresh import run_command, run_without_package, start_python
from ..helpers.hub import TOKEN, Failure, serve
from ..helpers.processes import ROOT


COLORS = {"blue": (30, 40, 200), "green": (40, 180, 50), "red": (200, 40, 30)}
RECIPE = """
preset: tiny
config_overrides: {hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 32,
                   image_size: 16, patch_size: 8, hidden_dropout_prob: 0.1, drop_path_rate: 0.1}
per_device_train_batch_size: 8
num_train_epochs: 10
eval_strategy: steps
eval_steps: 40
save_strategy: steps
save_steps: 80
learning_rate: 5e-3
auto_augment: randaugment
dataset_license: cc0-1.0
license: mit
use_cpu: true
"""


def write_photos(folder: Path, count: int, seed: int) -> None:
    """Write noisy images of several sizes, in three classes that differ in color, as train/<class>/<image>."""
    generator = np.random.default_rng(seed)
    for name, color in COLORS.items():
        (folder / name).mkdir(parents=True)
        for index in range(count):
            size = (*generator.integers(16, 40, 2), 3)
            pixels = np.clip(np.array(color) + generator.normal(0, 40, size), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index}.png")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workplace")
    write_photos(folder / "photos" / "train", 36, seed=0)
    write_photos(folder / "photos" / "test", 5, seed=1)
    (folder / "recipe.yaml").write_text("dataset_name: photos\n" + RECIPE)
    return folder


def command(workplace: Path, name: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command and assert that it succeeds."""
    finished = run_command(name, workplace, *arguments, **options)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished


def train(workplace: Path, *arguments: str) -> None:
    command(workplace, "train image-classification", "recipe.yaml", *arguments)


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def train_on_two_nodes(workplace: Path, *arguments: str) -> None:
    """Train with two launchers that start one process each, to simulate two machines."""
    where = ["--nnodes", "2", "--nproc_per_node", "1", "--master_addr", "127.0.0.1"]
    where += ["--master_port", str(get_free_port()), "--node_rank"]
    words = ("-m", "hf_vit", "train", "image-classification", "recipe.yaml", *arguments)
    nodes = [distributed.launch(*where, str(rank), *words, folder=workplace, workdir=workplace) for rank in range(2)]
    for node in nodes:
        distributed.finish(node, workplace)


def kill_in_mid_training(workplace: Path, output_dir: str) -> None:
    """Start a training run and kill the process after the first checkpoint has been saved."""
    words = ("hf_vit", "train", "image-classification", "recipe.yaml", "--output_dir", output_dir)
    process = start_python("-m", *words, workdir=workplace)
    deadline = time.monotonic() + 120
    while not (workplace / output_dir / "checkpoint-80" / "trainer_state.json").exists():
        assert process.poll() is None, "The training ended before it could be killed."
        assert time.monotonic() < deadline, "The training wrote no checkpoint."
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


@pytest.fixture(scope="module")
def whole(workplace: Path) -> Path:
    train(workplace, "--output_dir", "whole")
    return workplace / "whole"


@pytest.fixture(scope="module")
def resumed(workplace: Path) -> Path:
    """Return the output folder of a training run that was killed and resumed."""
    kill_in_mid_training(workplace, "resumed")
    assert not (workplace / "resumed" / "model.safetensors").exists()
    train(workplace, "--output_dir", "resumed", "--resume_from_checkpoint", "last")
    return workplace / "resumed"


def scores(folder: Path) -> dict[str, float]:
    return json.loads((folder / "test_scores.json").read_text())


@pytest.mark.nightly  # `test_fault_injection.py` also kills training runs
def test_a_killed_training_ends_in_the_weights_of_an_undisturbed_one(whole: Path, resumed: Path) -> None:
    expected, actual = load_file(whole / "model.safetensors"), load_file(resumed / "model.safetensors")
    assert all(torch.equal(actual[name], weight) for name, weight in expected.items())
    assert scores(resumed) == scores(whole)
    # The training command in the model card starts a new run instead of resuming.
    assert "resume_from_checkpoint" not in (resumed / "README.md").read_text()


def test_training_learns_and_says_so_in_the_card(whole: Path) -> None:
    assert scores(whole)["accuracy"] > 0.8
    card = ModelCard.load(whole / "README.md")
    assert (card.data.license, card.data.pipeline_tag) == ("mit", "image-classification")
    assert {result.metric_type: result.metric_value for result in card.data.eval_results} == scores(whole)
    for part in (
        "the 15 test images",
        "after the last step",
        "photos: 97 for train, 11 for validation, 15 for test, in 3 classes (blue, green, red).",
        "License: cc0-1.0.",
        "hf-vit train image-classification --recipe recipe.yaml --output_dir whole",
        "horizontal_flip 0.5, auto_augment randaugment, randaugment_num_ops 2, randaugment_magnitude 9",
        "![Loss, validation scores and learning rate](curves.png)",
        "| accuracy | **" + f"{scores(whole)['accuracy']:.4f}" + "** | 0.3333 |",
    ):
        assert part in card.content
    for picture in ("curves.png", "test_confusion_matrix.png"):
        with Image.open(whole / picture) as image:
            assert len(image.convert("L").getcolors()) > 20
    assert any((whole / "runs").rglob("events.out.tfevents*"))


def test_evaluation_gives_the_scores_of_the_training(whole: Path, workplace: Path) -> None:
    words = ("whole", "photos", "--use_cpu", "--output_dir", "two", "--per_device_eval_batch_size", "2")
    command(workplace, "evaluate", *words, processes=2)
    assert scores(workplace / "two") == pytest.approx(scores(whole), abs=1e-6)
    assert (workplace / "two" / "test_confusion_matrix.png").exists()


def test_class_folders_without_splits_are_trained_on_evaluated_and_predicted(workplace: Path) -> None:
    write_photos(workplace / "unsplit", 8, seed=2)
    train(workplace, "--dataset_name", "unsplit", "--output_dir", "out", "--max_steps=5")
    command(workplace, "evaluate", "out", "unsplit")
    trained, scored = (
        lines_of((workplace / folder / "validation_predictions.jsonl").read_text())
        for folder in ("out", "outputs/evaluation/out-on-unsplit")
    )
    assert len(trained) == 3
    assert [line["file"] for line in scored] == [line["file"] for line in trained]
    assert [line["score"] for line in scored] == pytest.approx([line["score"] for line in trained], abs=1e-5)
    assert len(command(workplace, "predict", "out", "unsplit").stdout.splitlines()) == 24


def test_two_nodes_train_as_one_process_with_the_same_global_batch(workplace: Path) -> None:
    # The model has no dropout, because each process draws different random numbers.
    still = '{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}'
    # The optimizer is SGD, because Adam scales up rounding errors of zero gradients, such as those of key biases.
    options = ("--config_overrides", still, "--num_train_epochs", "2", "--optim", "sgd", "--learning_rate", "0.1")
    for nodes, start in ((1, train), (2, train_on_two_nodes)):
        arguments = ("--output_dir", f"by-{nodes}", "--logging_steps", "1", *options)
        start(workplace, *arguments, "--per_device_train_batch_size", str(8 // nodes))
    one, two = (load_file(workplace / f"by-{nodes}" / "model.safetensors") for nodes in (1, 2))
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-4, atol=1e-5)
    assert scores(workplace / "by-2") == pytest.approx(scores(workplace / "by-1"), abs=1e-4)
    states = [json.loads((workplace / f"by-{n}" / "trainer_state.json").read_text()) for n in (1, 2)]
    assert states[0]["max_steps"] == states[1]["max_steps"] == 24  # each of the two nodes processed half of the images
    losses = [[entry["loss"] for entry in state["log_history"] if "loss" in entry] for state in states]
    assert len(losses[0]) == 24
    assert losses[1] == pytest.approx(losses[0], abs=2e-4)  # logged losses are rounded to four digits
    assert "torchrun --nnodes 2 --nproc_per_node 1 -m hf_vit" in (workplace / "by-2" / "README.md").read_text()


def test_predictions_agree_with_the_evaluation(whole: Path, workplace: Path) -> None:
    finished = command(workplace, "predict", "whole", "photos/test", "--picture", "labeled.png")
    answers = {line["file"]: line for line in lines_of(finished.stdout)}
    lines = lines_of((whole / "test_predictions.jsonl").read_text())
    assert len(answers) == len(lines) == len({line["file"] for line in lines}) == 15
    for line in lines:
        file = Path(line["file"])
        answer = answers[str(file.relative_to(workplace))]
        assert file.parent.name == line["label"]
        assert answer["label"] == line["prediction"]
        assert answer["score"] == pytest.approx(line["score"], abs=1e-4)


OPEN = """
from transformers import pipeline
source, folder = sys.argv[1:]
classify = pipeline("image-classification", model=source, trust_remote_code=True)
for name in ("blue", "green", "red"):
    print(name, classify(f"{folder}/{name}/0.png", top_k=1)[0]["label"])
"""


@pytest.mark.nightly  # `test_hub.py` also publishes and loads models
def test_published_model_opens_without_the_package(resumed: Path, workplace: Path, tmp_path: Path) -> None:
    assert "Nothing was uploaded" in command(workplace, "push", "resumed", "user/colors", "--dry_run").stdout
    with serve(tmp_path / "hub") as hub:
        command(workplace, "push", "resumed", "user/colors", **hub.client)
        photos = str(workplace / "photos" / "test")
        opened = run_without_package(OPEN, tmp_path / "elsewhere", "user/colors", photos, **hub.client)
    card = hub.find("user/colors").files["README.md"].decode()
    assert 'model="user/colors"' in card
    assert "path/to/this/folder" not in card
    assert 'model="path/to/this/folder"' in (resumed / "README.md").read_text()
    answers = dict(line.split() for line in opened.stdout.splitlines())
    lines = lines_of((resumed / "test_predictions.jsonl").read_text())
    # For each label, the dictionary contains the prediction of the first image, because the order is reversed.
    assert answers == {line["label"]: line["prediction"] for line in reversed(lines)}


def test_training_itself_publishes_model_card_and_scores(workplace: Path, tmp_path: Path) -> None:
    options = ("--max_steps", "4", "--save_steps", "2", "--push_to_hub", "--hub_model_id", "user/published")
    arguments = ("recipe.yaml", "--output_dir", "published", *options, "--hub_token", TOKEN)
    with serve(tmp_path / "hub") as hub:
        hub.failures = [Failure("commit", None, b"step 2"), Failure("commit", 503, b"End of training")]
        finished = run_command("train image-classification", workplace, *arguments, **hub.client)
        assert finished.returncode == 1
        assert "An upload failed: " in finished.stderr
        again = finished.stderr.splitlines()[-1].partition("The model is saved in published. Upload it with: ")[2]
        assert again == "hf-vit push published user/published"
        assert hub.tags == {}
        command(workplace, "push", *again.split()[-2:], **hub.client)
        commits = [commit for commit in hub.commits if commit.repo == "user/published"]
    assert hub.failures == []
    assert hub.tags == {("user/published", f"v{__version__}"): commits[-1].oid}
    assert len(hub.uploads) == len(set(hub.uploads))
    files = commits[-1].files
    assert {"model.safetensors", "modeling_hf_vit.py", "curves.png", "test_scores.json"} <= files.keys()
    assert files["README.md"] == (workplace / "published" / "README.md").read_bytes().replace(f"{ROOT}/".encode(), b"")
    assert b'model="user/published"' in files["README.md"]
    assert not [name for commit in commits for name, content in commit.files.items() if TOKEN.encode() in content]
    assert not [name for commit in commits for name in commit.files if name.endswith((".bin", ".pt", ".pth"))]
