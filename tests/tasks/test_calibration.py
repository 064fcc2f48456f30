"""Test that training and `hf-vit calibrate` store a calibration that was fitted on held-out images."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import pipeline

import hf_vit
from hf_vit import cli
from hf_vit.evaluation import calibration
from hf_vit.model.calibration import SIMILARITY_FILE
from hf_vit.runs import report
from hf_vit.training import evaluator_trainer

from ..helpers.datasets import load_digits
from ..helpers.dense_trainings import run_task
from ..helpers.models import encoder_shape
from ..helpers.options import call_command


TINY = json.dumps({**encoder_shape(16, 2, 512), "patch_size": 2})
SHORT = ("--max_steps", "10", "--learning_rate", "3e-3", "--per_device_train_batch_size", "32", "--report_to", "none")
SHORT += ("--choose_defaults", "false", "--auto_augment", "none", "--random_erasing", "0", "--min_crop_scale", "0.8")
SHORT += ("--horizontal_flip", "0", "--use_cpu", "true", "--eval_strategy", "no")


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of digits in the splits train and test."""
    folder = tmp_path_factory.mktemp("digits")
    for split, images in load_digits().items():
        for number, image in enumerate(images.select(range(min(len(images), 400)))):
            place = folder / split / f"digit {image['label']}"
            place.mkdir(parents=True, exist_ok=True)
            image["image"].save(place / f"{number}.png")
    return folder


def train(data: Path, output_dir: Path, *options: str) -> Path:
    places = ["--output_dir", str(output_dir), "--config_overrides", TINY, "--image_size", "8"]
    call_command("train", ["image-classification", str(data), *places, *SHORT, "--train_val_split", "0.25", *options])
    return output_dir


@pytest.fixture(scope="module")
def trained(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(digits, tmp_path_factory.mktemp("trained") / "model")


def test_training_calibrates_on_held_out_images_and_reports_it_in_the_card(trained: Path, digits: Path) -> None:
    options = json.loads((trained / "config.json").read_text())["calibration_config"]
    assert options["model_class"] == "HfViTForImageClassification"
    assert options["num_images"] == 100
    assert options["temperature"] != 1
    scores = json.loads((trained / "test_calibration.json").read_text())
    assert all(scores["after"][name] != scores["before"][name] for name in scores["after"])
    reported = json.loads((trained / "test_scores.json").read_text())
    assert reported["loss"] == pytest.approx(scores["after"]["negative log-likelihood"], rel=1e-5)
    assert scores["sets"]["0.9 thr"]["coverage"] == pytest.approx(0.9, abs=0.15)
    card = (trained / "README.md").read_text()
    assert "## Calibration" in card
    assert "expected calibration error" in card
    assert "(test_calibration.png)" in card
    assert (trained / "test_calibration.png").stat().st_size > 5000


def test_the_command_calibrates_a_model_again_and_stores_training_features(
    trained: Path, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = json.loads((trained / "config.json").read_text())["calibration_config"]
    plain = tmp_path / "model"
    shutil.copytree(trained, plain)
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config | {"calibration_config": None}))
    (plain / "calibration.py").unlink()  # as saved by an earlier version
    call_command("calibrate", [str(plain), str(digits)])
    assert (plain / "calibration.py").is_file()
    said = capsys.readouterr().out
    assert "calibrated on 100 held-out training images" in said
    assert "measured on test images" in said
    after = json.loads((plain / "config.json").read_text())["calibration_config"]
    assert after.keys() == before.keys()
    assert after["temperature"] == pytest.approx(before["temperature"], rel=1e-3)
    assert (plain / "README.md").read_text().count("## Calibration") == 1
    assert (plain / "README.md").read_text().count("calibration.png") == 1
    assert "## Use" in (plain / "README.md").read_text()
    assert (plain / SIMILARITY_FILE).stat().st_size <= 0.05 * (plain / "model.safetensors").stat().st_size
    (photo, *_) = (digits / "test" / "digit 3").iterdir()
    answer = pipeline("image-classification", model=str(plain))(str(photo), coverage=0.9, similarity=True)
    assert all(0 <= entry["similarity"] <= 1 for entry in answer)


def calibration_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text()).get("calibration_config") or {}


@pytest.mark.parametrize("share", ["0.25", "0.09"])
def test_images_that_chose_the_step_do_not_calibrate(
    share: str, digits: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    best = ("--load_best_model_at_end", "true", "--eval_strategy", "steps", "--save_strategy", "steps")
    best += ("--eval_steps", "5", "--save_steps", "5")
    folder = train(digits, tmp_path / "model", "--train_val_split", share, *best)
    card = (folder / "README.md").read_text()
    if share == "0.25":
        assert calibration_of(folder)["num_images"] == 50
        assert "calibrated on 50 held-out training images that did not choose the weights" in card
        return
    reason = "The scores are not calibrated. All 36 validation images chose the weights."
    assert reason in card
    assert reason in caplog.text
    assert not calibration_of(folder)
    assert "expected calibration error" not in card
    with pytest.raises(SystemExit, match=r"All 36 held-out images .* chose the weights.* --train_val_split 0\.1 "):
        call_command("calibrate", [str(folder), str(digits)])


def test_a_calibration_needs_held_out_images(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error contains a training command that works, and whose model can be calibrated."""
    folder = train(digits, tmp_path / "model", "--train_val_split", "0")
    with pytest.raises(SystemExit, match=r"no split 'validation'.* Train with held-out images: hf-vit train "):
        call_command("calibrate", [str(folder), str(digits), "--split", "validation"])
    with pytest.raises(SystemExit, match=r"No images .* are known to be held out") as raised:
        call_command("calibrate", [str(folder), str(digits)])
    with pytest.raises(SystemExit, match="split='train' selects images that the model was trained on"):
        call_command("calibrate", [str(folder), str(digits), "--split", "train"])
    (command,) = re.findall(r"hf-vit (train .*? --output_dir \S+)\. ", str(raised.value))
    assert "--train_val_split 0.1 " in command
    cli.main(shlex.split(command))
    capsys.readouterr()
    plain = json.loads((Path(f"{folder}-held-out") / "config.json").read_text()) | {"calibration_config": None}
    (Path(f"{folder}-held-out") / "config.json").write_text(json.dumps(plain))
    capsys.readouterr()
    # The error of a pipeline contains a command that works, too.
    (photo, *_) = (digits / "test" / "digit 3").iterdir()
    with pytest.raises(ValueError, match="needs a calibrated model") as refused:
        pipeline("image-classification", model=f"{folder}-held-out")(str(photo), coverage=0.9)
    cli.main(shlex.split(str(refused.value).partition("Run: hf-vit ")[2]))
    assert "calibrated on 40 held-out training images" in capsys.readouterr().out
    assert pipeline("image-classification", model=f"{folder}-held-out")(str(photo), coverage=0.9)

    # The test images can be named. The card then says that its scores are those of the same images.
    call_command("calibrate", [str(folder), str(digits), "--split", "test"])
    assert "calibrated on 360 test images" in capsys.readouterr().out
    assert "The scores above were measured on the same images" in (folder / "README.md").read_text()
    assert calibration_of(folder)["num_images"] == 360


def test_reported_validation_images_calibrate_only_if_they_are_named(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    shutil.copytree(digits / "train", data / "train")
    shutil.copytree(digits / "test", data / "validation")
    folder = train(data, tmp_path / "model", "--train_val_split", "0")
    with pytest.raises(SystemExit, match=r"except for the reported ones.* --validation_as_test true") as raised:
        call_command("calibrate", [str(folder)])
    (command,) = re.findall(r"hf-vit (train .*? --output_dir \S+)\. ", str(raised.value))
    cli.main(shlex.split(command))
    call_command("calibrate", [f"{folder}-held-out"])
    assert "calibrated on 40 held-out training images" in capsys.readouterr().out
    # With a test split, the validation split is that of the user.
    (data / "validation").rename(data / "test")
    shutil.copytree(data / "test", data / "validation")
    call_command("calibrate", [f"{folder}-held-out"])
    assert "calibrated on 360 validation images" in capsys.readouterr().out
    shutil.rmtree(data / "test")
    call_command("calibrate", [str(folder), "--split", "validation"])
    assert "calibrated on 360 validation images" in capsys.readouterr().out
    assert "The scores above were measured on the same images" in (folder / "README.md").read_text()


def test_scores_remain_if_cross_fitting_finds_them_worse(
    trained: Path, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(trained, folder)
    before = calibration_of(folder)
    monkeypatch.setattr(calibration, "cross_fitted", lambda logits, *_: 9 * logits)
    call_command("calibrate", [str(folder), str(digits)])
    assert "The scores remain as they were: on 100 held-out training images" in capsys.readouterr().out
    assert calibration_of(folder)["temperature"] == before["temperature"]
    assert "cross-fitting found a worse expected calibration error" in (folder / "README.md").read_text()


def test_fine_tuning_starts_without_the_calibration(trained: Path, digits: Path, tmp_path: Path) -> None:
    options = ("--model_name_or_path", str(trained), "--max_steps", "1", "--calibrate", "false")
    places = ["--output_dir", str(tmp_path / "model"), *SHORT, *options]
    call_command("train", ["image-classification", str(digits), *places])
    assert hf_vit.HfViTConfig.from_pretrained(tmp_path / "model").calibration_config is None
    assert "## Calibration" not in (tmp_path / "model" / "README.md").read_text()


def test_dense_scores_are_calibrated_without_a_change_of_the_classes(scenes: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    run_task("semantic_segmentation", scenes, folder, "--train_val_split", "0.4", "--validation_as_test", "true")
    options = json.loads((folder / "config.json").read_text())["calibration_config"]
    assert options["model_class"] == "HfViTForSemanticSegmentation"
    found = json.loads((folder / "test_calibration.json").read_text())
    assert found["fitted on the same images"] is False
    assert found["after"]["negative log-likelihood"] < found["before"]["negative log-likelihood"] + 1e-3


def test_keypoints_have_expected_errors(figures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    for module in (evaluator_trainer, report):
        monkeypatch.setattr(module, "LEAST_FITTED", 5)
    run_task("keypoint_detection", figures, folder, "--train_val_split", "0.4", "--validation_as_test", "true")
    assert "difference of the mean expected error" in (folder / "README.md").read_text()
    photo = next(figures.rglob("*.png"))
    ((pose,), (plain,), (double,)) = (
        pipeline("keypoint-detection", model=str(folder), model_kwargs={"calibration_config": options})(str(photo))
        for options in ({}, {"enabled": False}, {"error_scale": 1.0})
    )
    scale = json.loads((folder / "config.json").read_text())["calibration_config"]["error_scale"]
    assert pose["expected_errors"] == pytest.approx([scale * error for error in double["expected_errors"]], rel=1e-4)
    assert {**plain, "expected_errors": pose["expected_errors"]} == pose
    (line,) = hf_vit.predict(folder, photo)
    assert line["poses"] == [pose]
