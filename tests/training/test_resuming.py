"""Test recipes and resuming: choice of a checkpoint, its training conditions, and protection of unrelated files."""

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import chdir
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import yaml
from safetensors.torch import load_file
from transformers import TrainingArguments

from hf_vit import outputs
from hf_vit.data.reading.keypoints import flip_pairs_of
from hf_vit.options.recipe import RECIPE_NAME, read_recipe, recipe_text, savable_values
from hf_vit.options.resolve import build, resolve
from hf_vit.outputs import free_folder, write_atomically
from hf_vit.runs.run import words_of
from hf_vit.tasks import TASKS, ImageClassification
from hf_vit.tasks.common.arguments import ClassificationArguments
from hf_vit.tasks.semantic_segmentation import SemanticArguments
from hf_vit.training import HfViTTrainingArguments, last_checkpoint, output_folder
from hf_vit.training.checkpoints import read_conditions, write_checksums
from hf_vit.training.output_folder import OUTPUT_FILES, is_named, lock_output_folder, output_files

from ..helpers.datasets import truncate, write_class_folders, write_pictures
from ..helpers.options import given_arguments, parse_arguments, run


MODEL = '{"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "patch_size": 8}'
SCRIPT = (
    *("--dataset_name", "photos", "--output_dir", "output", "--image_size", "16", "--config_overrides", MODEL),
    *("--per_device_train_batch_size", "4", "--use_cpu", "--report_to", "none", "--num_train_epochs", "2"),
    *("--choose_defaults", "false"),
)
LAST = ("--resume_from_checkpoint", "last")
MINE = {".git/HEAD": "ref", "log.txt": "lines", "runs/old/events": "events", "notes.md": "notes", ".env": "KEY"}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the Hub, on which missing datasets would be searched for."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `photos` (8 for training, 2 for validation) and with the `output` of 4 training steps.

    The files in `MINE` were in the output folder before training started.
    """
    folder = tmp_path_factory.mktemp("trained")
    for name, content in MINE.items():
        write(folder / "output" / name, content)
    write_pictures(folder / "photos", "validation/cat/0.png", "validation/dog/0.png", seed=100)
    write_class_folders(folder / "photos", ["cat", "dog"])
    with chdir(folder):
        train()
    return folder


def write(file: Path, content: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)


@pytest.fixture
def place(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the folder `trained`, which is also the working directory."""
    monkeypatch.chdir(shutil.copytree(trained, tmp_path / "place"))
    return Path.cwd()


@pytest.fixture
def begun(place: Path) -> Path:
    """Return the working directory, which contains the output of a training run that stopped after its first epoch."""
    shutil.rmtree("output/checkpoint-4")
    for file in output_files("output"):
        if file.name != "recipe.yaml":
            file.unlink()
    return place


def train(*options: str) -> None:
    run(ImageClassification, [*SCRIPT, *options], None, lambda line: None)


def refusal(*options: str) -> str:
    """Return the error message of a rejected training run. Assert that no output file has changed."""
    before = contents(Path("output"))
    with pytest.raises(SystemExit) as stopped:
        train(*options)
    assert contents(Path("output")) == before
    assert isinstance(stopped.value.code, str)
    assert "\n" not in stopped.value.code
    return stopped.value.code


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def weights(folder: str | Path = "output") -> dict[str, list[float]]:
    return {name: weight.flatten().tolist() for name, weight in load_file(Path(folder) / "model.safetensors").items()}


def test_training_writes_only_listed_files_and_keeps_unrelated_files(trained: Path) -> None:
    output = trained / "output"
    left = {file.name for file in output.iterdir() if file.is_file()} - MINE.keys()
    assert left == {file.name for file in output_files(output)}
    assert {"README.md", "config.json", "layers.py", "test_scores.json"} < left
    assert not [name for name in (".env", "id_rsa", "my_scores.json", "train.py") if is_named(name, OUTPUT_FILES)]
    # A new training run does not change unrelated files.
    assert {name: (output / name).read_text() for name in MINE} == MINE
    assert not (output / "training.lock").exists()


def exchange(photos: Path) -> None:
    first, second = photos / "train/cat/0.png", photos / "train/cat/1.png"
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


CHANGES = {
    "added": (lambda photos: write_pictures(photos, "train/cat/new.png"), "number of train: 8 then, 9 now"),
    "removed": (lambda photos: (photos / "train/cat/0.png").unlink(), "number of train: 8 then, 7 now"),
    "exchanged": (exchange, "contents of train: "),
    "of another size": (
        lambda photos: os.truncate(photos / "validation/cat/0.png", 9999),
        "names and sizes of validation: ",
    ),
    "of another class": (lambda photos: (photos / "train/cat/0.png").rename(photos / "train/dog/9.png"), "targets of"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_training_resumes_on_other_images_only_if_that_is_accepted(name: str, begun: Path) -> None:
    change, expected = CHANGES[name]
    change(begun / "photos")
    message = refusal(*LAST)
    # Moving an image to another class changes its file name, which includes the class folder.
    first = "names and sizes of train: " if name == "of another class" else expected
    assert f"The training run of output/checkpoint-2 was started with other conditions ({first}" in message
    assert expected in message
    assert "accept the changes with --resume_with_changes" in message


def test_accepted_changes_apply_and_are_recorded(begun: Path) -> None:
    exchange(begun / "photos")
    changes = ("--learning_rate", "1e-30", "--weight_decay", "0")
    train(*LAST, "--resume_with_changes", "true", *changes)
    assert weights() == weights("output/checkpoint-2")
    card = Path("output/README.md").read_text()
    assert "from step 2 on: learning_rate: 0.001 then, 1e-30 now; " in card
    (change,) = read_conditions("output/checkpoint-4")["changes"]
    assert "contents of train: " in change
    assert change in card
    assert "resume_with_changes" not in yaml.safe_load(Path("output/recipe.yaml").read_text())
    # Changes that were accepted once do not need to be accepted again.
    Path("output/model.safetensors").unlink()
    train(*LAST, *changes)
    assert change in Path("output/README.md").read_text()


def test_resuming_allows_moved_folders_and_irrelevant_changes(begun: Path, trained: Path) -> None:
    Path("photos").rename("elsewhere")
    Path("output").rename("moved")
    for file in Path("elsewhere").rglob("*.png"):
        os.utime(file, (1, 1))
    changed = ("--dataset_name", "elsewhere", "--output_dir", "moved", "--logging_steps", "1")
    train(*LAST, *changed, "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2")
    found = weights("moved")
    for name, values in weights(trained / "output").items():
        assert found[name] == pytest.approx(values, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--learning_rate", "0.01"], "learning_rate: 0.001 then, 0.01 now"),
        (["--num_train_epochs", "3"], "num_train_epochs: 2.0 then, 3.0 now"),
        (["--seed", "7"], "seed: 42 then, 7 now"),
        (["--per_device_train_batch_size", "2"], "images of a step: 4 then, 2 now"),
    ],
)
def test_other_arguments_are_refused_before_images_are_read(options: list[str], expected: str, begun: Path) -> None:
    shutil.rmtree("photos")
    assert f"other conditions ({expected})" in refusal(*LAST, *options)
    # The training conditions of a checkpoint in another output folder are checked, too.
    elsewhere = ("--output_dir", "new", "--resume_from_checkpoint", "output/checkpoint-2")
    assert f"other conditions ({expected})" in refusal(*elsewhere, *options)
    assert not Path("new").exists()


def test_another_optimizer_never_fits_and_missing_conditions_need_a_request(begun: Path) -> None:
    message = refusal(*LAST, "--resume_with_changes", "true", "--optim", "sgd")
    assert "does not support a change of optim" in message
    Path("output/checkpoint-2/conditions.json").unlink()
    write_checksums(Path("output/checkpoint-2"))
    assert "output/checkpoint-2 has no conditions.json" in refusal(*LAST, "--seed", "7")
    train(*LAST, "--seed", "7", "--resume_with_changes", "true")


@pytest.mark.thinned(2)
@pytest.mark.parametrize("content", [b"", bytes(100), b"seed: [1", b"\xff\xfe"])
def test_damaged_recipe_does_not_prevent_resuming(content: bytes, begun: Path, trained: Path) -> None:
    Path("output/recipe.yaml").write_bytes(content)
    train(*LAST)
    assert weights() == weights(trained / "output")
    assert yaml.safe_load(Path("output/recipe.yaml").read_text())["num_train_epochs"] == 2


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "recipe.yaml"
    write_atomically(file, "old")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_atomically(file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_free_folder_returns_a_missing_or_empty_folder(tmp_path: Path) -> None:
    wanted, second, third, fourth = (tmp_path / "outputs" / f"dinov2-small.v1{end}" for end in ("", "-2", "-3", "-4"))
    assert free_folder(wanted) == free_folder(str(wanted)) == wanted
    assert not wanted.parent.exists(), "looking for a folder made one"
    wanted.mkdir(parents=True)
    assert free_folder(wanted) == wanted
    (wanted / "config.json").touch()
    assert free_folder(wanted) == second
    second.touch()
    third.symlink_to("nowhere")
    assert free_folder(wanted) == fourth


FOREIGN = ["recipe.yaml", "README.md", "config.json", "model-00001-of-00002.safetensors", "layers.py"]
FOREIGN += ["model.safetensors.index.json", "model_old-00001-of-00002.bin", "training_args.bin", "test_scores.json"]
FOREIGN += ["ema/model.safetensors", "adapter/adapter_config.json"]


@pytest.mark.parametrize(("name", "options"), [*zip(FOREIGN, cycle([(), LAST]), strict=False)])
def test_files_of_others_are_not_written_over(name: str, options: tuple[str, ...], place: Path) -> None:
    shutil.rmtree("output")
    shutil.rmtree("photos")
    write(Path("output", name), "mine: yes\n")
    would = f"output contains {name}, which a training run would overwrite or delete. Move the files elsewhere"
    assert would in refusal(*options)
    if name == "recipe.yaml":
        assert "There is no file or folder 'photos'" in refusal(*LAST)


def test_last_in_a_folder_without_a_training_is_refused_and_leaves_no_folder_behind(place: Path) -> None:
    Path("empty").mkdir()
    for output in ("mistyped", "empty"):
        missing = f"{output} contains no training run to resume: no complete checkpoint and no recipe.yaml"
        assert missing in refusal(*LAST, "--output_dir", output)
    assert not any(Path("empty").iterdir())
    assert "nowhere" in refusal("--output_dir", "a/b/c", "--dataset_name", "nowhere")
    assert not Path("mistyped").exists()
    assert not Path("a").exists()


def test_files_added_by_the_user_are_not_overwritten(begun: Path) -> None:
    for file, content in (
        (Path("output/README.md"), "# Mine\n"),
        (Path("output/config.json"), '{"model_type": "vit"}'),
    ):
        file.write_text(content)
        assert f"output contains {file.name}, which" in refusal(*LAST)
        file.unlink()
    file.write_text('{"model_ty')  # simulates a run that was killed while it saved its model
    train(*LAST)


def test_a_finished_model_is_not_trained_again_and_takes_no_checkpoint_from_elsewhere(place: Path) -> None:
    shutil.copytree("output", "other")
    message = refusal("--resume_from_checkpoint", "other/checkpoint-2")
    assert "output already contains a training run. Resume it with --resume_from_checkpoint last" in message
    for checkpoint in Path("output").glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    for options in ((), LAST):
        assert "It is a trained model without a checkpoint to resume from. Move the files" in refusal(*options)


def test_a_training_that_runs_is_left_alone(begun: Path) -> None:
    shutil.rmtree("photos")
    lock, number = Path("output/training.lock"), os.getppid()
    holder = {"process": number, "started": psutil.Process(number).create_time()}
    lock.write_text(json.dumps({"host": socket.gethostname(), **holder}))
    assert f"A training run (process {number}) is using output" in refusal(*LAST)
    lock.write_text(json.dumps({"host": "another-host", **holder}))
    assert f"A training run (process {number} on another-host) is using output. Its lock" in refusal()
    lock.write_text("")
    assert "(process unknown on an unknown host)" in refusal(*LAST)


@pytest.mark.parametrize("process", ["ended", "other", "silent"])
def test_locks_of_crashes_are_ignored(process: str, tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    # In the case "other", the id of the ended process is in use by another process.
    number = os.getpid() if process == "other" else ended.pid
    lock, host = tmp_path / "training.lock", "another-host" if process == "silent" else socket.gethostname()
    lock.write_text(json.dumps({"host": host, "process": number, "started": 1.0}))
    if process == "silent":
        os.utime(lock, (0, time.time() - outputs.LOCK_TIMEOUT_SECONDS - 10))
    with lock_output_folder(TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)):
        assert json.loads(lock.read_text())["process"] == os.getpid()
    assert not lock.exists()


def test_lock_file_is_touched_during_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_folder, "TOUCH_SECONDS", 0.01)
    lock, end = tmp_path / "training.lock", time.monotonic() + 30
    with lock_output_folder(TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)):
        os.utime(lock, (0, 0))
        while outputs.file_age_seconds(lock) > outputs.LOCK_TIMEOUT_SECONDS and time.monotonic() < end:
            time.sleep(0.01)
        assert outputs.file_age_seconds(lock) < outputs.LOCK_TIMEOUT_SECONDS
    assert not lock.exists()


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    # The first byte is changed, because SHA256SUMS begins with a checksum.
    content[0 if file.name == "SHA256SUMS" else len(content) // 2] ^= 1
    file.write_bytes(content)


def cut_by_little(file: Path) -> None:
    # SHA256SUMS is cut in half, because a short cut would only remove the last file name.
    truncate(file, 0.5 if file.name == "SHA256SUMS" else 0.999)


def zero(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


@pytest.mark.parametrize("damage", [flip, zero, partial(truncate, share=0), cut_by_little, Path.unlink])
def test_a_checkpoint_with_any_damage_is_skipped_with_a_warning(
    damage: Callable[[Path], None], place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newest = Path("output/checkpoint-4")
    files = sorted(file for file in newest.rglob("*") if file.is_file())
    assert {"config.json", "optimizer.pt", "rng_state.pth", "SHA256SUMS"} < {file.name for file in files}
    assert last_checkpoint("output") == str(newest)
    for file in files:
        content = file.read_bytes()
        damage(file)
        caplog.clear()
        assert last_checkpoint("output") == "output/checkpoint-2", file
        (record,) = caplog.records
        assert f"Skipping the incomplete checkpoint {newest}: " in record.message
        assert file.name in record.message
        file.write_bytes(content)
    assert last_checkpoint("output") == str(newest)


def test_damaged_checkpoint_raises_if_named_and_is_skipped_otherwise(place: Path, trained: Path) -> None:
    flip(Path("output/checkpoint-4/model.safetensors"))
    message = refusal("--resume_from_checkpoint", "output/checkpoint-4")
    assert "the checksums in SHA256SUMS do not match model.safetensors" in message
    for file in output_files("output"):
        file.unlink()
    train(*LAST)
    assert weights() == weights(trained / "output")
    assert last_checkpoint("output") == "output/checkpoint-4"


COMMAND = ["--dataset_name", "photos", "--learning_rate", "5e-4", "--save_strategy", "no", "--bf16"]
COMMAND += ["--label_names", "labels", "others", "--config_overrides", '{"patch_size": 8}', "--hub_token=hf_secret"]
COMMAND += ["--seed", "1", "--hub_token", "hf_secret", "--resume_from_checkpoint", "last", "--seed", "2"]
TYPES = (ClassificationArguments, HfViTTrainingArguments)


def test_a_recipe_says_what_the_command_line_says_without_tokens(tmp_path: Path) -> None:
    recipe, file = given_arguments(TYPES, COMMAND), tmp_path / RECIPE_NAME
    assert recipe == {
        "dataset_name": "photos",
        "learning_rate": 5e-4,
        "save_strategy": "no",
        "bf16": True,
        "label_names": ["labels", "others"],
        "config_overrides": {"patch_size": 8},
        "seed": 2,
    }
    file.write_text(recipe_text(recipe))
    assert "hf_secret" not in file.read_text()
    for arguments, expected in (
        ([str(file)], recipe),
        ([str(file), "--seed", "3"], recipe | {"seed": 3}),
        (["--train-val-split", "0.2"], {"train_val_split": 0.2}),
    ):
        assert given_arguments(TYPES, arguments) == expected
    assert read_recipe(file)["dataset_name"] == "photos"
    values = {"hub_token": "hf_secret", "seed": 1, "resume_from_checkpoint": "last", "run_name": None}
    assert savable_values(values, TYPES) == {"seed": 1}


def test_lists_and_mappings_have_the_types_of_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("dataset_name: roads\neval_scales: [1, 0.5]\neval_flip: true\neval_window_size: 8")
    (options,) = parse_arguments((SemanticArguments,), [str(file)])
    command = ["--dataset_name", "roads", "--eval_scales", "1", "0.5", "--eval_flip", "--eval_window_size", "8"]
    assert (options,) == parse_arguments((SemanticArguments,), command)
    expected = {"dataset_name": "roads", "eval_scales": [2.0], "eval_flip": True, "eval_window_size": 8}
    assert given_arguments((SemanticArguments,), [str(file), "--eval_scales", "2"]) == expected


@pytest.mark.parametrize(
    ("task", "name", "value", "words"),
    [
        ("semantic-segmentation", "class_names", ["sky", "road"], ["sky,road"]),
        ("semantic-segmentation", "class_names", ("sky", "road"), ["sky,road"]),
        ("semantic-segmentation", "class_names", ["door, double", "[x]"], ['["door, double", "[x]"]']),
        ("universal-segmentation", "thing_classes", ["cat", "dog, small"], ['["cat", "dog, small"]']),
        ("keypoint-detection", "flip_pairs", [["left", "right"], (0, 1)], ["left,right", "0,1"]),
        ("image-classification", "freeze", ["model.embeddings", "model.norm"], ["model.embeddings,model.norm"]),
        ("image-classification", "report_to", ["tensorboard", "flyte"], ["tensorboard,flyte"]),
        ("image-classification", "optim_target_modules", ["query", "key"], ["query", "key"]),
        ("image-classification", "optim_target_modules", "all-linear", ["all-linear"]),
        ("semantic-segmentation", "eval_scales", [0.5, 1], ["0.5", "1.0"]),
    ],
)
def test_lists_from_python_are_those_of_the_command_line(task: str, name: str, value: Any, words: list[str]) -> None:
    types, places = TASKS[task].argument_types(), {"dataset_name": "data", "output_dir": "out"}
    given = [{**places, name: value}]
    by_mapping, line = parse_arguments(types, given), words_of(name, resolve(types, given[0])[name])
    assert line == [f"--{name}", *words]
    assert by_mapping == parse_arguments(types, [places, *line])
    recipe = given_arguments(types, given)
    assert parse_arguments(types, [yaml.safe_load(recipe_text(recipe))]) == by_mapping


def test_sources_are_a_list_or_comma_separated_and_class_names_a_list() -> None:
    def data_of(task: str, **options: Any) -> Any:
        return build(TASKS[task].argument_types(), {"dataset_name": "data", "output_dir": "out", **options})[0]

    places, names = ["photos", "more"], ["sky", "door, double", "[x]"]
    for given in (places, tuple(places), "photos,more"):
        assert data_of("masked-image-modeling", dataset_name=given).sources == places
    assert data_of("masked-image-modeling", dataset_name=["a, b"]).sources == ["a, b"]
    for task in ("semantic-segmentation", "object-detection", "universal-segmentation"):
        assert data_of(task, class_names=names).source_options()["class_names"] == names
    things = data_of("universal-segmentation", thing_classes=names).source_options()
    assert things["thing_names"] == names
    assert flip_pairs_of(["nose", "left, eye", "right, eye"], ['["left, eye", "right, eye"]']) == ((1, 2),)
