"""A training as a file: what it holds, what it leaves out, and what may change when it is resumed."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_vit.training import (
    AugmentationArguments,
    ClassificationDataArguments,
    HfViTTrainingArguments,
    ModelArguments,
    RegularizationArguments,
)
from hf_vit.training.recipe import (
    given_arguments,
    parse_arguments,
    read_recipe,
    start_recipe,
    without_secrets,
)
from hf_vit.training.saving.output_files import RECIPE_NAME
from hf_vit.training.tasks.semantic_segmentation import SemanticEvaluationArguments


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
TYPES = (ModelArguments, ClassificationDataArguments, AugmentationArguments, HfViTTrainingArguments)


def given(*arguments: str) -> dict[str, Any]:
    return given_arguments(TYPES, arguments)


def test_a_recipe_says_what_the_command_line_says(tmp_path: Path) -> None:
    recipe = given(*COMMAND)
    assert recipe == {
        "dataset_name": "photos",
        "learning_rate": 5e-4,
        "save_strategy": "no",
        "bf16": True,
        "label_names": ["labels", "others"],
        "config_overrides": {"patch_size": 8},
        "seed": 2,
    }
    start_recipe(tmp_path, recipe, is_resumed=False)
    assert given(str(tmp_path / RECIPE_NAME)) == recipe
    assert given(str(tmp_path / RECIPE_NAME), "--seed", "3") == recipe | {"seed": 3}
    assert given("--train-val-split", "0.2") == {"train_val_split": 0.2}
    assert read_recipe(tmp_path / RECIPE_NAME)["dataset_name"] == "photos"


def test_no_token_is_written_anywhere(tmp_path: Path) -> None:
    start_recipe(tmp_path, given(*COMMAND), is_resumed=False)
    assert "hf_secret" not in (tmp_path / RECIPE_NAME).read_text()
    command = ["--hub_token", "hf_secret", "--seed", "1", "--hub-token=hf_secret", "--resume-from-checkpoint", "last"]
    assert without_secrets(command) == ["--seed", "1"]


def test_a_training_is_resumed_with_the_same_arguments_only(tmp_path: Path) -> None:
    start_recipe(tmp_path, given(*COMMAND), is_resumed=False)
    start_recipe(tmp_path, given(*COMMAND, "--eval_steps", "30", "--logging_steps", "5"), is_resumed=True)
    with pytest.raises(
        ValueError, match=r"started with other arguments \(auto_augment: None then, none now; seed: 2 then"
    ):
        start_recipe(tmp_path, given(*COMMAND, "--seed", "3", "--auto_augment", "none"), is_resumed=True)
    assert yaml.safe_load((tmp_path / RECIPE_NAME).read_text())["seed"] == 2


def test_a_file_that_is_no_yaml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("seed: [1")
    with pytest.raises(ValueError, match=r"recipe\.yaml is neither YAML nor JSON"):
        read_recipe(tmp_path / "recipe.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("box_errors: drop", "There is no option box_errors"),
        ("eval_delay: soon", "argument --eval_delay/--eval-delay: invalid float value: 'soon'"),
        ("max_train_samples: [1, 2]", r"argument --max_train_samples.*: invalid int value: '\[1, 2\]'"),
    ],
)
def test_names_and_values_that_do_not_fit_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    command = [str(tmp_path / "recipe.yaml"), "--dataset_name", "photos", "--use_cpu"]
    with pytest.raises(ValueError, match=message):
        parse_arguments(TYPES, command)


def test_a_value_must_be_one_of_those_to_choose_from(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("classification_loss: hinge")
    message = r"classification_loss='hinge' of the recipe is unknown\. Choose cross_entropy, bce"
    with pytest.raises(ValueError, match=message):
        parse_arguments((RegularizationArguments,), [str(tmp_path / "recipe.yaml")])


def test_lists_and_mappings_have_the_types_of_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("eval_scales: [1, 0.5]\neval_flip: true\neval_window_size: 8")
    (options,) = parse_arguments((SemanticEvaluationArguments,), [str(file)])
    command = ["--eval_scales", "1", "0.5", "--eval_flip", "--eval_window_size", "8"]
    assert (options,) == parse_arguments((SemanticEvaluationArguments,), command)
    assert given_arguments((SemanticEvaluationArguments,), [str(file), "--eval_scales", "2"]) == {
        "eval_scales": [2.0],
        "eval_flip": True,
        "eval_window_size": 8,
    }
