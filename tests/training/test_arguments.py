"""Parsing of command lines and argument files."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_vit.options.resolve import build, resolve
from hf_vit.training import HfViTTrainingArguments, ImageClassification
from hf_vit.training.arguments import ClassificationArguments
from hf_vit.training.training_arguments import usable_cores

from ..helpers.options import parse_arguments


TYPES = (ClassificationArguments, HfViTTrainingArguments)
YAML = """
dataset_name: photos
preset: tiny
config_overrides: {image_size: 96, patch_size: [8, 16]}
learning_rate: 5e-4
skip_unreadable: true
save_strategy: no
max_train_samples: null
label_names: [labels, others]
use_cpu: true
"""


def test_a_file_stands_for_the_command_line_and_what_follows_overrides_it(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(YAML)
    options, args = parse_arguments(
        TYPES, [str(tmp_path / "recipe.yaml"), "--preset", "small", "--output_dir", str(tmp_path)]
    )
    assert (options.preset, options.overrides()) == ("small", {"image_size": 96, "patch_size": [8, 16]})
    assert (options.dataset_name, options.skip_unreadable, options.max_train_samples) == ("photos", True, None)
    assert args.save_strategy == "no"
    assert (args.learning_rate, args.label_names) == (5e-4, ["labels", "others"])
    (tmp_path / "recipe.json").write_text('{"dataset_name": "photos", "use_cpu": true, "min_crop_scale": 0.5}')
    options, _ = parse_arguments(TYPES, [str(tmp_path / "recipe.json"), "--output_dir", str(tmp_path)])
    assert (options.dataset_name, options.min_crop_scale) == ("photos", 0.5)


@pytest.mark.parametrize("has_accelerator", [False, True])
def test_the_cpu_trains_unasked_where_there_is_nothing_else(
    has_accelerator: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_accelerator)
    args = HfViTTrainingArguments(output_dir=str(tmp_path), bf16=not has_accelerator)
    assert args.use_cpu is not has_accelerator


@pytest.mark.parametrize(
    ("cores", "launchers", "processes", "expected"),
    [
        (16, 16, 1, 16),
        (16, 16, 4, 4),  # each process may use all cores
        (4, 16, 4, 4),  # each process is bound to its own cores
        (3, 3, 8, 1),
    ],
)
def test_processes_share_the_cores_of_their_job(
    cores: int, launchers: int, processes: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda process: set(range(launchers if process else cores)), raising=False
    )
    assert usable_cores() == expected
    monkeypatch.setattr(sys, "platform", "darwin")
    assert usable_cores() == 64 // processes


def test_a_cpu_trains_without_worker_processes_unless_told(tmp_path: Path) -> None:
    def workers(**options: int) -> tuple[int, bool]:
        args = HfViTTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **options)
        return args.dataloader_num_workers, args.dataloader_persistent_workers

    assert workers() == workers(dataloader_num_workers=0) == (0, False)
    assert workers(dataloader_num_workers=2) == (2, True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("dataset_nam3: photos\n", r"Unknown option dataset_nam3\. Did you mean dataset_name "),
        ("- photos\n", r"recipe\.yaml must contain a mapping, with lines such as 'learning_rate: 0\.001'"),
        ("{}", "Set the location of the images: --dataset_name path/to/data"),
        ("{dataset_name: photos, max_train_samples: 0}", "max_train_samples=0 must be at least 1"),
        ("{dataset_name: photos, max_eval_samples: 0}", "max_eval_samples=0 must be at least 1"),
        ("{dataset_name: photos, train_val_split: 1}", r"train_val_split=1\.0 must lie in \[0, 1\)"),
        (
            "{dataset_name: photos, skip_unreadable: true, check_images: false}",
            "skip_unreadable requires check_images=True",
        ),
    ],
)
def test_mistakes_are_explained(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(content)
    with pytest.raises(ValueError, match=message):
        parse_arguments(TYPES, [str(tmp_path / "recipe.yaml"), "--use_cpu", "--output_dir", str(tmp_path)])


def test_early_stopping_keeps_the_best_model(tmp_path: Path) -> None:
    args = HfViTTrainingArguments(output_dir=str(tmp_path), early_stopping_patience=3, use_cpu=True)
    assert args.load_best_model_at_end
    assert (args.metric_for_best_model, args.greater_is_better) == ("accuracy", True)
    assert not HfViTTrainingArguments(output_dir=str(tmp_path), use_cpu=True).load_best_model_at_end


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_steps", 10.0, 10),
        ("learning_rate", 1, 1.0),
        ("image_size", (32, 48), (32, 48)),
        ("image_size", 32.0, 32),
        ("report_to", ["tensorboard"], ["tensorboard"]),
        ("report_to", "none", []),
        ("config_overrides", {"patch_size": 8}, {"patch_size": 8}),
        ("config_overrides", '{"patch_size": 8}', {"patch_size": 8}),
        ("lr_scheduler_kwargs", {"num_cycles": 2}, {"num_cycles": 2}),
        ("progressive_sizes", (16, 32), [16, 32]),
        ("freeze", "model.embeddings, model.norm", ["model.embeddings", "model.norm"]),
        ("freeze", ["model.embeddings"], ["model.embeddings"]),
        ("output_dir", Path("out"), "out"),
        ("lr_scheduler_type", "linear", "linear"),
        ("dataloader-num-workers", 2, 2),
        ("auto_augment", "3augment", "3augment"),
        ("seed", None, 42),
    ],
)
def test_values_from_python_keep_their_types(name: str, value: Any, expected: Any) -> None:
    values = {"dataset_name": "photos", "output_dir": "out", "use_cpu": True, name: value}
    parts = build(ImageClassification.argument_types(), values)
    found = next(vars(part)[name.replace("-", "_")] for part in parts if name.replace("-", "_") in vars(part))
    assert found == expected
    assert type(found) is type(expected) or isinstance(found, str | list)
    assert resolve((HfViTTrainingArguments,), {"fsdp": True}) == {"fsdp": True}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_steps": 10.5}, r"max_steps=10\.5 must be a whole number\."),
        ({"max_steps": "10"}, r"max_steps='10' must be a whole number\."),
        ({"max_steps": True}, "max_steps=True must be a whole number"),
        ({"bf16": "yes"}, "bf16='yes' must be true or false"),
        ({"image_size": (32, 48, 3)}, r"image_size=\(32, 48, 3\) must be a whole number or a tuple of 2"),
        ({"config_overrides": "patch_size"}, "config_overrides='patch_size' must be a mapping"),
        ({"config_overrides": "image_size=96"}, "config_overrides=.* must be a mapping, or its JSON"),
        ({"config_overrides": "[96]"}, "config_overrides=.* must be a mapping, or its JSON"),
        ({"auto_augment": "much"}, "auto_augment='much' must be one of none, trivialaugment"),
        ({"lr_scheduler_type": "steep"}, "lr_scheduler_type='steep' must be one of linear, cosine"),
        ({"log_level": "loud"}, "log_level='loud' is unknown. Choose one of"),
        ({"image_size": -8}, "image_size=-8 must be at least 1"),
        ({"image_size": (32, -8)}, r"image_size=\(32, -8\) must be at least 1"),
        ({"learning_rat": 1}, r"Unknown option learning_rat\. Did you mean learning_rate"),
        ({"lr": 1}, r"Unknown option lr\. Did you mean learning_rate\?"),
        ({"do_train": True}, "do_train is not needed"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(ImageClassification.argument_types(), {"dataset_name": "photos", "output_dir": "out", **values})
