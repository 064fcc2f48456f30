"""Test the example scripts for fine-tuning. Each script trains, evaluates and saves a new and a pretrained model."""

import ast
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_vit.tasks import TASKS

from ..helpers import distributed
from ..helpers.datasets import write_class_folders
from ..helpers.dense_trainings import write_scenes
from ..helpers.fresh import ROOT, run_python, run_script
from ..helpers.hub import TOKEN, serve
from ..helpers.models import save_model, small_config
from ..helpers.object_trainings import write_figures, write_objects


# Maps each example script to its dataset folder and main score.
SCRIPTS = {
    "finetune_image_classification": ("photos", "accuracy"),
    "finetune_semantic_segmentation": ("scenes", "mean_iou"),
    "finetune_object_detection": ("objects", "map"),
    "finetune_depth_estimation": ("scenes", "abs_rel"),
    "finetune_keypoint_detection": ("figures", "nme"),
    "pretrain_masked_image_modeling": ("photos", "knn_accuracy"),
}
SMALL = ["--image_size", "32", "--train_val_split", "0.25", "--per_device_train_batch_size", "2", "--max_steps", "2"]
SMALL += ["--report_to", "none", "--disable_tqdm", "true", "--use_cpu"]
RATE = ["--learning_rate", "1e-3"]
CLASSIFIER, SEGMENTATION, DETECTION, DEPTH, KEYPOINTS, PRETRAINING = SCRIPTS  # names of the example scripts


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with data and a saved model for each task."""
    folder = tmp_path_factory.mktemp("workplace")
    write_class_folders(folder / "photos", ["cat", "dog"])
    write_scenes(folder / "scenes")
    write_objects(folder / "objects")
    write_figures(folder / "figures")
    for script in SCRIPTS:
        save_model(class_of(script)(small_config()), folder / "saved" / script)
    return folder


def class_of(script: str) -> Any:
    return TASKS[script.partition("_")[2].replace("_", "-")].model_class


def arguments_of(script: str, output: Path, *options: str) -> list[str]:
    return ["--dataset_name", SCRIPTS[script][0], "--output_dir", str(output), *SMALL, *options]


def run(script: str, workplace: Path, output: Path, *options: str) -> None:
    """Run an example script in this process, which avoids repeated imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workplace)
        patch.setattr(sys, "argv", [script, *arguments_of(script, output, *options)])
        runpy.run_path(str(ROOT / "scripts" / f"{script}.py"), run_name="__main__")


def check(script: str, output: Path) -> Any:
    """Check the output folder of an example script, and return the saved model."""
    scores = json.loads((output / "all_results.json").read_text())
    assert {"train_loss", "validation_loss", f"validation_{SCRIPTS[script][1]}"} <= scores.keys()
    assert ("test_loss" in scores) == (script == CLASSIFIER)
    assert {"README.md", "modeling_hf_vit.py", "preprocessor_config.json"} <= {file.name for file in output.iterdir()}
    return class_of(script).from_pretrained(output)


def check_tuned(script: str, workplace: Path, output: Path) -> None:
    """Check the output folder of an example script that fine-tuned a saved model."""
    tuned, saved = check(script, output), class_of(script).from_pretrained(workplace / "saved" / script)
    pairs = zip(tuned.model.parameters(), saved.model.parameters(), strict=True)
    assert 0 < torch.stack([(one - other).abs().max() for one, other in pairs]).max() < 0.02


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_new_model_is_trained(script: str, workplace: Path, tmp_path: Path) -> None:
    run(script, workplace, tmp_path / "out", "--preset", "mnist")
    model = check(script, tmp_path / "out")
    assert (model.config.hidden_size, model.config.image_size) == (64, 32)


@pytest.mark.parametrize("script", [DEPTH, KEYPOINTS, PRETRAINING])
def test_a_saved_model_is_fine_tuned(script: str, workplace: Path, tmp_path: Path) -> None:
    rate = ["--base_learning_rate", "0.1"] if script == PRETRAINING else RATE
    run(script, workplace, tmp_path / "out", "--model_name_or_path", f"saved/{script}", *rate)
    check_tuned(script, workplace, tmp_path / "out")


def test_torchrun_and_accelerate_launch_them(workplace: Path, tmp_path: Path) -> None:
    def words(name: str) -> list[str]:
        options = arguments_of(name, tmp_path / name, "--model_name_or_path", f"saved/{name}", *RATE)
        return [str(ROOT / "scripts" / f"{name}.py"), *options]

    two = distributed.launch("--nproc_per_node", "2", *words(SEGMENTATION), folder=tmp_path, workdir=workplace)
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(ROOT / "scripts/accelerate/one_cpu.yaml")]
    finished = run_python(*launcher, *words(DETECTION), workdir=workplace, PYTHONPATH=str(ROOT))
    assert finished.returncode == 0, finished.stderr
    distributed.finish(two, tmp_path)
    for script in (SEGMENTATION, DETECTION):
        check_tuned(script, workplace, tmp_path / script)


def test_a_run_is_resumed_and_uploaded(workplace: Path, tmp_path: Path) -> None:
    options = ["--model_name_or_path", f"saved/{CLASSIFIER}", *RATE]
    run(CLASSIFIER, workplace, tmp_path / "out", *options)
    check_tuned(CLASSIFIER, workplace, tmp_path / "out")
    options += ["--max_steps", "3", "--resume_from_checkpoint", "last"]
    options += ["--push_to_hub", "--hub_model_id", "user/photos", "--hub_token", TOKEN]
    with serve(tmp_path / "hub") as hub:
        arguments = arguments_of(CLASSIFIER, tmp_path / "out", *options)
        finished = run_script(CLASSIFIER, workplace, *arguments, **hub.client)
        assert finished.returncode == 0, finished.stdout + finished.stderr
        check(CLASSIFIER, tmp_path / "out")
        files = hub.find("user/photos").files
    assert {"README.md", "model.safetensors", "modeling_hf_vit.py"} <= files.keys()
    assert not [name for name in files if name.startswith("checkpoint")]
    assert json.loads((tmp_path / "out" / "trainer_state.json").read_text())["global_step"] == 3


def test_options_of_the_command_are_refused(workplace: Path, tmp_path: Path) -> None:
    finished = run_script(CLASSIFIER, workplace, *arguments_of(CLASSIFIER, tmp_path / "out", "--minutes", "3"))
    assert "not used by the HfArgumentParser: ['--minutes', '3']" in finished.stderr


def test_example_scripts_are_short_and_use_public_names() -> None:
    for script in SCRIPTS:
        text = (ROOT / "scripts" / f"{script}.py").read_text()
        assert 60 <= len(text.splitlines()) <= 150, script
        for node in ast.walk(ast.parse(text)):
            names = [node.attr] if isinstance(node, ast.Attribute) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom | ast.Import) else []
            assert not [name for name in names if name.startswith("_")], script
