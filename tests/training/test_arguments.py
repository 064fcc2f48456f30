"""Test the parsing of command lines and argument files, and the rejection of invalid values."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_vit import HfViTForImageClassification
from hf_vit.options.library import options_of
from hf_vit.options.resolve import build, resolve
from hf_vit.options.training_arguments import usable_cores
from hf_vit.tasks import TASKS, ImageClassification
from hf_vit.tasks.common.arguments import ClassificationArguments
from hf_vit.tasks.common.models import load_model
from hf_vit.training import HfViTTrainingArguments

from ..helpers.models import small_config
from ..helpers.options import parse_arguments


TYPES = (ClassificationArguments, HfViTTrainingArguments)
PLACES = {"dataset_name": "photos", "output_dir": "out", "use_cpu": True}
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


def test_recipe_file_sets_options_and_later_arguments_override_it(tmp_path: Path) -> None:
    file, other = tmp_path / "recipe.yaml", tmp_path / "recipe.json"
    file.write_text(YAML)
    options, args = parse_arguments(TYPES, [str(file), "--preset", "small", "--output_dir", "out"])
    assert (options.preset, options.overrides()) == ("small", {"image_size": 96, "patch_size": [8, 16]})
    assert (options.dataset_name, options.skip_unreadable, options.max_train_samples) == ("photos", True, None)
    assert (args.save_strategy, args.learning_rate, args.label_names) == ("no", 5e-4, ["labels", "others"])
    other.write_text('{"dataset_name": "photos", "use_cpu": true, "min_crop_scale": 0.5}')
    options, _ = parse_arguments(TYPES, [str(other), "--output_dir", "out"])
    assert (options.dataset_name, options.min_crop_scale) == ("photos", 0.5)


def test_defaults_without_accelerator_are_cpu_and_no_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for has_accelerator in (False, True):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda found=has_accelerator: found)
        assert HfViTTrainingArguments("out", bf16=not has_accelerator).use_cpu is not has_accelerator
    for workers, expected in (
        ({}, (0, False)),
        ({"dataloader_num_workers": 0}, (0, False)),
        ({"dataloader_num_workers": 2}, (2, True)),
    ):
        args = HfViTTrainingArguments("out", use_cpu=True, **workers)
        assert (args.dataloader_num_workers, args.dataloader_persistent_workers) == expected


def test_processes_share_the_cores_of_their_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    for cores, launchers, processes, expected in (
        (16, 16, 1, 16),
        (16, 16, 4, 4),  # all processes share 16 cores
        (4, 16, 4, 4),  # each process has its own 4 cores
        (3, 3, 8, 1),
    ):
        bound = {True: set(range(launchers)), False: set(range(cores))}
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, bound=bound: bound[process > 0], raising=False)
        monkeypatch.setattr(sys, "platform", "linux")
        assert usable_cores() == expected
        monkeypatch.setattr(sys, "platform", "darwin")
        assert usable_cores() == 64 // processes


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("dataset_nam3: photos\n", r"Unknown option dataset_nam3\. Did you mean dataset_name "),
        ("- photos\n", r"recipe\.yaml must contain a mapping, with lines such as 'learning_rate: 0\.001'"),
        ("{}", "Set the location of the images: --dataset_name path/to/data"),
        ("box_errors: drop", "Unknown option box_errors"),
        ("{dataset_name: photos, eval_delay: soon}", "eval_delay='soon' must be a number"),
        ("max_train_samples: [1, 2]", r"max_train_samples=\[1, 2\] must be a whole number"),
        ("classification_loss: hinge", "classification_loss='hinge' must be one of cross_entropy, bce"),
        ("seed: [1", r"recipe\.yaml is neither YAML nor JSON"),
        ("seed: 1\nuse_cpu: true\nseed: 2\n", r"recipe\.yaml, line 3: the key 'seed' occurs twice"),
        ('{"config_overrides": {"hidden_size": 8, "hidden_size": 16}}', "'hidden_size' occurs twice"),
        ("max_steps: 1\nmax-steps: 2\n", "'max_steps' and 'max-steps' are the same name"),
    ],
)
def test_mistakes_in_files_are_explained(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        parse_arguments(TYPES, [str(file), "--use_cpu", "--output_dir", "out"])


def test_early_stopping_keeps_the_best_model() -> None:
    args = HfViTTrainingArguments("out", early_stopping_patience=3, use_cpu=True)
    assert args.load_best_model_at_end
    assert (args.metric_for_best_model, args.greater_is_better) == ("accuracy", True)
    assert not HfViTTrainingArguments("out", use_cpu=True).load_best_model_at_end


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
    field = name.replace("-", "_")
    parts = build(ImageClassification.argument_types(), {**PLACES, name: value})
    (found,) = (vars(part)[field] for part in parts if field in vars(part))
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
        ({"learning_rate": 0}, r"learning_rate=0\.0 must be more than 0"),
        ({"image_size": (32, -8)}, r"image_size=\(32, -8\) must be at least 1"),
        ({"learning_rat": 1}, r"Unknown option learning_rat\. Did you mean learning_rate"),
        ({"lr": 1}, r"Unknown option lr\. Did you mean learning_rate\?"),
        ({"do_train": True}, "do_train is not needed"),
        ({"max_train_samples": 0}, "max_train_samples=0 must be at least 1"),
        ({"max_eval_samples": 0}, "max_eval_samples=0 must be at least 1"),
        ({"train_val_split": 1.0}, r"train_val_split=1\.0 must lie in \[0, 1\)"),
        ({"skip_unreadable": True, "check_images": False}, "skip_unreadable requires check_images=True"),
        # Options of optimizers and learning rate schedules
        ({"layer_decay": 1.5}, r"layer_decay=1\.5 must lie in \(0, 1\]"),
        ({"head_lr_multiplier": 0.0}, r"head_lr_multiplier=0\.0 must be more than 0"),
        ({"trainable_blocks": -1}, "trainable_blocks=-1 must be at least 0"),
        ({"decay_steps": -0.5}, r"decay_steps=-0\.5 must be at least 0"),
        ({"use_muon": True, "optim": "sgd"}, "use_muon=True requires AdamW for the other weights, not optim=sgd"),
        ({"optim": "schedule_free_adamw"}, r"optim=schedule_free_adamw is not supported\. Use the default optimizer"),
        # Options of weight averaging
        ({"ema_decay": 1.0}, r"ema_decay=1\.0 must lie in \(0, 1\)"),
        ({"ema_decay": 0.0}, r"ema_decay=0\.0 must lie in \(0, 1\)"),
        # Options of adapters
        ({"lora_rank": 0}, "lora_rank=0 must be at least 1"),
        ({"lora_rank": 2, "lora_alpha": 0}, "lora_alpha=0 must be at least 1"),
        ({"lora_rank": 2, "lora_dropout": 1.0}, r"lora_dropout=1\.0 must lie in \[0, 1\)"),
        # Options of regularization
        ({"mixup_alpha": -1.0}, r"mixup_alpha=-1\.0 must be at least 0"),
        ({"mixing_off_share": 2.0}, r"mixing_off_share=2\.0 must lie in \[0, 1\]"),
        ({"token_drop_rate": 1.0}, r"token_drop_rate=1\.0 must lie in \[0, 1\)"),
        ({"bce_target_threshold": 0.0}, r"bce_target_threshold=0\.0 requires --classification_loss bce"),
        ({"classification_loss": "bce", "bce_target_threshold": 1.0}, r"=1\.0 must lie in \[0, 1\)"),
        ({"repeated_augmentations": 0}, "repeated_augmentations=0 must be at least 1"),
        # Options that exclude each other
        ({"streaming": True, "minutes": 5}, r"streaming=True and minutes=5\.0 exclude each other: a time budget"),
        (
            {"mixup_alpha": 0.2, "cached_views": 2},
            r"mixup_alpha=0\.2 and cached_views=2 exclude .* Remove one of the two",
        ),
        ({"teacher": "folder", "cached_views": 2}, "the teacher needs the images"),
        ({"torch_compile_backend": "eager", "cached_views": 2}, "torch_compile=True and cached_views=2 exclude"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(ImageClassification.argument_types(), {**PLACES, **values})


def test_options_without_effect_exclude_no_others() -> None:
    for values in (
        {"mixup_alpha": 0.0, "repeated_augmentations": 1, "torch_compile": False, "cached_views": 2},
        {"mixup_alpha": 0.2, "cached_views": 0},
    ):
        build(ImageClassification.argument_types(), {**PLACES, **values})


def test_conflicts_name_options() -> None:
    known = options_of(*(kind for task in TASKS.values() for kind in task.argument_types()))
    conflicts = {other for metadata in known.values() for other in metadata["conflicts"]}
    assert {"cached_views", "model_name_or_path", "tokenizer_name"} <= conflicts <= known.keys()


def processor_of(**options: Any) -> Any:
    arguments = ClassificationArguments(dataset_name="photos", **options)
    return load_model(HfViTForImageClassification, arguments, ["cat", "dog"])[1]


def test_a_new_model_has_the_given_colors_and_a_saved_model_keeps_its_own(tmp_path: Path) -> None:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    new = processor_of(config_overrides=small, image_mean=[0.1, 0.2, 0.3], image_std=[0.4])
    HfViTForImageClassification(small_config(num_channels=3)).save_pretrained(tmp_path)
    new.save_pretrained(tmp_path)
    saved = processor_of(model_name_or_path=str(tmp_path))
    for processor in (new, saved):
        assert (processor.image_mean, processor.image_std) == ((0.1, 0.2, 0.3), (0.4, 0.4, 0.4))
    changed = processor_of(model_name_or_path=str(tmp_path), image_mean=[0.7])
    assert (changed.image_mean, changed.image_std) == ((0.7, 0.7, 0.7), (0.4, 0.4, 0.4))
    with pytest.raises(ValueError, match="image_mean has 2 values"):
        processor_of(config_overrides=small, image_mean=[0.1, 0.2])
