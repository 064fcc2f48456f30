"""Test the training of several heads on one backbone: order of tasks, loss weights, processes, resume and report."""

import json
import logging
import math
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import hf_vit
from hf_vit import (
    HfViTForDepthEstimation,
    HfViTForMultiTask,
    HfViTForObjectDetection,
    HfViTImageProcessor,
    HfViTModel,
)
from hf_vit.convert.model_card import read_card_data
from hf_vit.data.augmentation.datasets import AugmentedDataset
from hf_vit.data.augmentation.multi_task import MultiTaskDataset, TaskSampler
from hf_vit.model.task_configurations import TASK_CONFIGS
from hf_vit.runs import Run, build_run, open_run
from hf_vit.runs.evaluate import evaluate
from hf_vit.runs.run import train
from hf_vit.tasks import TASKS
from hf_vit.training.multi_task import NUM_MEASURED, LossWeights

from ..helpers.dense_trainings import CONFIG
from ..helpers.fresh import run_command
from ..helpers.models import small_config


DETECTION = {"detection_config": CONFIG["detection_config"]}
HEADS: dict[str, dict[str, Any]] = {
    "rooms": {"task": "depth-estimation", "head": "conv"},
    "cells": {"task": "object-detection", "config_overrides": DETECTION},
}
OPTIONS: dict[str, Any] = {
    **{"image_size": 24, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 2, "max_steps": 12},
    **{"use_cpu": True, "disable_tqdm": True, "report_to": "none", "choose_defaults": False, "learning_rate": 1e-3},
    **{"save_strategy": "steps", "save_steps": 6, "eval_strategy": "no", "check_images": False},
    "config_overrides": {name: value for name, value in CONFIG.items() if name not in TASK_CONFIGS},
}


@pytest.fixture(scope="module")
def places(scenes: Path, objects: Path) -> dict[str, Any]:
    """Return the heads with their data."""
    return {name: {**head, "data": str(objects if name == "cells" else scenes)} for name, head in HEADS.items()}


@pytest.fixture(scope="module")
def trained(places: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output folder of a training run."""
    folder = tmp_path_factory.mktemp("multi_task") / "both"
    train(TASKS["multi-task"], {**OPTIONS, "tasks": places, "output_dir": str(folder)}, lambda _: None)
    return folder


def examples(count: int) -> AugmentedDataset:
    return AugmentedDataset([{"number": number} for number in range(count)], dict, seed=0, column=None)


def test_steps_follow_the_shares_and_use_all_examples() -> None:
    parts = {"large": examples(30), "small": examples(4)}
    dataset = MultiTaskDataset([], dict, seed=1, parts=parts, shares={"large": 3.0, "small": 1.0})
    sampler = TaskSampler(dataset, step_size=2)
    keys = []
    for epoch in range(3):
        dataset.set_epoch(epoch)
        keys += list(sampler)
        assert len(keys) == (epoch + 1) * len(sampler)
    steps = [keys[start : start + 2] for start in range(0, len(keys), 2)]
    assert all(first[0] == second[0] for first, second in steps)
    assert Counter(step[0][0] for step in steps[:16]) == {"large": 12, "small": 4}
    assert all(Counter(step[0][0] for step in steps[at : at + 4])["small"] == 1 for at in range(0, 16, 4))
    own = [key[1:] for key in keys if key[0] == "small"]
    assert [sorted(index for index, _ in own[at : at + 4]) for at in (0, 4, 8)] == [[0, 1, 2, 3]] * 3
    assert [repeat for _, repeat in own[:12]] == [0] * 4 + [1] * 4 + [2] * 4
    dataset.set_epoch(1)
    assert list(sampler) == keys[len(sampler) : 2 * len(sampler)]  # a resumed run needs no earlier epoch
    assert dataset["small", 2, 1] == {"head": "small", "example": {"number": 2}}


def test_weights_equalize_the_gradients_on_the_backbone() -> None:
    model = HfViTModel(small_config())
    callback = LossWeights({"rooms": 1.0, "cells": 2.0}, is_scaled=True)
    weight = model.norm.weight
    for _ in range(NUM_MEASURED):
        assert callback.weights == {"rooms": 1.0, "cells": 2.0}
        for name, scale in (("rooms", 3.0), ("cells", 12.0)):
            weight.grad = nn.functional.normalize(torch.ones_like(weight), dim=0) * scale
            callback.head = name
            callback.on_pre_optimizer_step(model=model)
    assert callback.weights == pytest.approx({"rooms": 7.5 / 3, "cells": 2 * 7.5 / 12})
    weight.grad = torch.ones_like(weight)
    callback.on_pre_optimizer_step(model=model)
    assert weight.grad[0].item() == pytest.approx(2 * 7.5 / 12)
    weight.grad = None  # a frozen backbone
    callback.on_pre_optimizer_step(model=model)


def test_all_heads_are_trained_reported_and_open_alone(trained: Path, places: dict[str, Any], tmp_path: Path) -> None:
    card = (trained / "README.md").read_text()
    assert "| rooms abs_rel |" in card
    assert "| cells map_50 |" in card
    assert "![rooms: Image, truth and prediction](rooms/" in card
    warnings = read_card_data(str(trained)).get("warnings")
    assert any(re.fullmatch(r"cells: Only \d+ of \d+ objects are found \(.*\)\.", text) for text in warnings)
    assert warnings[-1].startswith("12 steps are too few to train a model from scratch.")
    weights = json.loads((trained / "checkpoint-12" / "loss_weights.json").read_text())
    assert {name: len(norms) for name, norms in weights.items()} == dict.fromkeys(HEADS, NUM_MEASURED)
    assert "parameters for several tasks: rooms (depth estimation), cells (object " in card
    logs = json.loads((trained / "trainer_state.json").read_text())["log_history"]
    assert {"rooms_loss", "cells_loss", "loss"} <= {name for entry in logs for name in entry}
    model = HfViTForMultiTask.from_pretrained(trained)
    assert {name: head["task"] for name, head in model.config.heads.items()} == {
        name: head["task"] for name, head in HEADS.items()
    }
    assert model.config.heads["cells"]["processor"]["size"] == {"height": 24, "width": 24}
    start, end = (load_file(trained / name / "model.safetensors") for name in ("checkpoint-6", "checkpoint-12"))
    moved = {key for key in end if not torch.equal(start[key], end[key])}
    assert {key for key in end if key.startswith(("heads.", "model.encoder"))} - moved == set()
    assert not HfViTForObjectDetection.from_pretrained(trained).untrained_weights
    assert HfViTForDepthEstimation.from_pretrained(trained).options.head == "conv"
    saved = {"model_name_or_path": str(trained), "head": "rooms", "dataset_name": places["rooms"]["data"]}
    evaluate({**saved, "output_dir": str(tmp_path), "use_cpu": True, "disable_tqdm": True}, lambda _: None)
    alone = json.loads((tmp_path / "validation_scores.json").read_text())
    assert alone == pytest.approx(json.loads((trained / "rooms" / "validation_scores.json").read_text()), rel=1e-5)
    with pytest.raises(SystemExit, match=r"has several heads\. Set --head to one of cells, rooms"):
        evaluate({"model_name_or_path": str(trained), "dataset_name": places["rooms"]["data"]}, lambda _: None)


def test_a_report_does_not_drop_paths(places: dict[str, Any], tmp_path: Path) -> None:
    config = {**OPTIONS["config_overrides"], "drop_path_rate": 0.5}
    options = {**OPTIONS, "tasks": places, "config_overrides": config, "max_steps": 2, "save_strategy": "no"}
    train(TASKS["multi-task"], {**options, "output_dir": str(tmp_path / "both")}, lambda _: None)
    saved = {"model_name_or_path": str(tmp_path / "both"), "head": "rooms", "dataset_name": places["rooms"]["data"]}
    evaluate({**saved, "output_dir": str(tmp_path / "rooms"), "use_cpu": True, "disable_tqdm": True}, lambda _: None)
    alone, trained = (
        json.loads((folder / "rooms" / "validation_scores.json").read_text())
        for folder in (tmp_path, tmp_path / "both")
    )
    assert alone == pytest.approx(trained, rel=1e-5)


def test_an_evaluation_uses_the_data_options_of_its_head(scenes: Path, tmp_path: Path) -> None:
    masks = {"universal_segmentation_config": CONFIG["universal_segmentation_config"]}
    things = {"task": "universal-segmentation", "thing_classes": "cat,dog", "validation_as_test": False}
    tasks = {"rooms": {**HEADS["rooms"], "depth_scale": 700.0}, "things": {**things, "config_overrides": masks}}
    tasks = {name: {**head, "data": str(scenes)} for name, head in tasks.items()}
    options = {**OPTIONS, "tasks": tasks, "output_dir": str(tmp_path / "both"), "max_steps": 2, "save_strategy": "no"}
    train(TASKS["multi-task"], options, lambda _: None)
    for head in tasks:
        saved = {"model_name_or_path": str(tmp_path / "both"), "head": head, "dataset_name": str(scenes)}
        evaluate({**saved, "output_dir": str(tmp_path / head), "use_cpu": True, "disable_tqdm": True}, lambda _: None)
        alone, trained = (
            {name: math.nan if score is None else score for name, score in json.loads(file.read_text()).items()}
            for file in (folder / head / "validation_scores.json" for folder in (tmp_path, tmp_path / "both"))
        )
        assert alone == pytest.approx(trained, rel=1e-5, nan_ok=True)


@pytest.mark.parametrize("blocks", [0, 1])
def test_stored_features_do_not_change_the_training(
    blocks: int, places: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    plain = {
        "horizontal_flip": 0.0,
        "photometric": 0.0,
        "min_scale": 1.0,
        "max_scale": 1.0,
        "keep_aspect_ratio": False,
    }
    decoder = {"detection_config": {**DETECTION["detection_config"], "num_blocks": 1}}
    tasks = {name: {**head, **plain} for name, head in places.items()}
    tasks["cells"]["config_overrides"] = decoder
    options = {**OPTIONS, "tasks": tasks, "save_strategy": "no", "trainable_blocks": blocks, "logging_steps": 1}
    losses, weights, reported = [], [], list[str]()
    for views in (0, 2, 2):
        folder = tmp_path / f"{len(losses)}"
        train(TASKS["multi-task"], {**options, "cached_views": views, "output_dir": str(folder)}, reported.append)
        logs = json.loads((folder / "trainer_state.json").read_text())["log_history"]
        losses.append([entry["loss"] for entry in logs if "loss" in entry])
        weights.append(load_file(folder / "model.safetensors"))
    assert losses[1] == losses[2] == pytest.approx(losses[0], rel=1e-4)
    for key, value in weights[0].items():
        torch.testing.assert_close(weights[1][key], value, rtol=1e-3, atol=1e-4)
    lines = [line for line in reported if line.startswith("Frozen features")]
    assert ["reused" in line for line in lines] == [False, False, True, True]


def test_a_universal_head_on_a_frozen_backbone_adds_blocks(scenes: Path, tmp_path: Path) -> None:
    masks = {"universal_segmentation_config": CONFIG["universal_segmentation_config"]}
    tasks = {"universal-segmentation": {"data": str(scenes), "thing_classes": "cat,dog", "config_overrides": masks}}
    task, args = TASKS["multi-task"].from_options({**OPTIONS, "tasks": tasks, "output_dir": str(tmp_path)})
    for blocks, head in ((None, "queries"), (0, "mask")):
        args.trainable_blocks = blocks
        assert build_run(open_run(Run(task, args))).trainer.model.heads["universal_segmentation"].options.head == head


def test_weights_of_a_published_backbone_are_reported_once(
    places: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(image_size=24)
    HfViTModel(config).save_pretrained(tmp_path / "backbone")
    HfViTImageProcessor.for_model(config).save_pretrained(tmp_path / "backbone")
    library, reports = logging.getLogger("transformers.modeling_utils"), list[str]()
    monkeypatch.setattr(library, "filters", [lambda record: not reports.append(record.getMessage())])
    options = {name: value for name, value in OPTIONS.items() if name != "config_overrides"}
    options |= {"model_name_or_path": str(tmp_path / "backbone"), "max_steps": 1, "save_strategy": "no"}
    train(TASKS["multi-task"], {**options, "tasks": places, "output_dir": str(tmp_path / "both")}, lambda _: None)
    assert sum("LOAD REPORT" in report for report in reports) == 1


def test_a_resumed_run_equals_an_uninterrupted_one(trained: Path, places: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "both"
    shutil.copytree(trained / "checkpoint-6", folder / "checkpoint-6")
    options = {**OPTIONS, "tasks": places, "output_dir": str(folder), "resume_from_checkpoint": "last"}
    train(TASKS["multi-task"], options, lambda _: None)
    whole, resumed = load_file(trained / "model.safetensors"), load_file(folder / "model.safetensors")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def test_a_run_with_a_segmentation_head_resumes(scenes: Path, tmp_path: Path) -> None:
    tasks = {"floors": {"task": "semantic-segmentation", "data": str(scenes)}}
    options = {**OPTIONS, "tasks": tasks, "output_dir": str(tmp_path), "max_steps": 2, "save_steps": 1}
    train(TASKS["multi-task"], options, lambda _: None)
    whole = load_file(tmp_path / "model.safetensors")
    resumed = {**options, "resume_from_checkpoint": str(tmp_path / "checkpoint-1")}
    train(TASKS["multi-task"], resumed, lambda _: None)
    again = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(whole[key], again[key]) for key in whole)


def test_two_processes_train_as_one(trained: Path, places: dict[str, Any], tmp_path: Path) -> None:
    recipe = tmp_path / "tasks.yaml"
    options = {**OPTIONS, "per_device_train_batch_size": 2, "save_strategy": "no", "tasks": places}
    recipe.write_text(json.dumps(options))
    process = run_command("train multi-task", tmp_path, str(recipe), "--output_dir", "two", processes=2)
    assert process.returncode == 0, process.stderr
    whole, shared = load_file(trained / "model.safetensors"), load_file(tmp_path / "two" / "model.safetensors")
    for key, value in whole.items():
        torch.testing.assert_close(shared[key], value, rtol=1e-3, atol=1e-4)
    scores = [
        json.loads((place / "rooms" / "validation_scores.json").read_text()) for place in (trained, tmp_path / "two")
    ]
    assert scores[0] == pytest.approx(scores[1], rel=1e-3)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({}, "Name the heads in a recipe"),
        ({"rooms": {"data": "x"}}, "rooms has the task 'rooms'. Set task to one of image-classification"),
        ({"depth-estimation": {"head": "conv"}}, "depth-estimation has no data"),
        ({"depth-estimation": {"data": "x", "share": 0}}, "has the share 0. Set it to a positive number"),
        ({"depth-estimation": {"data": "x", "share": "half"}}, "has the share 'half'"),
        ({"depth-estimation": {"data": "x", "weight": True}}, "has the weight True. Set it to a positive number"),
        ({"depth-estimation": {"data": "x", "weight": float("inf")}}, "has the weight inf. Set it to a positive"),
        ({"my-head": {"data": "x"}, "my_head": {"data": "y"}}, "'my-head' and 'my_head' are the same name"),
        ({"depth-estimation": {"data": "x", "image-size": 32}}, "has image_size, which all heads share"),
        ({"depth-estimation": {"data": "x", "image_size": 32}}, "has image_size, which all heads share"),
        ({"depth-estimation": 3}, "is 3, not a mapping"),
        ({"depth-estimation": {"data": "x", "decoder": "queries"}}, "Unknown option decoder"),
    ],
)
def test_errors_in_the_recipe_are_reported(tasks: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        train(TASKS["multi-task"], {**OPTIONS, "tasks": tasks, "output_dir": str(tmp_path)}, lambda _: None)


@pytest.mark.parametrize("weighting", ["fixed", "uncertainty"])
def test_other_loss_weights(weighting: str, places: dict[str, Any], tmp_path: Path) -> None:
    weighted = {**places, "rooms": {**places["rooms"], "weight": 3.0}}
    options = {**OPTIONS, "tasks": weighted, "output_dir": str(tmp_path), "max_steps": 4, "save_strategy": "no"}
    data = options.pop("tasks")
    result = hf_vit.train("multi-task", data, report=lambda _: None, loss_weighting=weighting, **options)
    scores = result.scores
    assert scores[result.metric] == pytest.approx(3 * scores["rooms loss"] + scores["cells loss"])
    weights = load_file(tmp_path / "model.safetensors")
    assert (
        f"{weighting}: cells 1, rooms 3" in (tmp_path / "README.md").read_text()
        or weighting in (tmp_path / "README.md").read_text()
    )
    assert ("uncertainty.log_variances" in weights) == (weighting == "uncertainty")
    if weighting == "uncertainty":
        assert (weights["uncertainty.log_variances"] != 0).all()
    assert not HfViTForDepthEstimation.from_pretrained(tmp_path).untrained_weights


def test_training_continues_from_a_model_with_the_same_heads(
    trained: Path, places: dict[str, Any], tmp_path: Path
) -> None:
    options = {name: value for name, value in OPTIONS.items() if name not in ("config_overrides", "image_size")}
    options |= {"model_name_or_path": str(trained), "max_steps": 2, "learning_rate": 1e-9, "save_strategy": "no"}
    data = {name: {key: head[key] for key in head if key != "config_overrides"} for name, head in places.items()}
    train(TASKS["multi-task"], {**options, "tasks": data, "output_dir": str(tmp_path)}, lambda _: None)
    start, end = (load_file(folder / "model.safetensors") for folder in (trained, tmp_path))
    assert all(torch.allclose(start[key], end[key], atol=1e-6) for key in start)
    heads = [HfViTForMultiTask.from_pretrained(folder).config.heads for folder in (trained, tmp_path)]
    assert heads[0]["rooms"] == heads[1]["rooms"]
    renamed = {"objects": data["cells"], "cells": data["rooms"]}
    train(TASKS["multi-task"], {**options, "tasks": renamed, "output_dir": str(tmp_path / "new")}, lambda _: None)
    assert set(HfViTForMultiTask.from_pretrained(tmp_path / "new").config.heads) == {"objects", "cells"}
