"""Resuming training runs: checkpoints, required conditions, and protection of existing files."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
import yaml
from safetensors.torch import load_file
from transformers import TrainingArguments

from hf_vit import outputs
from hf_vit.training import ImageClassification, last_checkpoint, output_folder
from hf_vit.training.checkpoints import read_conditions, seal, write_whole
from hf_vit.training.output_folder import OUTPUT_FILES, is_named, output_files

from ..helpers.datasets import write_class_folders, write_pictures
from ..helpers.options import run


MODEL = '{"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "patch_size": 8}'
SCRIPT = (
    *("--dataset_name", "photos", "--output_dir", "output", "--image_size", "16", "--config_overrides", MODEL),
    *("--per_device_train_batch_size", "4", "--use_cpu", "--report_to", "none", "--num_train_epochs", "2"),
    *("--choose_defaults", "false"),
)
LAST = ("--resume_from_checkpoint", "last")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing local data are not searched on the Hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `photos` (eight for training, two for validation) and the `output` of four steps."""
    folder = tmp_path_factory.mktemp("trained")
    write_pictures(folder / "photos", "validation/cat/0.png", "validation/dog/0.png", seed=100)
    write_class_folders(folder / "photos", ["cat", "dog"])
    before = Path.cwd()
    os.chdir(folder)
    try:
        run(ImageClassification, SCRIPT, None, lambda line: None)
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def place(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a copy of the `trained` folder."""
    shutil.copytree(trained, tmp_path / "place")
    monkeypatch.chdir(tmp_path / "place")
    return tmp_path / "place"


@pytest.fixture
def begun(place: Path) -> Path:
    """Return a copy of the `trained` folder whose training run stopped after its first epoch."""
    shutil.rmtree("output/checkpoint-4")
    for file in output_files("output"):
        if file.name != "recipe.yaml":
            file.unlink()
    return place


def train(*options: str, script: Sequence[str] = SCRIPT) -> None:
    run(ImageClassification, [*script, *options], None, lambda line: None)


def refusal(*options: str) -> str:
    """Return the error message of a refused training run, and check that no file has changed."""
    before = contents(Path("output"))
    with pytest.raises(SystemExit) as stopped:
        train(*options)
    assert contents(Path("output")) == before
    assert isinstance(stopped.value.code, str)
    assert "\n" not in stopped.value.code
    return stopped.value.code


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def weights(folder: str = "output") -> dict[str, list[float]]:
    return {name: weight.flatten().tolist() for name, weight in load_file(Path(folder) / "model.safetensors").items()}


def test_every_file_that_a_training_leaves_is_in_the_list(trained: Path) -> None:
    left = {file.name for file in (trained / "output").iterdir() if file.is_file()}
    assert left == {file.name for file in output_files(trained / "output")}
    assert {"README.md", "config.json", "layers.py", "test_scores.json"} < left
    assert not [name for name in (".env", "id_rsa", "my_scores.json", "train.py") if is_named(name, OUTPUT_FILES)]


# Data


def add(photos: Path) -> None:
    shutil.copy(photos / "train/cat/0.png", photos / "train/cat/new.png")


def remove(photos: Path) -> None:
    (photos / "train/cat/0.png").unlink()


def exchange(photos: Path) -> None:
    first, second = photos / "train/cat/0.png", photos / "train/cat/1.png"
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def spoil_a_pixel(photos: Path) -> None:
    file = photos / "validation/cat/0.png"
    size = file.stat().st_size
    shutil.copy(photos / "validation/dog/0.png", file)
    with file.open("ab") as stream:
        stream.write(bytes(size))


def relabel(photos: Path) -> None:
    (photos / "train/cat/0.png").rename(photos / "train/dog/9.png")


CHANGES = {
    "added": (add, "number of train: 8 then, 9 now"),
    "removed": (remove, "number of train: 8 then, 7 now"),
    "exchanged": (exchange, "contents of train: "),
    "of another size": (spoil_a_pixel, "names and sizes of validation: "),
    "of another class": (relabel, "targets of train: "),
}
FIRST = {"of another class": "names and sizes of train: "}  # the folder is part of the name


@pytest.mark.parametrize("name", CHANGES)
def test_a_training_resumes_on_other_images_only_if_that_is_accepted(name: str, begun: Path) -> None:
    change, expected = CHANGES[name]
    change(begun / "photos")
    message = refusal(*LAST)
    begins = "The training of output/checkpoint-2 was started with other conditions"
    assert f"{begins} ({FIRST.get(name, expected)}" in message
    assert expected in message
    assert "accept the changes with --resume_with_changes" in message


def test_accepted_changes_stand_in_the_card_and_in_checkpoints(begun: Path) -> None:
    exchange(begun / "photos")
    train(*LAST, "--resume_with_changes", "true", "--learning_rate", "0.5")
    card = Path("output/README.md").read_text()
    assert "from step 2 on: learning_rate: 0.001 then, 0.5 now; contents of train: " in card
    (change,) = read_conditions("output/checkpoint-4")["changes"]
    assert change in card
    assert "resume_with_changes" not in yaml.safe_load(Path("output/recipe.yaml").read_text())
    # Accepted conditions do not have to be accepted again.
    Path("output/model.safetensors").unlink()
    train(*LAST, "--learning_rate", "0.5")
    assert change in Path("output/README.md").read_text()


def test_data_and_folders_may_move_and_what_does_not_matter_may_change(begun: Path, trained: Path) -> None:
    Path("photos").rename("elsewhere")
    Path("output").rename("moved")
    for file in Path("elsewhere").rglob("*.png"):
        os.utime(file, (1, 1))
    changed = ("--dataset_name", "elsewhere", "--output_dir", "moved", "--logging_steps", "1")
    train(*LAST, *changed, "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2")
    found, expected = weights("moved"), weights(str(trained / "output"))
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--learning_rate", "0.01"), "learning_rate: 0.001 then, 0.01 now"),
        (("--num_train_epochs", "3"), "num_train_epochs: 2.0 then, 3.0 now"),
        (("--seed", "7"), "seed: 42 then, 7 now"),
        (("--per_device_train_batch_size", "2"), "images of a step: 4 then, 2 now"),
    ],
)
def test_other_arguments_are_refused_by_name_before_images_are_read(
    options: tuple[str, ...], expected: str, begun: Path
) -> None:
    shutil.rmtree("photos")
    assert f"other conditions ({expected})" in refusal(*LAST, *options)
    # This holds for any location of the checkpoint.
    elsewhere = ("--output_dir", "new", "--resume_from_checkpoint", "output/checkpoint-2")
    assert f"other conditions ({expected})" in refusal(*elsewhere, *options)
    assert not Path("new").exists()


def test_an_accepted_rate_is_the_one_that_trains(begun: Path) -> None:
    train(*LAST, "--resume_with_changes", "true", "--learning_rate", "0", "--weight_decay", "0")
    assert weights() == weights("output/checkpoint-2")


def test_no_state_of_an_optimizer_fits_another_one(begun: Path) -> None:
    message = refusal(*LAST, "--resume_with_changes", "true", "--optim", "sgd")
    assert "does not fit another optim" in message


def test_checkpoints_without_conditions_resume_on_request_only(begun: Path) -> None:
    Path("output/checkpoint-2/conditions.json").unlink()
    seal(Path("output/checkpoint-2"))
    assert "output/checkpoint-2 has no conditions.json" in refusal(*LAST, "--seed", "7")
    train(*LAST, "--seed", "7", "--resume_with_changes", "true")


@pytest.mark.parametrize("content", [b"", bytes(100), b"seed: [1", b"\xff\xfe"])
def test_a_damaged_recipe_blocks_nothing(content: bytes, begun: Path, trained: Path) -> None:
    Path("output/recipe.yaml").write_bytes(content)
    train(*LAST)
    assert weights() == weights(str(trained / "output"))
    assert yaml.safe_load(Path("output/recipe.yaml").read_text())["num_train_epochs"] == 2


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "recipe.yaml"
    write_whole(file, "old")

    def fail(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_whole(file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


# Folders


@pytest.mark.parametrize(
    "name",
    [
        *("README.md", "config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "layers.py"),
        *("model_old-00001-of-00002.bin", "training_args.bin", "ema/model.safetensors", "adapter/adapter_config.json"),
        *("test_scores.json", "recipe.yaml"),
    ],
)
@pytest.mark.parametrize("resumes", [False, True])
def test_files_of_others_are_not_written_over(name: str, resumes: bool, place: Path) -> None:
    shutil.rmtree("output")
    shutil.rmtree("photos")
    file = Path("output", name)
    file.parent.mkdir(parents=True)
    file.write_text("mine: yes\n")
    if resumes and name == "recipe.yaml":
        assert "There is no file or folder 'photos'" in refusal(*LAST)
        return
    message = refusal(*(LAST if resumes else ()))
    assert f"output holds {name}, which a training would write over or delete. Move it elsewhere, or choose" in message


def test_last_in_a_folder_without_a_training_is_refused(place: Path) -> None:
    for output in ("mistyped", "empty"):
        Path("empty").mkdir(exist_ok=True)
        message = refusal(*LAST, "--output_dir", output)
        assert f"{output} holds no training to resume: no complete checkpoint, and no recipe.yaml" in message
        assert not Path("mistyped").exists()
        assert not any(Path("empty").iterdir())


def test_what_a_user_has_put_beside_a_training_is_not_written_over(begun: Path) -> None:
    for name, content in (("README.md", "# Mine\n"), ("config.json", '{"model_type": "vit"}')):
        file = Path("output", name)
        file.write_text(content)
        assert f"output holds {name}, which" in refusal(*LAST)
        file.unlink()
    Path("output/config.json").write_text('{"model_ty')  # killed while saving its model
    train(*LAST)


def test_other_files_are_left_alone(place: Path) -> None:
    shutil.rmtree("output")
    mine = {".git/HEAD": "ref", "log.txt": "lines", "runs/old/events": "events", "notes.md": "notes", ".env": "KEY"}
    for name, content in mine.items():
        Path("output", name).parent.mkdir(parents=True, exist_ok=True)
        Path("output", name).write_text(content)
    train()
    assert {name: Path("output", name).read_text() for name in mine} == mine
    assert Path("output/README.md").is_file()
    assert not Path("output/training.lock").exists()


def test_a_finished_model_is_not_trained_again_from_scratch(place: Path) -> None:
    for checkpoint in Path("output").glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    for options in ((), LAST):
        assert "That is a trained model, without a checkpoint to resume from. Move it" in refusal(*options)


def test_a_checkpoint_from_elsewhere_does_not_continue_another_training(place: Path) -> None:
    shutil.copytree("output", "other")
    message = refusal("--resume_from_checkpoint", "other/checkpoint-2")
    assert "output already contains a training run. Resume it with --resume_from_checkpoint last" in message


def write_lock(**holder: object) -> None:
    Path("output/training.lock").write_text(json.dumps(holder))


def test_a_training_that_runs_is_left_alone(begun: Path) -> None:
    shutil.rmtree("photos")
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        started = psutil.Process(sleeper.pid).create_time()
        write_lock(host=socket.gethostname(), process=sleeper.pid, started=started)
        assert f"A training run (process {sleeper.pid}) is using output" in refusal(*LAST)
        write_lock(host="another-host", process=sleeper.pid, started=started)
        assert f"A training run (process {sleeper.pid} on another-host) is using output. Its lock" in refusal()
        Path("output/training.lock").write_text("")
        assert "(process unknown on an unknown host)" in refusal(*LAST)
    finally:
        sleeper.communicate()


@pytest.mark.parametrize("process", ["ended", "other", "silent"])
def test_what_a_crash_leaves_behind_is_recognized(process: str, begun: Path, trained: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    number = os.getpid() if process == "other" else ended.pid  # the process ID was reused
    write_lock(host="another-host" if process == "silent" else socket.gethostname(), process=number, started=1.0)
    if process == "silent":
        os.utime("output/training.lock", (0, time.time() - outputs.SILENT_SECONDS))
    train(*LAST)
    assert weights() == weights(str(trained / "output"))
    assert not Path("output/training.lock").exists()


def test_a_training_gives_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_folder, "TOUCH_SECONDS", 0.01)
    with output_folder.occupied(TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)):
        lock = tmp_path / "training.lock"
        os.utime(lock, (0, 0))
        end = time.monotonic() + 30
        while outputs.seconds_untouched(lock) > outputs.SILENT_SECONDS and time.monotonic() < end:
            time.sleep(0.01)
        assert outputs.seconds_untouched(lock) < outputs.SILENT_SECONDS
    assert not lock.exists()


def test_a_training_that_is_refused_leaves_no_folder_behind(place: Path) -> None:
    with pytest.raises(SystemExit):
        train("--output_dir", "a/b/c", "--dataset_name", "nowhere")
    assert not Path("a").exists()


# Checkpoints


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    place = 0 if file.name == "SHA256SUMS" else len(content) // 2  # change a digit of a checksum, not a name
    content[place] ^= 1
    file.write_bytes(content)


def zero(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


@pytest.mark.parametrize("damage", [flip, zero, Path.unlink])
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


def test_a_damaged_checkpoint_that_is_named_is_an_error(place: Path) -> None:
    flip(Path("output/checkpoint-4/model.safetensors"))
    message = refusal("--resume_from_checkpoint", "output/checkpoint-4")
    assert "SHA256SUMS has other checksums for model.safetensors" in message


def test_a_damaged_checkpoint_costs_its_steps_alone(place: Path, trained: Path) -> None:
    for file in output_files("output"):
        file.unlink()
    flip(Path("output/checkpoint-4/model.safetensors"))
    train(*LAST)
    assert weights() == weights(str(trained / "output"))
    assert last_checkpoint("output") == "output/checkpoint-4"
