"""Test that every command has a Python function with its options, and call each function as a user would."""

import inspect
import json
import os
import signal
import threading
from pathlib import Path

import pytest
import yaml

import hf_vit
from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTImageProcessor, cli

from .helpers.datasets import write_pictures
from .helpers.models import encoder_shape
from .helpers.references import draw_weights


# Names of functions that differ from the name of their command, which is the name of a folder of the package
NAMES = {"features extract": "extract_features", "features evaluate": "evaluate_features"}
NAMES |= {"convert": "convert_model", "visualize": "visualize_model", "export": "export_model"}
GENERAL = ("train", "evaluate", "predict", "features extract")  # functions that pass on all options of their command
SHAPE = {**encoder_shape(16, 2, 32), "patch_size": 8, "image_size": 16}
QUIET = {"report": lambda line: None}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with photos and a classifier of them, which is also the working directory."""
    for split, count in (("train", 20), ("test", 10)):
        files = (f"{split}/{name}/{number}.png" for name in ("cat", "dog") for number in range(count))
        write_pictures(tmp_path / "photos", *files, seed=count)
    labels = {"id2label": {0: "cat", 1: "dog"}, "label2id": {"cat": 0, "dog": 1}}
    config = HfViTConfig(**SHAPE, **labels)
    model = HfViTForImageClassification(config)
    draw_weights(model)
    model.save_pretrained(tmp_path / "model")
    HfViTImageProcessor.for_model(config).save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_command_has_a_function_with_its_options() -> None:
    pages = cli.table()["pages"]
    commands = [name for name in pages if not name.startswith(("train ", "evaluate "))]
    assert {name.partition(" ")[0] for name in commands} | {"train", "evaluate"} == {*cli.COMMANDS}
    for command in [*commands, "train", "evaluate"]:
        function = getattr(hf_vit, NAMES.get(command, command))
        parameters = inspect.signature(function).parameters
        if command not in GENERAL:
            own = {name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD}
            assert own - {"report"} == cli.load_page(command)["options"].keys(), command
        assert f"Equivalent to `hf-vit {command}`" in inspect.getdoc(function), command


def test_features_are_extracted_and_evaluated(place: Path) -> None:
    counts = hf_vit.extract_features("model", "photos", features=["cls"], output_dir="features", use_cpu=True, **QUIET)
    assert set(counts) == {path.name for path in (place / "photos").iterdir()}
    found = hf_vit.evaluate_features("features", output_dir="scores", **QUIET)
    assert 0 <= found["scores"]["cls"]["knn_accuracy"] <= 1
    assert (place / "scores" / "evaluation.json").is_file()


def test_data_are_audited_and_selected(place: Path) -> None:
    assert len(hf_vit.audit("photos", output_dir="audit", **QUIET)) > 2
    hf_vit.select("photos", "model", budget=2, output_dir="next", **QUIET)
    assert (place / "next" / "selected.csv").is_file()


def test_models_are_drawn_converted_uploaded_and_described(place: Path) -> None:
    photo = next((place / "photos").rglob("*.png"))
    (drawn,) = hf_vit.visualize_model("model", [str(photo)], output_dir="maps", kinds=["rollout"], **QUIET)
    assert (place / drawn).is_file()
    hf_vit.convert_model("model", "exported", to="vit", **QUIET)
    assert (place / "exported" / "model.safetensors").is_file()
    card = yaml.safe_dump({"library_name": "transformers", "pipeline_tag": "image-classification", "license": "mit"})
    (place / "model" / "README.md").write_text(f"---\n{card}---\n# Cats and dogs\n")
    lines: list[str] = []
    assert hf_vit.push("model", "user/pets", dry_run=True, report=lines.append) is None
    assert lines[-1] == "Nothing was uploaded."
    hf_vit.info(place / "model", report=lines.append)
    assert "Task: image-classification" in lines


def test_scores_are_calibrated(place: Path) -> None:
    lines: list[str] = []
    options = {"use_cpu": True, "disable_tqdm": True}
    hf_vit.calibrate("model", "photos", split="test", options=options, report=lines.append)
    assert "Temperature" in "\n".join(lines)
    saved = json.loads((place / "model" / "config.json").read_text())["calibration_config"]
    assert saved["num_images"] == 20


def test_models_are_served(place: Path) -> None:
    lines: list[str] = []

    def stop_soon(line: str) -> None:
        lines.append(line)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()

    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit):
            hf_vit.serve("model", port=0, report=stop_soon)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert lines[0].startswith("Serving model at http://127.0.0.1:")
