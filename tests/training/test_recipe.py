"""Recipe files: their contents, omitted options, and options that may change when a training run is resumed."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_vit.data.formats.keypoints import flip_pairs_of
from hf_vit.options.recipe import RECIPE_NAME, read_recipe, recipe_text, shareable
from hf_vit.options.resolve import build, resolve
from hf_vit.training import TASKS, HfViTTrainingArguments
from hf_vit.training.arguments import ClassificationArguments
from hf_vit.training.run import words_of
from hf_vit.training.tasks.semantic_segmentation import SemanticArguments

from ..helpers.options import given_arguments, parse_arguments


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
TYPES = (ClassificationArguments, HfViTTrainingArguments)


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
    (tmp_path / RECIPE_NAME).write_text(recipe_text(recipe))
    assert given(str(tmp_path / RECIPE_NAME)) == recipe
    assert given(str(tmp_path / RECIPE_NAME), "--seed", "3") == recipe | {"seed": 3}
    assert given("--train-val-split", "0.2") == {"train_val_split": 0.2}
    assert read_recipe(tmp_path / RECIPE_NAME)["dataset_name"] == "photos"


def test_no_token_is_written_anywhere() -> None:
    values = {"hub_token": "hf_secret", "seed": 1, "resume_from_checkpoint": "last", "run_name": None}
    assert shareable(values, TYPES) == {"seed": 1}
    assert "hf_secret" not in recipe_text(given(*COMMAND))


def test_a_file_that_is_no_yaml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("seed: [1")
    with pytest.raises(ValueError, match=r"recipe\.yaml is neither YAML nor JSON"):
        read_recipe(tmp_path / "recipe.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("box_errors: drop", "There is no option box_errors"),
        ("eval_delay: soon", "eval_delay='soon' must be a number"),
        ("max_train_samples: [1, 2]", r"max_train_samples=\[1, 2\] must be a whole number"),
    ],
)
def test_names_and_values_that_do_not_fit_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    command = [str(tmp_path / "recipe.yaml"), "--dataset_name", "photos", "--use_cpu"]
    with pytest.raises(ValueError, match=message):
        parse_arguments(TYPES, command)


def test_a_value_must_be_one_of_those_to_choose_from(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("dataset_name: photos\nclassification_loss: hinge")
    message = r"classification_loss='hinge' must be one of cross_entropy, bce"
    with pytest.raises(ValueError, match=message):
        parse_arguments((ClassificationArguments,), [str(tmp_path / "recipe.yaml")])


def test_lists_and_mappings_have_the_types_of_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("dataset_name: roads\neval_scales: [1, 0.5]\neval_flip: true\neval_window_size: 8")
    (options,) = parse_arguments((SemanticArguments,), [str(file)])
    command = ["--dataset_name", "roads", "--eval_scales", "1", "0.5", "--eval_flip", "--eval_window_size", "8"]
    assert (options,) == parse_arguments((SemanticArguments,), command)
    assert given_arguments((SemanticArguments,), [str(file), "--eval_scales", "2"]) == {
        "dataset_name": "roads",
        "eval_scales": [2.0],
        "eval_flip": True,
        "eval_window_size": 8,
    }


@pytest.mark.parametrize(
    ("task", "name", "value", "words"),
    [
        ("semantic_segmentation", "class_names", ["sky", "road"], ["sky,road"]),
        ("semantic_segmentation", "class_names", ("sky", "road"), ["sky,road"]),
        ("semantic_segmentation", "class_names", ["door, double", "[x]"], ['["door, double", "[x]"]']),
        ("object_detection", "class_names", ["cat"], ["cat"]),
        ("universal_segmentation", "class_names", ["sky", "road"], ["sky,road"]),
        ("universal_segmentation", "thing_classes", ["cat", "dog, small"], ['["cat", "dog, small"]']),
        ("keypoint_detection", "flip_pairs", [["left", "right"], (0, 1)], ["left,right", "0,1"]),
        ("image_classification", "freeze", ["model.embeddings", "model.norm"], ["model.embeddings,model.norm"]),
        ("image_classification", "report_to", ["none"], ["none"]),
        ("image_classification", "report_to", ["tensorboard", "flyte"], ["tensorboard,flyte"]),
        ("image_classification", "optim_target_modules", ["query", "key"], ["query", "key"]),
        ("image_classification", "optim_target_modules", "all-linear", ["all-linear"]),
        ("semantic_segmentation", "eval_scales", [0.5, 1], ["0.5", "1.0"]),
    ],
)
def test_lists_from_python_are_those_of_the_command_line(task: str, name: str, value: Any, words: list[str]) -> None:
    types = TASKS[task.replace("_", "-")].argument_types()
    places = {"dataset_name": "data", "output_dir": "out"}
    given = [{**places, name: value}]
    by_mapping, line = parse_arguments(types, given), words_of(name, resolve(types, given[0])[name])
    assert line == [f"--{name}", *words]
    assert by_mapping == parse_arguments(types, [places, *line])
    recipe = given_arguments(types, given)
    assert parse_arguments(types, [yaml.safe_load(recipe_text(recipe))]) == by_mapping


def test_places_are_a_list_or_a_text_with_commas() -> None:
    types = TASKS["masked-image-modeling"].argument_types()
    places = ["photos", "more"]
    for given in (places, tuple(places), "photos,more"):
        assert build(types, {"dataset_name": given, "output_dir": "out"})[0].sources == places
    assert build(types, {"dataset_name": ["a, b"], "output_dir": "out"})[0].sources == ["a, b"]


def test_names_in_a_list_are_those_names() -> None:
    def data_of(task: str, **options: Any) -> dict[str, Any]:
        types = TASKS[task.replace("_", "-")].argument_types()
        return parse_arguments(types, [{"dataset_name": "data", "output_dir": "out", **options}])[0].source_options()

    names = ["sky", "door, double", "[x]"]
    for task in ("semantic_segmentation", "object_detection", "universal_segmentation"):
        assert data_of(task, class_names=names)["class_names"] == names
    assert data_of("universal_segmentation", thing_classes=names)["thing_names"] == names
    assert flip_pairs_of(["nose", "left, eye", "right, eye"], ['["left, eye", "right, eye"]']) == ((1, 2),)
