"""Distillation runs with the command and with the Trainer: training, logging, saving, resuming."""

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import SwinModel

from hf_vit import HfViTForImageClassification, HfViTImageProcessor
from hf_vit.training import ImageClassification
from hf_vit.training.arguments import TaskArguments
from hf_vit.training.distillation import PROJECTION_NAME, check_distillation
from hf_vit.training.tasks.image_classification import load_classifier

from ..helpers.datasets import write_class_folders
from ..helpers.dense_trainings import A_FEW_STEPS, ALL_TASKS, TASKS, make_trainer, run_task, write_scenes
from ..helpers.distributed import finish, start
from ..helpers.models import small_config
from ..helpers.object_trainings import write_figures, write_objects
from ..helpers.options import call_command, run
from ..helpers.references import assert_close, assert_identical
from ..helpers.teachers import DISTILLED_CASES, TEACHER_LOSSES, save_teacher
from ..helpers.trainings import build, splits, train_case, training_arguments


NAMES = ["cat", "dog", "fox"]
TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "patch_size": 8}
SCRIPT = ["--dataset_name", "photos", "--use_cpu", "--train_val_split", "0.5", "--report_to", "none", "--disable_tqdm"]
SCRIPT += ["true", "--choose_defaults", "false", "--per_device_train_batch_size", "2", "--logging_steps", "1"]
SCRIPT = ["--dataset_name", "photos", "--use_cpu", "--train_val_split", "0.5", "--report_to", "none", "--disable_tqdm"]
SCRIPT += ["true", "--choose_defaults", "false", "--per_device_train_batch_size", "2", "--logging_steps", "1"]
SCRIPT = ["--dataset_name", "photos", "--use_cpu", "--train_val_split", "0.5", "--report_to", "none", "--disable_tqdm"]
SCRIPT += ["true", "--choose_defaults", "false", "--per_device_train_batch_size", "2", "--logging_steps", "1"]
NEW = ["--image_size", "16", "--config_overrides", json.dumps(TINY)]
WIDE = [*NEW, "--config_overrides", json.dumps({**TINY, "hidden_size": 32, "hidden_dropout_prob": 0.1})]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a new working directory with photos."""
    write_class_folders(tmp_path / "photos", NAMES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(output: str, *arguments: str) -> list[dict[str, float]]:
    """Train a classifier as the training command does; return the log."""
    run(ImageClassification, [*SCRIPT, "--output_dir", output, *arguments], None, report=lambda _: None)
    return log_of(Path(output))


def log_of(folder: Path) -> list[dict[str, float]]:
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


@pytest.mark.parametrize(
    ("kind", "options", "described"),
    [
        ("ours", "", "token, hard, alpha 0.5"),
        (
            "vit",
            "--distillation_type soft --distillation_temperature 2 --distillation_alpha 0.25",
            "token, soft, temperature 2, alpha 0.25",
        ),
        ("resnet", "--teacher_dtype bfloat16", "token, hard, alpha 0.5"),
    ],
)
def test_a_classifier_learns_from_any_teacher(kind: str, options: str, described: str, place: Path) -> None:
    save_teacher(kind, place / "tutor", ["fox", "cat", "dog"])
    before = load_file("tutor/model.safetensors")
    logs = train("output", *NEW, "--teacher", "tutor", *options.split(), "--max_steps", "2")
    loss = "soft_loss" if "soft" in options else "hard_loss"
    assert [entry[loss] > 0 for entry in logs if "loss" in entry] == [True, True]
    assert any("eval_accuracy" in entry for entry in logs)
    model = HfViTForImageClassification.from_pretrained("output")
    assert model.distillation_classifier.bias.any()  # the bias was initialized to zeros, so training has changed it
    assert_identical(load_file("tutor/model.safetensors"), before)
    card = Path("output/README.md").read_text()
    assert f"| distillation | {described} |" in card
    assert "| teacher | tutor (" in card


def test_a_teacher_of_features_leaves_no_trace_in_the_saved_model_and_a_training_resumes(place: Path) -> None:
    save_teacher("resnet", place / "tutor", ["cow", "pig"])
    teacher = ["--teacher", "tutor", "--distillation_type", "features"]
    options = [*WIDE, "--max_steps", "4", "--save_strategy", "steps", "--save_steps", "2"]
    logs = train("output", *options, *teacher)
    assert [entry["patch_feature_loss"] > 0 for entry in logs if "loss" in entry] == [True] * 4
    train("alone", *options)
    for folder in ("", "checkpoint-4"):
        taught, alone = (load_file(Path(output, folder, "model.safetensors")) for output in ("output", "alone"))
        assert {name: taught[name].shape for name in taught} == {name: alone[name].shape for name in alone}
    assert not Path("output", PROJECTION_NAME).exists()
    first, second = (load_file(f"output/checkpoint-{step}/{PROJECTION_NAME}") for step in (2, 4))
    assert (first["weight"].shape, second["bias"].shape) == ((16, 32), (16,))
    assert not torch.equal(first["weight"], second["weight"])
    assert "| distillation | features through a linear layer, alpha 0.5 |" in Path("output/README.md").read_text()
    count = f"{sum(weight.numel() for weight in taught.values()):,} parameters"
    assert all(count in Path(output, "README.md").read_text() for output in ("output", "alone"))
    # A training with a teacher is resumed bit for bit.
    shutil.copytree("output/checkpoint-2", "again/checkpoint-2")
    resumed = train("again", *options, *teacher, "--resume_from_checkpoint", "last")
    for name in ("model.safetensors", f"checkpoint-4/{PROJECTION_NAME}"):
        assert_identical(load_file(Path("again", name)), load_file(Path("output", name)))
    for name in ("loss", "patch_feature_loss"):
        assert [entry.get(name) for entry in resumed] == [entry.get(name) for entry in logs]


@pytest.mark.parametrize(
    ("begun", "resumed", "needed", "saved"),
    [
        ([], ["--teacher", "tutor"], "{'weight': [16, 32], 'bias': [16]}", "none"),
        (["--teacher", "tutor"], [], "none", "{'bias': [16], 'weight': [16, 32]}"),
    ],
)
def test_a_checkpoint_of_a_training_with_another_teacher_is_not_taken_up(
    begun: list[str], resumed: list[str], needed: str, saved: str, place: Path
) -> None:
    save_teacher("vit", place / "tutor", NAMES)
    features = ["--distillation_type", "features"]
    options = [*WIDE, "--save_strategy", "steps", "--save_steps", "1", "--eval_strategy", "no"]
    train("begun", *begun, *features[: len(begun)], *options, "--max_steps", "1")
    options += [*resumed, *features[: len(resumed)], "--max_steps", "2"]
    options += ["--resume_from_checkpoint", "begun/checkpoint-1"]
    with pytest.raises(SystemExit, match="distillation_type: "):
        train("output", *options)
    message = f"begun/checkpoint-1 do not match. Required: {needed}; saved: {saved}. Resume"
    with pytest.raises(SystemExit, match=re.escape(message)):
        train("output", *options, "--resume_with_changes", "true")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the data folder of each task."""
    folder = tmp_path_factory.mktemp("data")
    objects = {"object_detection": write_objects(folder / "objects")}
    objects["keypoint_detection"] = write_figures(folder / "figures")
    return {**dict.fromkeys(TASKS, write_scenes(folder / "scenes")), **objects}


@pytest.mark.parametrize("task", ALL_TASKS)
def test_every_task_learns_from_features(task: str, data: dict[str, Path], tmp_path: Path) -> None:
    teacher, output = save_teacher("vit", tmp_path / "tutor", NAMES), tmp_path / "output"
    run_task(task, data[task], output, *A_FEW_STEPS, "--teacher", str(teacher), "--logging_steps", "1")
    entries = [entry for entry in log_of(output) if "loss" in entry]
    assert len(entries) == 3
    assert all(0 < entry[f"{part}_feature_loss"] < 2 for entry in entries for part in ("patch", "cls"))
    assert "| teacher | tutor (HfViTModel, " in (output / "README.md").read_text()
    assert not any("distillation" in name for name in load_file(output / "model.safetensors"))


def test_features_are_learned(data: dict[str, Path], tmp_path: Path) -> None:
    teacher = save_teacher("vit", tmp_path / "tutor", NAMES)
    options = ["--max_steps", "40", "--learning_rate", "3e-3", "--logging_steps", "10", "--eval_strategy", "no"]
    options += ["--teacher", str(teacher), "--distillation_alpha", "0.9", "--save_strategy", "no"]
    run_task("keypoint_detection", data["keypoint_detection"], tmp_path / "output", *options)
    losses = [entry["patch_feature_loss"] for entry in log_of(tmp_path / "output") if "loss" in entry]
    assert losses[-1] < 0.7 * losses[0]


def test_a_saved_model_without_a_token_gets_a_fresh_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = build(HfViTForImageClassification, small_config(id2label=dict(enumerate(NAMES)), num_labels=3))
    saved.save_pretrained(tmp_path)
    HfViTImageProcessor.for_model(saved.config).save_pretrained(tmp_path)
    arguments = TaskArguments(dataset_name="data", model_name_or_path=str(tmp_path))
    monkeypatch.setattr(logging.getLogger("hf_vit"), "propagate", True)
    with caplog.at_level(logging.WARNING, "hf_vit"):
        model, _ = load_classifier(arguments, NAMES, use_distillation_token=True)
    assert "A new token and a new head for it are added." in caplog.text
    old, new = saved.state_dict(), model.state_dict()
    table, head = "model.embeddings.position_embeddings", "distillation_classifier"
    assert new.keys() - old.keys() == {"model.embeddings.distillation_token", f"{head}.weight", f"{head}.bias"}
    assert all(torch.equal(new[name], weight) for name, weight in old.items() if name != table)
    assert torch.equal(new[table][:, [0, *range(2, 18)]], old[table])
    assert new[table][:, 1].any()
    model.save_pretrained(tmp_path)
    again, _ = load_classifier(arguments, NAMES, use_distillation_token=True)
    assert_identical(again.state_dict(), new)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, dict[str, Any]]]:
    """Return the results of two processes."""
    folder = tmp_path_factory.mktemp("two_processes")
    finish(start("compare_distillation", folder, processes=2), folder)
    return [torch.load(folder / f"process_{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize(("name", "kind"), DISTILLED_CASES)
def test_gradients_are_those_of_one_batch(
    name: str, kind: str, two_processes: list[dict[Any, dict[str, Any]]], tmp_path: Path
) -> None:
    at_once, *others = (train_case(tmp_path, name, "float64", *split, kind=kind) for split in splits(name, 1))
    plain = train_case(tmp_path, name, "float64", *splits(name, 1)[0])
    assert (at_once["losses"] - plain["losses"]).abs().min() > 1e-3
    others += [process[name, kind, split] for process in two_processes for split in splits(name, 2)]
    assert len(others) == 3
    for result in others:
        for key in ("losses", "gradients", "weights"):
            assert_close(result[key], at_once[key], 1e-9, key)
        for part in TEACHER_LOSSES:
            assert result["parts"][part] == pytest.approx(at_once["parts"][part], rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--distillation_type soft", "--distillation_type requires a teacher. Set --teacher to a path"),
        ("--teacher_dtype float16", "--teacher_dtype requires a teacher"),
        ("--teacher tutor --distillation_alpha 1.5", "distillation_alpha=1.5 must lie in (0, 1]"),
        ("--teacher tutor --distillation_temperature 2", "requires --distillation_type soft"),
        (
            "--teacher tutor --distillation_type soft --distillation_temperature -1",
            "distillation_temperature=-1.0 must be more than 0",
        ),
        ("--teacher nowhere", "'nowhere' is not a model"),
        (
            "--teacher strangers",
            "differ from the classes of the data. Only in the teacher: cow, pig; only in the data: cat, dog, fox. "
            "Its features can still be distilled: set --distillation_type features",
        ),
        ("--teacher headless", "was not trained as a classifier. Its features can still be distilled"),
        ("--teacher headless_swin", "was not trained as a classifier. Its features can still be distilled"),
        ("--teacher blind", "has no image processor, which defines its preprocessing"),
        ("--teacher foreign", "has custom code and can be loaded only by running it. Read the code and, if"),
        ("--teacher gray", "expects images with 1 channels, but the student expects 3"),
        ("--teacher tutor --label_smoothing_factor 0.1", "label_smoothing_factor=0.1 moves the labels"),
        (
            '--teacher tutor --config_overrides {"patch_size":8,"use_distillation_token":false}',
            "requires a distillation token. Remove use_distillation_token from --config_overrides",
        ),
    ],
)
def test_training_explains_mistakes(
    arguments: str, message: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    write_teachers_that_cannot_teach(place, arguments.split()[1])
    with pytest.raises(SystemExit, match=re.escape(message)):
        call_command("train image-classification", [*SCRIPT, *NEW, *arguments.split(), "--output_dir", "output"])
    assert not Path("output/model.safetensors").exists()


def write_teachers_that_cannot_teach(place: Path, name: str) -> None:
    """Save one of the teachers without suitable outputs, given its name; do nothing for other names."""
    folder, kinds = place / name, {"tutor": "ours", "headless": "ours", "headless_swin": "swin", "blind": "resnet"}
    if name in kinds:
        save_teacher(kinds[name], folder, NAMES)
    match name:
        case "strangers":
            save_teacher("vit", folder, ["cow", "pig"])
        case "headless":
            HfViTForImageClassification.from_pretrained(folder).model.save_pretrained(folder)
        case "headless_swin":
            SwinModel.from_pretrained(folder).save_pretrained(folder)
        case "blind":
            (folder / "preprocessor_config.json").unlink()
        case "foreign":
            folder.mkdir()
            classes = {"AutoConfig": "code.ForeignConfig", "AutoModelForImageClassification": "code.Foreign"}
            (folder / "config.json").write_text(json.dumps({"model_type": "foreign", "auto_map": classes}))
        case "gray":
            config = small_config(num_channels=1, id2label=dict(enumerate(NAMES)), num_labels=3)
            HfViTForImageClassification(config).save_pretrained(folder)
            HfViTImageProcessor.for_model(config).save_pretrained(folder)


def test_tokens_are_of_classifiers_alone_and_a_teacher_needs_the_whole_student(
    data: dict[str, Path], tmp_path: Path
) -> None:
    options = ["--teacher", str(save_teacher("vit", tmp_path / "tutor", NAMES)), "--distillation_type", "hard"]
    with pytest.raises(ValueError, match=r"does not have\. Use --distillation_type features"):
        make_trainer("depth_estimation", data["depth_estimation"], tmp_path, *options)
    args = training_arguments(tmp_path)
    check_distillation(args)
    args.fsdp = True
    with pytest.raises(ValueError, match="Remove --fsdp and --deepspeed"):
        check_distillation(args)
