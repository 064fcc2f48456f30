"""Test that training on stored features gives the same results as training on the images."""

import copy
import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file

from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTImageProcessor
from hf_vit.data import AugmentedDataset, ImageClassificationCollator
from hf_vit.data.augmentation.classification import small_affine
from hf_vit.data.fingerprint import FEATURE_FOLDER
from hf_vit.model.encoder import HfViTLayer
from hf_vit.outputs import RECORD
from hf_vit.runs import build_run
from hf_vit.training import HfViTTrainer, HfViTTrainingArguments
from hf_vit.training.finetuning import frozen_features
from hf_vit.training.optimizer import find_backbone

from ..helpers.datasets import load_digits
from ..helpers.dense_trainings import ALL_TASKS, CONFIG, arguments_of, write_scenes
from ..helpers.image_text_trainings import make_trainer as make_image_text_trainer
from ..helpers.image_text_trainings import write_captions
from ..helpers.object_trainings import write_figures, write_objects
from ..helpers.options import opened_run
from ..helpers.references import assert_identical, draw_weights
from ..helpers.seeds import seed_everything
from ..helpers.trainings import DIGITS_CONFIG, NUM_TRAIN, logged


SHORT = ["--max_steps", "4", "--logging_steps", "1", "--eval_strategy", "no", "--save_strategy", "no"]
SHORT += ["--learning_rate", "1e-3"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the temporary folder in which features are stored."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache" / FEATURE_FOLDER


@pytest.fixture
def block_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that records the number of images in each call of an encoder block."""
    calls: list[int] = []
    forward = HfViTLayer.forward

    def counted(self: HfViTLayer, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(len(hidden_states))
        return forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(HfViTLayer, "forward", counted)
    return calls


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the data folder of each task."""
    folder = tmp_path_factory.mktemp("data")
    objects = {"object_detection": write_objects(folder / "objects")}
    objects["keypoint_detection"] = write_figures(folder / "figures")
    scenes = dict.fromkeys(ALL_TASKS, write_scenes(folder / "scenes"))
    return {**scenes, **objects, "zero_shot": write_captions(folder / "captions")}


def trainer_of(task: str, data: Path, folder: Path, *options: str) -> HfViTTrainer:
    """Return the trainer of a task. Its model has random weights; detection models keep their initial weights."""
    seed_everything(0)
    if task == "zero_shot":
        trainer = make_image_text_trainer(data, folder, *SHORT, *options)
    else:
        made = opened_run(ALL_TASKS[task], arguments_of(task, data, folder, *SHORT, *options))
        trainer = build_run(made).trainer
    if task != "object_detection":  # with random weights, detection models would predict useless boxes
        draw_weights(trainer.model)
    return trainer


QUERIES = {"decoder": "queries", "num_queries": 20, "num_layers": 0, "num_blocks": 1}
DEFORMABLE = {"decoder": "deformable", "num_queries": 5, "out_indices": [1, 2]}
WITH_QUERIES, WITH_LEVELS = (
    ("--config_overrides", json.dumps({**CONFIG, "detection_config": head})) for head in (QUERIES, DEFORMABLE)
)
DPT = ("--config_overrides", json.dumps({**CONFIG, "depth_config": {**CONFIG["depth_config"], "head": "dpt"}}))
CASES = [
    ("universal_segmentation", 0, ()),
    ("universal_segmentation", 0, ("--head", "mask")),
    *(
        (task, blocks, options)
        for blocks in (0, 1)
        for task, options in (
            *(("semantic_segmentation", ()), ("keypoint_detection", ()), ("zero_shot", ())),
            *(("depth_estimation", ()), ("depth_estimation", DPT)),
            *(("object_detection", WITH_QUERIES), ("object_detection", WITH_LEVELS)),
        )
    ),
]


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("task", "blocks", "options"), CASES)
def test_losses_are_those_of_the_images(
    task: str, blocks: int, options: tuple[str, ...], data: dict[str, Path], tmp_path: Path
) -> None:
    losses, weights = [], []
    for views in (0, 2):  # each run has 4 steps in 2 epochs
        frozen = ("--trainable_blocks", str(blocks), "--cached_views", str(views))
        trainer = trainer_of(task, data[task], tmp_path / str(views), *frozen, *options)
        before = copy.deepcopy(dict(find_backbone(trainer.model).state_dict()))
        trainer.train()
        losses.append(torch.tensor(logged(trainer, "loss")))
        weights.append(trainer.model.state_dict())
        backbone = find_backbone(trainer.model)
        assert backbone is not None
        if blocks == 0:
            assert_identical(dict(backbone.state_dict()), before)
    assert len(losses[0]) == 4
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
    assert weights[1].keys() == weights[0].keys()
    assert "forward" not in vars(backbone.embeddings) | vars(backbone.encoder.layers[0])


OPTIONS: dict[str, Any] = {
    **{"trainable_blocks": 1, "cached_views": 2, "per_device_train_batch_size": 8, "num_train_epochs": 2},
    **{"use_cpu": True, "disable_tqdm": True, "report_to": "none", "eval_strategy": "no", "logging_steps": 1},
}
DROPOUT = {"hidden_dropout_prob": 0.1, "num_hidden_layers": 3}


def train_digits(folder: Path, checkpoint: Path | None = None, **options: Any) -> tuple[HfViTTrainer, list[str]]:
    """Train a classifier of digits on stored features. Return the trainer and its reports."""
    seed_everything(0)
    config = HfViTConfig.from_preset("mnist", **{**DIGITS_CONFIG, **DROPOUT})
    trainer = HfViTTrainer(
        model=HfViTForImageClassification(config),
        args=HfViTTrainingArguments(str(folder), **{**OPTIONS, **options}),
        train_dataset=AugmentedDataset(load_digits()["train"].select(range(NUM_TRAIN)), small_affine(), seed=0),
        data_collator=ImageClassificationCollator(HfViTImageProcessor.for_model(config)),
    )
    reported: list[str] = []
    if options.get("cached_views", OPTIONS["cached_views"]):
        trainer.open_features(report=reported.append)
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    return trainer, reported


@pytest.mark.parametrize("blocks", [0, 1])
def test_a_classifier_reads_features_and_no_image(
    blocks: int, cache: Path, tmp_path: Path, block_calls: list[int]
) -> None:
    def written() -> dict[Path, int]:
        return {file: file.stat().st_mtime_ns for file in cache.rglob("*") if file.is_file() and file.name != RECORD}

    plain, _ = train_digits(tmp_path / "plain", cached_views=0, trainable_blocks=blocks)
    first, reported = train_digits(tmp_path / "first", trainable_blocks=blocks)
    torch.testing.assert_close(logged(first, "loss"), logged(plain, "loss"), rtol=1e-5, atol=1e-5)
    assert f"Frozen features ({2 if blocks else 'pooled'}): " in reported[0]
    assert "1 of" not in reported[0]
    assert reported[0].count("computed") == 1
    files = written()
    assert [file.suffix for file in files] == [".arrow", ".arrow"]
    block_calls.clear()
    again, reported = train_digits(tmp_path / "again", trainable_blocks=blocks)
    assert "; reused in " in reported[0]
    assert written() == files
    assert logged(again, "loss") == logged(first, "loss")
    # Only trainable blocks process whole batches. Frozen blocks process only a few images, to identify the stored
    # features.
    assert sum(size == 8 for size in block_calls) == blocks * again.state.global_step
    again.save_model(str(tmp_path / "saved"))
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == dict(again.model.named_parameters()).keys()
    HfViTForImageClassification.from_pretrained(tmp_path / "saved")


def test_an_interrupted_extraction_keeps_whole_files(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen_features, "ROWS_PER_SHARD", 16)
    train_digits(tmp_path / "whole", max_steps=1)
    contents = {file: file.read_bytes() for file in cache.rglob("*.arrow")}
    sorted(contents)[1].unlink()
    _, reported = train_digits(tmp_path / "again", max_steps=1)
    assert f"1 of {len(contents)} files computed" in reported[0]
    assert {file: file.read_bytes() for file in cache.rglob("*.arrow")} == contents


def test_the_progress_bar_of_an_extraction_ends_at_the_number_of_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(frozen_features, "ROWS_PER_SHARD", 24)  # does not divide the number of images
    train_digits(tmp_path, max_steps=1, disable_tqdm=False)
    count = 2 * NUM_TRAIN
    assert re.findall(r"Features: +(\d+)%\|[^|]*\| (\d+)/(\d+) ", capsys.readouterr().err)[-1] == (
        "100",
        str(count),
        str(count),
    )


@pytest.mark.parametrize("damage", ["number", "zeros", "truncated"])
def test_damaged_features_are_computed_again(
    damage: str, cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, _ = train_digits(tmp_path / "first")
    contents = {file: file.read_bytes() for file in cache.rglob("*.arrow")}
    file, content = max(contents.items())
    middle = len(content) // 2
    damaged = {
        "number": content[:middle] + bytes([content[middle] ^ 0x40]) + content[middle + 1 :],
        "zeros": bytes(len(content)),
        "truncated": content[:middle],
    }
    file.write_bytes(damaged[damage])
    again, reported = train_digits(tmp_path / "again")
    assert f"1 of {len(contents)} files computed" in reported[0]
    assert f"{file} does not match its checksum" in caplog.text
    assert {file: file.read_bytes() for file in cache.rglob("*.arrow")} == contents
    assert logged(again, "loss") == logged(first, "loss")


def test_a_training_on_features_resumes_bit_for_bit(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 3, "save_total_limit": 9}
    whole, _ = train_digits(tmp_path / "whole", **options)
    resumed, _ = train_digits(tmp_path / "resumed", tmp_path / "whole" / "checkpoint-3", **options)
    assert_identical(resumed.model.state_dict(), whole.model.state_dict())


def test_other_weights_and_transforms_have_features_of_their_own(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"2 views take .*, more than cache_gigabytes=1e-05.*cached_views.*float16"):
        train_digits(tmp_path, cache_gigabytes=1e-5)
    assert not cache.exists()
    for options in ({}, {"trainable_blocks": 2}, {"cached_views": 3}):
        train_digits(tmp_path, max_steps=1, **options)
    assert sorted(len(list(folder.glob("*.arrow"))) for folder in cache.iterdir()) == [2, 3]


def test_windows_have_features_of_their_own(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DROPOUT, "window_size", 2)
    for layers in ([0], [1]):
        monkeypatch.setitem(DROPOUT, "global_attention_layers", layers)
        train_digits(tmp_path, max_steps=1)
    assert len(list(cache.iterdir())) == 2


def test_float16_cache_halves_the_size_and_reports_its_error(cache: Path, tmp_path: Path) -> None:
    exact, _ = train_digits(tmp_path / "exact")
    half, reported = train_digits(tmp_path / "half", cache_dtype="float16")
    error = float(re.search(r", (\S+) off float32;", reported[0])[1])
    assert 1e-5 < error < 1e-3
    torch.testing.assert_close(logged(half, "loss"), logged(exact, "loss"), rtol=5e-3, atol=5e-3)
    sizes = sorted(sum(file.stat().st_size for file in folder.iterdir()) for folder in cache.iterdir())
    assert sizes[0] < 0.7 * sizes[1]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"trainable_blocks": None}, "no block of the model is frozen"),
        ({"trainable_blocks": 3}, "no block of the model is frozen"),
        ({"repeated_augmentations": 2}, "a step needs several views"),
        ({"progressive_sizes": [16, 28]}, "the images change in each step"),
    ],
)
def test_options_incompatible_with_cached_views_raise(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"cached_views=2 .*{reason}"):
        train_digits(tmp_path, **options)


class Brighten:
    """Batch transform of the images or, if features are stored, of nothing."""

    def __init__(self, supports: bool | None) -> None:
        if supports is not None:
            self.supports_stored_features = supports

    def __call__(self, batch: dict[str, Any], progress: float) -> dict[str, Any]:
        return batch


@pytest.mark.parametrize("supports", [True, False, None])
def test_batch_transforms_declare_whether_they_support_stored_features(supports: bool | None, tmp_path: Path) -> None:
    def trainer() -> HfViTTrainer:
        config = HfViTConfig.from_preset("mnist", **{**DIGITS_CONFIG, **DROPOUT})
        return HfViTTrainer(
            model=HfViTForImageClassification(config),
            args=HfViTTrainingArguments(str(tmp_path), **OPTIONS),
            train_dataset=AugmentedDataset(load_digits()["train"].select(range(NUM_TRAIN)), small_affine(), seed=0),
            data_collator=ImageClassificationCollator(HfViTImageProcessor.for_model(config)),
            batch_transforms=[Brighten(supports)],
        )

    with nullcontext() if supports else pytest.raises(ValueError, match=r"cached_views=2 .*batch transforms change"):
        assert len(trainer().batch_transforms.transforms) == 1
