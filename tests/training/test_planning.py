"""Test the choice of default hyperparameters for given data, device and time budget, and the reuse of recipes."""

import itertools
import json
import re
import shutil
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from transformers import TrainerState

from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTImageProcessor, HfViTModel
from hf_vit.data import load_semantic_segmentation
from hf_vit.data.augmentation.joint import DenseAugmentation
from hf_vit.data.datasets import Division
from hf_vit.model.pretrained import HfViTPreTrainedModel
from hf_vit.runs import build_run
from hf_vit.runs.evaluate import open_evaluation, plan_evaluation
from hf_vit.runs.plan import budget, plan
from hf_vit.runs.plan.budget import STORING_GAIN, Budget, Pace, measure_pace
from hf_vit.runs.plan.gather import measure_classes
from hf_vit.runs.plan.plan import Planner
from hf_vit.runs.plan.time_limit import TimeLimit
from hf_vit.tasks import TASKS, ImageClassification, Task
from hf_vit.tasks.base import plain_batches
from hf_vit.tasks.common import defaults
from hf_vit.tasks.common.arguments import TaskArguments
from hf_vit.tasks.common.defaults import CLASSIFICATION, DETECTION, Size, TaskDefaults, choose
from hf_vit.tasks.common.facts import Facts
from hf_vit.tasks.common.load_data import load_evaluation_targets, load_targets
from hf_vit.tasks.common.models import plan_config
from hf_vit.training import HfViTTrainingArguments
from hf_vit.training.callbacks import progress
from hf_vit.training.checkpoints import checkpoints_in
from hf_vit.training.finetuning.from_probe import choose_share, interpolate

from ..helpers.dense_trainings import write_scenes
from ..helpers.object_trainings import write_objects
from ..helpers.options import evaluation_values, given_arguments, opened_run, run, run_of


PHOTOGRAPHS = Facts(num_images=900)
OWN_ENCODER = replace(PHOTOGRAPHS, start="backbone", is_unlabeled=True, hidden_size=128)


@pytest.fixture(autouse=True)
def _import_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # The import time is set to 0, because a test session imports many more modules than a training run.
    monkeypatch.setattr(plan, "import_seconds", lambda: 0.0)


def chosen(facts: Facts, *given: str, table: TaskDefaults = CLASSIFICATION, **known: Any) -> dict[str, Any]:
    return choose(table, facts, given, {}, **known)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"use_muon": True, "whiten_patches": True, "horizontal_flip": None, "bf16": None}),
        ({"has_bf16": True, "spare_cores": 1}, {"bf16": True, "dataloader_num_workers": 1}),
        ({"native_size": 28, "is_gray": True}, {"horizontal_flip": 0.0, "auto_augment": "affine"}),
        ({"native_size": 32}, {"crop_padding": 4, "min_crop_scale": 1.0}),
        ({"start": "head", "hidden_size": 768}, {"learning_rate": 1e-4, "head_lr_multiplier": None}),
        ({"start": "backbone", "hidden_size": 768}, {"probe_classifier": True, "learning_rate": 1.5e-5}),
        ({"start": "backbone", "hidden_size": 128}, {"learning_rate": 9e-5, "trainable_blocks": None}),
        ({"start": "backbone", "is_unlabeled": True, "hidden_size": 768}, {"layer_decay": 0.75, "use_muon": None}),
        ({"start": "backbone", "num_images": 100}, {"trainable_blocks": None, "probe_classifier": True}),
        ({"has_validation": False}, {"eval_strategy": "no", "save_strategy": "steps"}),
    ],
)
def test_defaults_depend_on_the_data(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    options = chosen(replace(PHOTOGRAPHS, **changes))
    assert {name: options.get(name) for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(("table", "known"), [(CLASSIFICATION, {"steps": 800}), (defaults.DEPTH, {})])
def test_a_small_encoder_without_labels_is_trained_as_from_scratch(table: TaskDefaults, known: dict[str, int]) -> None:
    facts = {"has_bf16": True, "has_slow_sdpa": True, "num_patches": 64}
    fresh = chosen(replace(PHOTOGRAPHS, **facts), table=table, size=Size(128, 6, 64, 8), **known)
    tuned = chosen(replace(OWN_ENCODER, **facts), table=table, **known)
    # Options that are fixed if training starts from an encoder checkpoint
    encoders = {"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "patch_size"}
    encoders |= {"position_embedding_type", "pooling", "initializer_range"}
    config = fresh.pop("config_overrides")
    assert tuned.pop("config_overrides") == {name: value for name, value in config.items() if name not in encoders}
    assert tuned == {name: value for name, value in fresh.items() if name not in ("whiten_patches", "image_size")}


def test_a_small_encoder_of_another_method_keeps_its_options_and_heads_of_widths_that_divide() -> None:
    options = chosen(OWN_ENCODER, table=defaults.MASKED_IMAGES)
    assert (options.get("learning_rate"), options.get("use_muon")) == (None, None)  # the rate follows the batch
    for table in (defaults.MASKED_IMAGES, defaults.IMAGE_TEXT):
        narrow, odd = (chosen(replace(OWN_ENCODER, hidden_size=width), table=table) for width in (64, 60))
        assert narrow.get("config_overrides") == table.head(PHOTOGRAPHS, 64) != {}
        assert "config_overrides" not in odd


def test_augmentation_increases_with_the_number_of_steps() -> None:
    few, some, many = (chosen(PHOTOGRAPHS, steps=steps) for steps in (100, 1000, 10_000))
    assert [options["auto_augment"] for options in (few, some, many)] == ["none", "trivialaugment", "trivialaugment"]
    assert ["label_smoothing_factor" in options for options in (few, some, many)] == [False, True, True]
    assert ["cutmix_alpha" in options for options in (few, some, many)] == [False, False, True]
    thumbnails = replace(PHOTOGRAPHS, native_size=32, num_images=45_000)
    assert [chosen(thumbnails, steps=steps)["crop_padding"] for steps in (1400, 14_000)] == [0, 4]


def test_default_depth_augmentation_keeps_depth_values() -> None:
    options = chosen(PHOTOGRAPHS, table=defaults.DEPTH, steps=800)
    scales = options["min_scale"], options["max_scale"]
    transform = DenseAugmentation((16, 16), scale_range=scales, keep_aspect_ratio=options["keep_aspect_ratio"])
    example = {"image": Image.new("RGB", (40, 20)), "depth_map": torch.full((20, 40), 2.0)}
    assert all(torch.equal(transform(example)["depth_map"], torch.full((16, 16), 2.0)) for _ in range(3))


def test_masks_with_thin_classes_are_seen_at_larger_scales() -> None:
    # An image has 8 x 8 patches.
    size = Size(None, None, 112, 14)
    thin, thick = (replace(PHOTOGRAPHS, detail_share=share) for share in (0.04, 0.2))
    options = chosen(thin, table=defaults.SEGMENTATION, size=size)
    # The base scale is 1/8 / (2 · 0.04) = 1.5625. The minimum is half the base scale, and the maximum is twice.
    assert (options["min_scale"], options["max_scale"]) == (0.78, 3.12)
    assert "max_scale" not in chosen(thick, table=defaults.SEGMENTATION, size=size)
    assert chosen(replace(thin, detail_share=1e-3), table=defaults.SEGMENTATION, size=size)["max_scale"] == 4
    assert "max_scale" not in chosen(thin, table=defaults.SEGMENTATION)  # the image size is unknown
    assert "min_scale" not in chosen(thin, "max_scale", table=defaults.SEGMENTATION, size=size)


def test_the_width_of_classes_is_measured_without_what_is_ignored() -> None:
    mask = torch.zeros(40, 60)
    mask[:, 20:24] = 1  # a strip of class 1 that is 4 pixels wide
    mask[:10] = 255
    extents = measure_classes(mask)
    assert extents.keys() == {0, 1}
    area, half = extents[1]
    assert area / half == pytest.approx(4, rel=0.1)
    assert measure_classes(None) == {}


@pytest.mark.parametrize(
    ("given", "settled"),
    [
        ("learning_rate", {"learning_rate", "use_muon"}),
        ("lora_rank", {"learning_rate", "use_muon"}),
        ("save_strategy", {"save_strategy", "save_steps", "eval_strategy", "eval_steps"}),
        ("fp16", {"bf16"}),
        ("num_train_epochs", {"max_steps"}),
        ("mixup_alpha", {"label_smoothing_factor", "mixup_alpha", "cutmix_alpha"}),
    ],
)
def test_given_options_disable_related_defaults(given: str, settled: set[str]) -> None:
    facts = replace(PHOTOGRAPHS, has_bf16=True)
    free, rest = chosen(facts, steps=10_000), chosen(facts, given, steps=10_000)
    assert free.keys() - rest.keys() == settled
    assert rest.items() <= free.items()


def test_fields_that_are_given_stay_and_others_are_added() -> None:
    given = {"pooling": "cls", "detection_config": {"num_queries": 7}}
    options = choose(DETECTION, Facts(max_objects=20), ["pooling"], given, size=Size(128, 6, 64, 8))
    config = options["config_overrides"]
    assert (config["pooling"], config["hidden_size"]) == ("cls", 128)
    assert (config["detection_config"]["num_queries"], config["detection_config"]["num_groups"]) == (7, 4)
    assert "detection_config" not in chosen(replace(PHOTOGRAPHS, start="head"), table=DETECTION)


def test_attention_is_eager_where_it_is_faster() -> None:
    facts, small = replace(PHOTOGRAPHS, has_bf16=True, has_slow_sdpa=True), Size(128, 6, 64, 8)
    for changes, given, size, is_eager in (
        ({}, (), small, True),
        ({"num_patches": 196}, (), None, True),
        ({"num_patches": 1024}, (), None, False),
        ({}, (), None, False),  # the image size is unknown
        ({}, (), Size(384, 12, 224, 8), False),
        ({}, ("bf16",), small, False),
        ({}, ("attn_implementation",), small, False),
        ({"has_bf16": False}, (), small, False),
        ({"has_slow_sdpa": False}, (), small, False),
        ({"start": "backbone"}, (), Size(None, None, 112, 14), True),
    ):
        config = choose(DETECTION, replace(facts, **changes), given, {}, size=size).get("config_overrides", {})
        assert (config.get("attn_implementation") == "eager") is is_eager, (changes, given, size)


@pytest.mark.parametrize("kind", TASKS.values(), ids=TASKS)
def test_every_size_of_a_task_makes_a_model(kind: Any, tmp_path: Path) -> None:
    has_heads = kind.pipeline == "multi-task"
    data = ["--tasks", '{"depth-estimation": "photos"}'] if has_heads else ["--dataset_name", "photos"]
    command = [*data, "--output_dir", str(tmp_path)]
    for native in (28, 100):
        for bounded in kind.defaults.sizes(Facts(native_size=native), {}):
            options = choose(kind.defaults, Facts(native_size=native), (), {}, size=bounded)
            task = planner_of(kind, command).with_chosen(options)["task"]
            config = plan_config(task.options)
            assert bounded.image_size <= native or kind.defaults.enlarges
            assert config["image_size"] % config["patch_size"] == 0
            assert 25 <= (config["image_size"] // config["patch_size"]) ** 2 <= 800


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"image_size": 192}, {(128, 6, 192, 24), (192, 8, 192, 16), (256, 8, 192, 12)}),
        ({"patch_size": 16}, {(128, 6, 64, 16), (192, 8, 96, 16)}),
        ({"hidden_size": 96, "num_hidden_layers": 3}, {(96, 3, 64, 8), (96, 3, 112, 8)}),
    ],
)
def test_a_given_field_keeps_the_choice_of_the_others(given: dict[str, int], expected: set[tuple[int, ...]]) -> None:
    sizes = CLASSIFICATION.sizes(PHOTOGRAPHS, given)
    assert expected <= {*sizes}
    for size in filter(None, sizes):
        assert size.image_size % size.patch_size == 0
        names = ("hidden_size", "num_hidden_layers", "image_size", "patch_size")
        assert given.items() <= dict(zip(names, size, strict=True)).items()
    # Small images keep their size if it is a multiple of the given patch size.
    assert {
        size.image_size for size in CLASSIFICATION.sizes(replace(PHOTOGRAPHS, native_size=32), {"patch_size": 8})
    } == {32}


def test_saved_models_are_planned_at_several_image_sizes() -> None:
    saved = replace(PHOTOGRAPHS, start="backbone", hidden_size=384, image_size=518, patch_size=14)
    for changes, given, expected in (
        # Larger sizes are excluded, because the images have a size of 400.
        ({"native_size": 400}, {}, [112, 168, 224, 336]),
        ({"native_size": 32}, {}, [112]),
        ({"image_size": 224}, {}, [112, 168, 224]),
        ({"image_size": 64, "patch_size": 8}, {}, [64]),
        # At image sizes of 112 and 168, objects would have a size of only 9 and 13 pixels.
        ({"object_share": 0.08, "native_size": 400}, {}, [224, 336]),
        ({}, {"image_size": 256}, [None]),
        ({"image_size": None}, {}, [None]),
    ):
        sizes = CLASSIFICATION.sizes(replace(saved, **changes), given)
        assert [size and size.image_size for size in sizes] == expected, (changes, given)


def test_the_faster_precision_is_chosen(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = command_of(photos, tmp_path / "out", "--minutes", "1")
    planner, run = planner_of(ImageClassification, command), opened_run(ImageClassification, command)
    times = {True: 0.1, False: 0.1}
    monkeypatch.setattr(plan, "measure_pace", lambda run, seconds: Pace(times[run.args.bf16], 0.0))
    facts = replace(PHOTOGRAPHS, has_bf16=True, has_validation=False)
    for slower, expected in ((True, None), (False, True)):
        times[slower], times[not slower] = 0.2, 0.1
        assert planner.fit(run, facts, 1.0, 32).get("bf16") is expected


def planner_of(kind: Any, command: list[str]) -> Planner:
    run = run_of(kind, command)
    return Planner(run.task, run.args, given_arguments(kind.argument_types(), command), print)


@pytest.mark.parametrize(("minutes", "step"), [*itertools.product([1, 4, 60], [0.01, 0.1, 1.0])])
def test_a_budget_is_kept_by_the_largest_size_that_gets_its_steps(minutes: float, step: float) -> None:
    now, sizes = 5.0, list(CLASSIFICATION.ladder)
    paces: dict[Size | None, Pace] = {size: Pace(step * 2**number, 0.01) for number, size in enumerate(sizes)}

    def measure(size: Size | None) -> Pace:
        nonlocal now
        now += 5 * paces[size].step
        return paces[size]

    made = Budget(60 * minutes, num_scored=100, num_validated=90, num_probed=0, clock=lambda: now)
    choice = made.choose(sizes, 1500, measure)
    spent = now + choice.steps * choice.pace.step + choice.evaluations * 90 * 0.01 + 100 * 0.01
    assert 0.8 * made.seconds < spent <= made.seconds
    assert choice.evaluations != 1
    enough = [size for size in sizes if made.plan(size, paces[size]).steps >= 1500]
    assert choice.size in (enough or sizes[:1])
    if minutes == 60 and step > 0.01:  # the time is enough to measure the speed of all image sizes
        assert choice.size == enough[-1]


def test_features_are_stored_of_as_many_views_as_pay() -> None:
    for pace, most_bytes, views in (
        # Computing the features of all images for one augmented view takes 10 s, and training on them takes 6.25 s.
        (Pace(0.5, 0.0, 0.1, 1000), 1e9, 8),
        (Pace(0.5, 0.0, 0.5, 1000), 1e9, 4),  # computing views may take at most 40 % of the time budget
        (Pace(20.0, 0.0, 0.1, 1000), 1e9, 2),  # training has too few epochs to use more views
        (Pace(0.5, 0.0, 0.1, 1000), 5e5, 5),
        (Pace(0.5, 0.0, 2.0, 1000), 1e9, 0),
        (Pace(0.5, 0.0), 1e9, 0),
    ):
        kept = Budget(600.0, 0, 0, 0, lambda: 0.0, num_trained=100, batch=8, most_bytes=most_bytes)
        choice = kept.plan(None, pace)
        assert (choice.views, choice.steps) == (views, int((600 - 8 - views * 100 * pace.view) / pace.step)), pace


def save(model: HfViTPreTrainedModel, folder: Path) -> None:
    for part in (model, HfViTImageProcessor.for_model(model)):
        part.save_pretrained(folder)


def save_encoder(folder: Path, **shape: int) -> Path:
    defaults = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "patch_size": 8}
    save(HfViTModel(HfViTConfig(**{**defaults, **shape}), add_pooling_layer=False), folder)
    return folder


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--learning_rate", "5e-4"], {"trainable_blocks": 0, "learning_rate": 5e-4}),
        (["--trainable_blocks", "0"], {"trainable_blocks": 0, "learning_rate": defaults.FROZEN_RATE}),
        (["--trainable_blocks", "1"], {"trainable_blocks": 1, "cached_views": None}),
    ],
)
def test_heads_of_detectors_learn_from_stored_features(
    given: list[str], expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    saved = save_encoder(tmp_path / "saved", num_hidden_layers=2, image_size=32)

    def measure_in_time(task: Task, seconds: float) -> Pace:
        assert (measure_pace(task, 0.0).view > 0) is is_stored
        return Pace(20.0, 0.0, 0.01 * is_stored, 1000 * is_stored)

    is_stored = given != ["--trainable_blocks", "1"]
    monkeypatch.setattr(plan, "measure_pace", measure_in_time)
    monkeypatch.setattr(plan, "LEAST_STEPS", 1)
    monkeypatch.setattr(TimeLimit, "left", lambda limit, step: 0.0)  # the planned steps are run
    start = ["--model_name_or_path", str(saved), "--minutes", "2", *given]
    command = command_of(write_objects(tmp_path / "data"), tmp_path / "out", *start)
    report = train(command, TASKS["object-detection"])
    recipe = yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text())
    assert {name: recipe.get(name) for name in expected} == expected
    assert ("features of frozen blocks are stored" in report) is is_stored
    folders = list((tmp_path / "cache" / "hf_vit_features").glob("*"))
    # The speed measurement must not leave stored features behind.
    assert len(folders) == is_stored


@pytest.mark.parametrize(("gain", "is_stored"), [(0.9 * STORING_GAIN, False), (1.3 * STORING_GAIN, True)])
def test_features_are_stored_if_they_allow_many_more_steps(
    gain: float, is_stored: bool, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(task: Any, seconds: float) -> Pace:
        stores = bool(task.args.cached_views)
        return Pace(0.5 if stores else 0.5 * gain, 0.0, 0.001 * stores, 1000 * stores)

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(plan, "measure_pace", measure)
    saved = save_encoder(tmp_path / "saved", num_hidden_layers=6, image_size=16)
    start = ["--model_name_or_path", str(saved), "--minutes", "4", "--dry_run"]
    report = train(command_of(photos, tmp_path / "out", *start))
    assert ("features of frozen blocks are stored" in report) is is_stored


def test_given_blocks_keep_the_learning_rates_of_fine_tuning() -> None:
    facts = Facts(start="backbone", hidden_size=384, num_layers=12)
    blocks, plain = chosen(facts, "trainable_blocks"), chosen(facts)
    for name in ("learning_rate", "layer_decay", "warmup_steps"):
        assert blocks[name] == plain[name]
    assert "learning_rate" not in chosen(facts, "optim")


def write_photos(folder: Path, with_test: bool = True, color: int = 120) -> Path:
    generator = np.random.default_rng(0)
    for split, count in (("train", 20), *((("test", 4),) if with_test else ())):
        for number, name in enumerate(("cat", "dog", "fox")):
            (folder / split / name).mkdir(parents=True)
            for index in range(count):
                pixels = generator.integers(0, 120, (16, 16, 3), dtype=np.uint8)
                pixels[..., number] += color
                Image.fromarray(pixels).save(folder / split / name / f"{index}.png")
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("photos"))


def command_of(data: Path, output: Path, *options: str) -> list[str]:
    quiet = ["--use_cpu", "--disable_tqdm", "true", "--report_to", "none", "--dataloader_num_workers", "0"]
    return ["--dataset_name", str(data), "--output_dir", str(output), *quiet, *options]


SHAPE = {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "patch_size": 8}
CHANGED = {"hidden_act": "silu", "num_hidden_layers": 1}
TINY = ["--image_size", "16", "--per_device_train_batch_size", "8", "--config_overrides", json.dumps(SHAPE)]


def train(command: list[str], kind: type[Task] = ImageClassification) -> str:
    """Train a model in the same way as the training command, and return the printed report."""
    lines: list[str] = []
    run(kind, command, None, report=lines.append)
    return "\n".join(lines)


def start_clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let each step of a run take one to five seconds of a simulated clock. `seconds` are left for training steps."""
    now = 0.0

    def monotonic() -> float:
        nonlocal now
        now += 1 + now % 5
        return now

    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=monotonic))
    monkeypatch.setattr(TimeLimit, "left", lambda limit, step: seconds - now)


def logged_rates(folder: Path) -> list[float]:
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry["learning_rate"] for entry in history if "learning_rate" in entry]


def test_a_run_with_a_budget_ends_in_time_and_its_recipe_repeats_it(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_clock(monkeypatch, 100.0)
    monkeypatch.setattr(plan, "measure_pace", lambda task, seconds: Pace(step=20.0, image=0.0))
    options = [
        "--logging_steps",
        "1",
        "--progressive_sizes",
        "8",
        "16",
        "--save_total_limit",
        "9",
        "--ema_decay",
        "0.9",
    ]
    command = command_of(photos, tmp_path / "out", "--minutes", "10", *TINY, *options)
    report = train(command)
    assert f"Steps: 2{int(report.partition('Steps: 2')[2][0])} of 8 images" in report
    assert "no training images are held out" in report
    file = tmp_path / "out" / "recipe.yaml"
    recipe, record = yaml.safe_load(file.read_text()), json.loads((tmp_path / "out" / "schedule.json").read_text())
    steps, shares = recipe["max_steps"], list(record["shares"].values())
    assert "minutes" not in recipe
    assert recipe["recorded_schedule"] == "schedule.json"
    assert record["end"] == steps == len(shares) - 1
    assert steps not in (20, record["planned"])  # the clock has ended the run
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert len({round(later - earlier, 4) for earlier, later in itertools.pairwise(shares)}) > 3
    rates = logged_rates(tmp_path / "out")
    assert len(rates) == steps
    assert rates[-1] < 0.1 * max(rates)
    saved = list(checkpoints_in(tmp_path / "out"))
    assert saved[-1] == steps
    for step in saved[:-1]:  # checkpoints are saved at shares of the run
        assert shares[step] // recipe["save_steps"] > shares[step - 1] // recipe["save_steps"]

    monkeypatch.setattr(plan, "measure_pace", pytest.fail)
    monkeypatch.setattr(TimeLimit, "left", pytest.fail)
    train([str(file), "--output_dir", str(tmp_path / "again")])
    for name in ("model.safetensors", "ema/model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes(), name
    repeated = json.loads((tmp_path / "again" / "schedule.json").read_text())
    assert {**repeated, "seconds": record["seconds"]} == record
    assert logged_rates(tmp_path / "again") == rates
    with pytest.raises(SystemExit, match=f"max_steps=7 differs from the {steps} steps of recorded_schedule"):
        train([str(file), "--max_steps", "7", "--output_dir", str(tmp_path / "other")])
    (tmp_path / "recipe.yaml").write_text(file.read_text())
    with pytest.raises(SystemExit, match=r"schedule.json' does not exist, .* Copy schedule\.json next to the recipe"):
        train([str(tmp_path / "recipe.yaml"), "--output_dir", str(tmp_path / "other")])

    # Simulate a run that was killed before its end. It continues with the time that was left at the checkpoint.
    shutil.rmtree(tmp_path / "out" / f"checkpoint-{saved[-1]}")
    train([*command, "--resume_from_checkpoint", "last"])
    resumed = json.loads((tmp_path / "out" / "schedule.json").read_text())
    assert list(resumed["shares"].values())[: saved[-2] + 1] == shares[: saved[-2] + 1]
    assert resumed["end"] > saved[-2]
    assert resumed["seconds"] == pytest.approx(resumed["available"], abs=8)
    assert yaml.safe_load(file.read_text()) == {**recipe, "max_steps": resumed["end"]}
    train([str(file), "--output_dir", str(tmp_path / "third")])
    assert (tmp_path / "third/model.safetensors").read_bytes() == (tmp_path / "out/model.safetensors").read_bytes()


def test_a_budget_for_hardly_a_step_is_refused(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "measure_pace", lambda *args: Pace(step=40.0, image=0.0))
    message = r"--minutes 10 is too short: 1\d steps of 40 s fit, and at least 20 .*image_size.*max_steps"
    with pytest.raises(SystemExit, match=message):
        train(command_of(photos, tmp_path / "out", "--minutes", "10"))
    assert not (tmp_path / "out").exists()


def test_a_budget_that_ends_before_the_first_step_of_a_probe_is_refused(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "measure_pace", lambda *args: Pace(step=1.0, image=5.0))  # a probe takes 300 s
    saved = save_encoder(tmp_path / "saved", num_hidden_layers=2, image_size=16)
    with pytest.raises(SystemExit, match=r"--minutes 4 is too short: 0 steps of 1 s fit, and at least 1 are needed"):
        train(command_of(photos, tmp_path / "out", "--model_name_or_path", str(saved), "--minutes", "4"))


def test_budget_runs_at_least_twenty_steps(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "measure_pace", lambda *args: Pace(step=12.0, image=0.0))
    monkeypatch.setattr(Budget, "report_seconds", lambda *args: 0.0)
    # Simulate a machine that has become slow: after the first step, no time is left.
    monkeypatch.setattr(TimeLimit, "left", lambda limit, step: -100.0)
    train(command_of(photos, tmp_path / "out", "--minutes", "10", *TINY))
    assert json.loads((tmp_path / "out" / "trainer_state.json").read_text())["global_step"] == 20
    shares = json.loads((tmp_path / "out" / "schedule.json").read_text())["shares"].values()
    assert list(shares) == pytest.approx([step / 20 for step in range(21)])


def test_the_time_after_the_last_step_is_estimated_by_steps_and_evaluations(tmp_path: Path) -> None:
    plan_made = Budget(600.0, num_scored=100, num_validated=50, num_probed=0, clock=lambda: 0.0)
    limit = TimeLimit(plan_made, Pace(step=1.0, image=0.1), start=time.monotonic())
    for step, seconds in ((1.0, 10.0), (2.0, 20.0), (0.5, 5.0), (100.0, 40.0)):
        assert limit.left(step) == pytest.approx(600 - budget.REPORT_SECONDS - seconds, abs=1)
    args = HfViTTrainingArguments(str(tmp_path), use_cpu=True, eval_strategy="steps", ema_decay=0.9)
    limit.on_train_begin(args)
    limit.on_evaluate(args, TrainerState(), metrics={"eval_loss": 2.0, "eval_runtime": 50.0})  # 0.5 s per image
    assert limit.left(1.0) == pytest.approx(600 - budget.REPORT_SECONDS - 50 - budget.EVALUATION_SECONDS - 25, abs=1)


def test_the_only_step_of_a_training_has_no_warm_up(photos: Path, tmp_path: Path) -> None:
    train(command_of(photos, tmp_path / "new", "--max_steps", "1", *TINY, "--save_strategy", "no"))
    assert (tmp_path / "new" / "README.md").is_file()
    history = json.loads((tmp_path / "new" / "trainer_state.json").read_text())["log_history"]
    assert history[0]["learning_rate"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max_steps", "5"], "minutes 4 determines the number of steps, so --max_steps 5"),
        (["--num_train_epochs", "5"], "minutes 4 determines the number of steps, so --num_train_epochs 5"),
        (["--minutes", "0"], r"minutes=0\.0 must be at least"),
        (["--minutes", "1e-9"], r"minutes=1e-09 must be at least 0\.01"),
        (["--choose_defaults", "false"], "minutes=4 determines the number of steps"),
    ],
)
def test_invalid_budgets_raise(options: list[str], message: str, tmp_path: Path) -> None:
    command = command_of(tmp_path / "photos", tmp_path / "out", "--minutes", "4", *options)
    with pytest.raises(ValueError, match=message):
        planner_of(ImageClassification, command)
    if "--max_steps" in options:
        (tmp_path / "recipe.yaml").write_text("max_steps: 5")
        with pytest.raises(ValueError, match=message):
            planner_of(ImageClassification, [str(tmp_path / "recipe.yaml"), *command[:-2]])


def test_ten_minutes_are_the_default_if_no_length_is_given() -> None:
    for options, minutes in (
        ([], 10),
        (["--max_steps", "5"], None),
        (["--num_train_epochs", "5"], None),
        (["--image_size", "32", "--preset", "tiny", "--learning_rate", "1e-3"], 10),
        (["--model_name_or_path", "backbone", "--config_overrides", '{"pooling": "cls"}'], 10),
    ):
        planner = planner_of(ImageClassification, command_of(Path("photos"), Path("out"), *options))
        assert planner.minutes(PHOTOGRAPHS) == minutes, options
        assert planner.minutes(replace(PHOTOGRAPHS, has_gpu=True)) is None, options
        assert planner.is_planned, options


@pytest.mark.parametrize(
    ("with_test", "options", "said"),
    [
        (True, [], "60 for train, 12 for test; no training images are held out"),
        (True, ["--load_best_model_at_end", "true"], "54 for train, 6 for validation.* held out, and choose the best"),
        (False, [], "54 for train, 6 for validation.* held out, and are evaluated at the end"),
        (True, ["--choose_defaults", "false"], "54 for train, 6 for validation.* held out, and follow the training"),
    ],
)
def test_images_are_held_out_to_choose(with_test: bool, options: list[str], said: str, tmp_path: Path) -> None:
    data = write_photos(tmp_path / "photos", with_test)
    assert re.search(said, train(command_of(data, tmp_path / "out", "--max_steps", "1", *TINY, *options)))
    places = ["--model_name_or_path", str(tmp_path / "out"), "--dataset_name", str(data), "--use_cpu"]
    places += ["--split", "validation", "--output_dir", str(tmp_path / "scores")]
    planned = plan_evaluation(evaluation_values(places))
    if "no training image" not in said:
        assert len(open_evaluation(*planned).data.splits["validation"]) == 6
    else:  # without a held-out split, evaluation would use training images
        with pytest.raises(ValueError, match=r"no split 'validation'\. Choose test or train\.$"):
            open_evaluation(*planned)


@pytest.mark.parametrize("reported", ["test", "val"])
def test_a_threshold_needs_images_that_are_held_out(reported: str, tmp_path: Path) -> None:
    data = write_scenes(tmp_path / "scenes")
    (data / "val").rename(data / reported)
    args = HfViTTrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True, report_to="none")
    load, source = partial(load_semantic_segmentation, str(data)), TaskArguments(dataset_name=str(data))
    loaded = load_targets(load, source, args)
    assert (loaded.division, "validation" in loaded.splits) == (Division(0.0, False), reported == "val")
    if reported == "test":
        source.validation_as_test = True
        with pytest.raises(ValueError, match="validation_as_test=True requires a validation split"):
            load_targets(load, source, args)
    source = TaskArguments(dataset_name=str(data))
    loaded, images = load_targets(load, source, args, needs_validation=1), load().splits
    assert (loaded.division.holds_out, loaded.division.train_val_split) == (True, 0.1)
    assert len(loaded.splits["test"]) == len(images["test" if reported == "test" else "validation"])
    assert len(loaded.splits["train"]) + len(loaded.splits["validation"]) == len(images["train"])
    # An evaluation that loads the recipe of the training run selects identical splits.
    label2id = {name: number for number, name in enumerate(loaded.names)}
    source.complete({}, vars(loaded.division))
    for split in (None, "validation"):
        name, evaluated = load_evaluation_targets(load, source, split, label2id, args)
        assert (name, len(evaluated.splits[name])) == (split or "test", len(loaded.splits[name]))


@pytest.fixture(scope="module")
def dull_photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("photos"), color=60)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    shape = {"hidden_size": 24, "num_hidden_layers": 2, "intermediate_size": 48, "image_size": 16, "patch_size": 4}
    return save_encoder(tmp_path_factory.mktemp("backbone"), **shape)


def probe_command(data: Path, backbone: Path, output: Path, *options: str) -> list[str]:
    steps = ["--max_steps", "2", "--per_device_train_batch_size", "8"]
    return command_of(data, output, "--model_name_or_path", str(backbone), *steps, *options)


def test_a_fresh_classifier_starts_as_the_probe(dull_photos: Path, backbone: Path, tmp_path: Path) -> None:
    command = probe_command(dull_photos, backbone, tmp_path / "out", "--probe_classifier", "true")
    run = build_run(opened_run(ImageClassification, command))
    task, model, probe = run.task, run.trainer.model, run.probe.probe
    assert model.config.pooling == "cls_mean"
    assert probe.accuracy > 0.8
    torch.testing.assert_close(model.classifier.weight.double(), probe.weight, rtol=1e-5, atol=1e-6)
    batches = plain_batches(task, model, run.trainer.processing_class, run.data, 100, 8)
    hits = [model.eval()(batch["pixel_values"]).logits.argmax(dim=1) == batch["labels"] for batch in batches]
    assert torch.cat(hits).double().mean() >= probe.accuracy


@pytest.mark.parametrize(
    ("learning_rate", "choice"), [("30", "100% linear probe, 0% fine-tuned"), ("1e-6", "25% linear probe, 75%")]
)
def test_weights_between_probe_and_fine_tuned_model_are_saved(
    learning_rate: str, choice: str, dull_photos: Path, backbone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageClassification, "min_images_to_hold_out", 40)
    options = ["--learning_rate", learning_rate, "--warmup_steps", "0", "--bf16", "false"]
    report = train(probe_command(dull_photos, backbone, tmp_path / "out", *options))
    assert "are held out" in report
    assert "\nLinear probe: " in report
    (comparison,) = re.findall("^Saved weights: .*", report, flags=re.MULTILINE)
    assert choice in comparison
    assert "held-out images" in comparison
    saved = HfViTForImageClassification.from_pretrained(tmp_path / "out")
    then, now = HfViTModel.from_pretrained(backbone).encoder.state_dict(), saved.model.encoder.state_dict()
    assert all(torch.equal(then[name], now[name]) for name in then) == (learning_rate == "30")
    assert comparison in (tmp_path / "out" / "README.md").read_text()


def test_default_interpolation_is_kept_unless_another_is_better_beyond_noise() -> None:
    generator = np.random.default_rng(0)
    usual, noise = generator.uniform(0, 1, 100), generator.normal(0, 0.1, 100)
    noise -= noise.mean()
    losses = {0.0: usual + 1, 0.5: usual + noise - 0.005, 0.75: usual, 1.0: usual + 0.01}
    assert choose_share(losses) == 0.75
    assert choose_share({**losses, 0.5: usual + noise - 0.02}) == 0.5
    assert choose_share({**losses, 0.75: usual + np.nan}) == 0.5
    start = {"weight": torch.zeros(2), "count": torch.tensor(1)}
    end = {"weight": torch.tensor([1.0, 2.0]), "count": torch.tensor(3)}
    found = interpolate(start, end, 0.25)
    assert found["weight"].tolist() == [0.25, 0.5]
    assert found["count"] == 3
    assert interpolate(start, {**end, "weight": torch.full((2,), torch.nan)}, 0.0) == start


def test_a_probe_is_for_other_classes(dull_photos: Path, backbone: Path, tmp_path: Path) -> None:
    config = HfViTConfig.from_pretrained(backbone)
    config.id2label = {0: "car", 1: "house"}
    save(HfViTForImageClassification(config), tmp_path / "classifier")
    assert "\nLinear probe: " in train(probe_command(dull_photos, tmp_path / "classifier", tmp_path / "out"))
    # There is no linear probe if training starts from a model with the same classes.
    trained = HfViTForImageClassification.from_pretrained(tmp_path / "out")
    assert "Linear probe: " not in train(probe_command(dull_photos, tmp_path / "out", tmp_path / "again"))
    # The order of the classes does not matter.
    trained.config.id2label = dict(enumerate([*trained.config.id2label.values()][::-1]))
    save(trained, tmp_path / "reversed")
    assert "Linear probe: " not in train(probe_command(dull_photos, tmp_path / "reversed", tmp_path / "third"))
    command = ["--dataset_name", str(dull_photos), "--output_dir", str(tmp_path / "out"), "--probe_classifier", "true"]
    with pytest.raises(ValueError, match="probe_classifier=True requires a saved model"):
        run_of(ImageClassification, command)
