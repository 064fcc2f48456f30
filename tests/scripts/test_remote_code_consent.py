"""Test that Python code in the folder of a model never runs without consent of the user."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from transformers import PreTrainedTokenizerFast, ViTConfig, ViTForImageClassification, ViTImageProcessor

import hf_vit
from hf_vit.model.remote_code import CUSTOM_PIPELINES, RemoteCodeError
from hf_vit.tasks.zero_shot_image_classification import ImageTextArguments, encoder_options, make_tokenizer
from hf_vit.training.teacher import open_teacher

from ..helpers.fresh import run_command
from ..helpers.models import small_config
from ..helpers.options import call_command
from ..helpers.teachers import SHAPE


MARKER = "the code was here"
CODE = """
import pathlib
from transformers import PreTrainedTokenizerFast, ViTConfig, ViTForImageClassification, ViTImageProcessor

pathlib.Path(__MARKER__).touch()


class ForeignConfig(ViTConfig):
    model_type = "foreign"


class ForeignForImageClassification(ViTForImageClassification):
    config_class = ForeignConfig


class ForeignImageProcessor(ViTImageProcessor):
    pass


class ForeignTokenizer(PreTrainedTokenizerFast):
    pass
"""
CLASSES = {
    "config.json": {
        "AutoConfig": "foreign.ForeignConfig",
        "AutoModel": "foreign.ForeignForImageClassification",
        "AutoModelForImageClassification": "foreign.ForeignForImageClassification",
        "AutoModelForDepthEstimation": "foreign.ForeignForImageClassification",
    },
    "preprocessor_config.json": {"AutoImageProcessor": "foreign.ForeignImageProcessor"},
    "tokenizer_config.json": {"AutoTokenizer": [None, "foreign.ForeignTokenizer"]},
}
FOREIGN = {
    "config.json": {"model_type": "foreign", "architectures": ["ForeignForImageClassification"]},
    "preprocessor_config.json": {"image_processor_type": "ForeignImageProcessor"},
    "tokenizer_config.json": {"tokenizer_class": "ForeignTokenizer"},
}
PIPELINE = {"impl": "foreign.ForeignForImageClassification", "pt": ["AutoModelForImageClassification"]}


def save_foreign(place: Path, **changes: object) -> Path:
    """Save a valid model whose JSON files refer to a Python file. `changes` replaces fields of config.json."""
    folder = place / "foreign"
    ViTForImageClassification(ViTConfig(**SHAPE, image_size=16, patch_size=8)).save_pretrained(folder)
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder)
    add_code(folder, place / MARKER)
    for name, fields in FOREIGN.items():
        change_json(folder / name, **fields)
    change_json(folder / "config.json", **changes)
    write_images(place)
    return folder


def write_images(place: Path) -> None:
    files = ("photo.png", *(f"data/train/{name}/{number}.png" for name in ("cat", "dog") for number in "0123"))
    for number, file in enumerate(files):
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 30), (number, 0, 0)).save(place / file)


def add_code(folder: Path, marker: Path) -> None:
    """Add a Python file that creates `marker` when it runs, and refer to its classes in all JSON files of a model."""
    (folder / "foreign.py").write_text(CODE.replace("__MARKER__", repr(str(marker))))
    for name, classes in CLASSES.items():
        change_json(folder / name, auto_map=classes)


def change_json(file: Path, **fields: object) -> None:
    saved = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**saved, **fields}))


@pytest.mark.parametrize(
    "command",
    [
        *("predict foreign photo.png", "visualize foreign photo.png --output_dir output", "convert foreign output"),
        *("push foreign user/foreign --dry_run", "evaluate --model_name_or_path foreign --dataset_name data"),
        "features extract --model_name_or_path foreign --dataset_name data --output_dir output",
        "train image-classification data --model_name_or_path foreign --train_val_split 0.5 --output_dir output",
    ],
)
def test_no_command_runs_the_code_of_a_model(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_foreign(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        call_command(command, [])
    (line,) = str(stopped.value.code).splitlines()
    assert "foreign" in line
    assert not (tmp_path / MARKER).exists()
    assert not (tmp_path / "output").exists()


def test_predictions_run_code_with_consent_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for changes in (
        {},
        {"model_type": "vit", "architectures": ["ForeignForDepthEstimation"]},
        {"model_type": "vit", "custom_pipelines": {"image-classification": PIPELINE}},
    ):
        save_foreign(tmp_path, **changes)
        with pytest.raises(SystemExit, match=r"'foreign' has custom code .* set --trust_remote_code\.$"):
            call_command("predict", ["foreign", "photo.png"])
        assert not (tmp_path / MARKER).exists()
    save_foreign(tmp_path)
    result = run_command("predict", tmp_path, "foreign", "photo.png", "--trust_remote_code")
    assert json.loads(result.stdout)["label"].startswith("LABEL_"), result.stderr
    assert (tmp_path / MARKER).exists()


def test_our_own_models_need_no_consent_and_run_none_of_their_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path)
    for model_class in (hf_vit.HfViTForImageClassification, hf_vit.HfViTForKeypointDetection):
        folder = tmp_path / model_class.__name__
        model_class(small_config()).save_pretrained(folder)
        is_cropped = model_class is hf_vit.HfViTForKeypointDetection
        hf_vit.HfViTImageProcessor.for_model(small_config(), do_affine_crop=is_cropped).save_pretrained(folder)
        add_code(folder, tmp_path / MARKER)
        own = CUSTOM_PIPELINES["HfViTForKeypointDetection"]
        # Pipelines add this field to config.json when they are saved.
        change_json(folder / "config.json", custom_pipelines=own)
        call_command("predict", [folder.name, "photo.png"])
        assert json.loads(capsys.readouterr().out)["file"] == "photo.png"
        assert not (tmp_path / MARKER).exists()


def test_no_tower_tokenizer_or_teacher_runs_its_code(tmp_path: Path) -> None:
    folder, ours = str(save_foreign(tmp_path)), tmp_path / "ours"
    hf_vit.HfViTForImageClassification(small_config()).save_pretrained(ours)
    for_texts = ImageTextArguments(dataset_name="captions", tokenizer_name=folder)
    joined = hf_vit.HfViTForZeroShotImageClassification.from_vision_text_pretrained
    openings: list[tuple[str, Callable[[], object]]] = [
        ("Choose a tokenizer that is part of transformers", lambda: make_tokenizer(for_texts, ())),
        (
            "Choose a text encoder that is part of transformers",
            lambda: encoder_options(folder, PreTrainedTokenizerFast),
        ),
        ("Use a text encoder of transformers", lambda: joined(ours, folder)),
        ("set --teacher_trust_remote_code true", lambda: open_teacher(folder, is_classifier=True)),
    ]
    for cure, opening in openings:
        with pytest.raises(RemoteCodeError, match=f"has custom code .*{cure}"):
            opening()
    assert not (tmp_path / MARKER).exists()
