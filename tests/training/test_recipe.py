"""A training as a file: what it holds, what it leaves out, and what may change when it is taken up again."""

from pathlib import Path

import pytest
import yaml

from hf_vit.training.recipe import RECIPE_NAME, begin_recipe, read_recipe, to_recipe, without_secrets


COMMAND = [
    *(
        "--dataset_name",
        "photos",
        "--learning_rate",
        "5e-4",
        "--save_strategy",
        "no",
        "--bf16",
        "--label_names",
        "labels",
        "others",
    ),
    *("--config_overrides", '{"patch_size": 8}', "--hub_token=hf_secret", "--seed", "1", "--hub_token", "hf_secret"),
    *("--resume_from_checkpoint", "last", "--seed", "2"),
]


def test_a_recipe_says_what_the_command_line_says(tmp_path: Path) -> None:
    recipe = to_recipe(COMMAND)
    assert recipe == {
        "dataset_name": "photos",
        "learning_rate": 5e-4,
        "save_strategy": "no",
        "bf16": True,
        "label_names": ["labels", "others"],
        "config_overrides": {"patch_size": 8},
        "seed": 2,
    }
    begin_recipe(tmp_path, COMMAND, is_resumed=False)
    assert to_recipe([str(tmp_path / RECIPE_NAME)]) == recipe
    assert to_recipe([str(tmp_path / RECIPE_NAME), "--seed", "3"]) == recipe | {"seed": 3}
    assert to_recipe(["--train-val-split", "0.2"]) == {"train_val_split": 0.2}
    assert read_recipe(tmp_path / RECIPE_NAME)[:2] == ["--dataset_name", "photos"]


def test_no_token_is_written_anywhere(tmp_path: Path) -> None:
    begin_recipe(tmp_path, COMMAND, is_resumed=False)
    assert "hf_secret" not in (tmp_path / RECIPE_NAME).read_text()
    command = ["--hub_token", "hf_secret", "--seed", "1", "--hub-token=hf_secret", "--resume-from-checkpoint", "last"]
    assert without_secrets(command) == ["--seed", "1"]


def test_a_training_is_taken_up_with_the_same_arguments_only(tmp_path: Path) -> None:
    begin_recipe(tmp_path, COMMAND, is_resumed=False)
    begin_recipe(tmp_path, [*COMMAND, "--num_train_epochs", "30", "--logging_steps", "5"], is_resumed=True)
    with pytest.raises(
        ValueError, match=r"begun with other arguments \(auto_augment: None then, none now; seed: 2 then"
    ):
        begin_recipe(tmp_path, [*COMMAND, "--seed", "3", "--auto_augment", "none"], is_resumed=True)
    assert yaml.safe_load((tmp_path / RECIPE_NAME).read_text())["seed"] == 2


def test_a_file_that_is_no_yaml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("seed: [1")
    with pytest.raises(ValueError, match=r"recipe\.yaml is neither YAML nor JSON"):
        read_recipe(tmp_path / "recipe.yaml")
