"""Test that `hf-vit evaluate` finds the task of a model and offers the options of this task."""

import json
from pathlib import Path

import pytest

from hf_vit import HfViTConfig, HfViTForMaskedImageModeling
from hf_vit.options.recipe import with_recipe
from hf_vit.runs.evaluate import find_task, plan_evaluation, task_of_model
from hf_vit.tasks import TASKS

from ..helpers.models import save_model
from ..helpers.options import call_command, evaluation_values


def config_of(folder: Path, *architectures: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": list(architectures)} if architectures else {}))
    return str(folder)


PUBLISHED = {
    "DeiTForImageClassificationWithTeacher": "image-classification",
    "DPTForSemanticSegmentation": "semantic-segmentation",
    "EomtForUniversalSegmentation": "universal-segmentation",
    "DepthAnythingForDepthEstimation": "depth-estimation",
    "YolosForObjectDetection": "object-detection",
    "VitPoseForPoseEstimation": "keypoint-detection",
    "CLIPModel": "zero-shot-image-classification",
    "Siglip2Model": "zero-shot-image-classification",
}


def test_the_task_comes_from_the_class_of_the_model_the_recipe_or_the_user(tmp_path: Path) -> None:
    ours = {task_class.model_class.__name__: task for task, task_class in TASKS.items()}
    for architecture, task in {**ours, **PUBLISHED}.items():
        assert task_of_model(config_of(tmp_path, architecture)) == task
    (tmp_path / "vit.pth").write_bytes(b"")
    for model in (config_of(tmp_path / "timm"), str(tmp_path / "vit.pth")):
        assert task_of_model(model) == "image-classification"
        assert find_task({"model_name_or_path": model, "task": "depth-estimation"}) is TASKS["depth-estimation"]
    config_of(tmp_path / "rooms", "HfViTForDepthEstimation")
    (tmp_path / "recipe.yaml").write_text(f"model_name_or_path: {tmp_path / 'rooms'}\neval_crop: eigen")
    assert find_task(with_recipe({"recipe": tmp_path / "recipe.yaml"})) is TASKS["depth-estimation"]
    (tmp_path / "recipe.yaml").write_text("eval_crop: eigen")
    with pytest.raises(ValueError, match="No model is given"):
        plan_evaluation({"recipe": tmp_path / "recipe.yaml"})


def test_options_of_trainings_are_refused(tmp_path: Path) -> None:
    model = config_of(tmp_path / "rooms", "HfViTForDepthEstimation")
    for name, value in (("min_scale", 0.5), ("preset", "small")):
        with pytest.raises(ValueError, match=f"{name}={value!r} applies only to training"):
            plan_evaluation({"model_name_or_path": model, "dataset_name": "scenes", name: value})


def test_no_evaluation_writes_over_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "nyu v2").mkdir(parents=True)
    for model, data, name in (
        ("trained/rooms", "data/nyu v2", "rooms-on-nyu-v2"),
        ("trained/rooms/checkpoint-30", "user/depths", "rooms-checkpoint-30-on-depths"),
    ):
        (tmp_path / model).mkdir(parents=True)
        config_of(tmp_path / model, "HfViTForDepthEstimation")
        arguments = ["--model_name_or_path", model, "--dataset_name", data, "--use_cpu"]
        for end in ("", "-2", "-3"):
            folder = Path(plan_evaluation(evaluation_values(arguments))[1].output_dir)
            assert folder == Path("outputs", "evaluation", name + end)
            folder.mkdir(parents=True)
            (folder / "test_scores.json").touch()
        given = plan_evaluation(evaluation_values([*arguments, "--output_dir", str(folder)]))[1].output_dir
        assert given == str(folder)  # a given output folder is not changed


def test_models_without_a_task_are_refused(tmp_path: Path) -> None:
    config = HfViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8)
    save_model(HfViTForMaskedImageModeling(config), tmp_path / "pretrained")
    headless = r"was saved as HfViTModel, which belongs to no task. .* --task to one of depth-estimation"
    for model, message in (
        (config_of(tmp_path / "headless", "HfViTModel"), headless),
        (str(tmp_path / "pretrained"), r"Evaluate its features: hf-vit features extract"),
    ):
        with pytest.raises(SystemExit, match=message):
            call_command("evaluate", ["--model_name_or_path", model, "--dataset_name", "photos", "--use_cpu"])
