"""Test the training of classifiers: data, augmentation, streams, collators, safe saving, model cards, throughput."""

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image
from transformers import EvalPrediction, Trainer, TrainingArguments, default_data_collator

from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTImageProcessor
from hf_vit.data import DIGITS_INFO, AugmentedDataset, ImageClassificationCollator, hold_out, load_digits_dataset
from hf_vit.data.augmentation.classification import small_affine
from hf_vit.flops import forward_flops, peak_flops
from hf_vit.runs import Run, TrainingInfo, build_run, write_model_card
from hf_vit.runs.evaluate import open_evaluation, plan_evaluation
from hf_vit.runs.model_card import describe_hardware
from hf_vit.runs.report import count_examples
from hf_vit.tasks import ImageClassification
from hf_vit.training import HfViTTrainer, HfViTTrainingArguments, last_checkpoint
from hf_vit.training.callbacks import throughput
from hf_vit.training.callbacks.throughput import Throughput, training_flops
from hf_vit.training.evaluator_trainer import EvaluatorTrainer

from ..helpers.datasets import load_digits, write_tar, write_tars
from ..helpers.options import evaluation_values, opened_run, parse_arguments, run
from ..helpers.pretraining import CONFIG, SMALL, write_colors
from ..helpers.references import assert_identical
from ..helpers.trainings import DIGITS_CONFIG, digits_trainer, logged


MODEL = HfViTConfig.from_preset("mnist", **DIGITS_CONFIG)


def test_digits_are_1437_and_360_stratified_images_of_28_pixels_with_names() -> None:
    splits = load_digits()
    image = splits["test"][0]["image"]
    assert (image.size, image.mode) == ((28, 28), "L")
    assert splits["train"].features["label"].names == list("0123456789")
    train, test = (np.bincount(splits[name]["label"], minlength=10) for name in ("train", "test"))
    assert (train.sum(), test.sum()) == (1437, 360)
    assert np.abs(test - (train + test) * 360 / 1797).max() <= 1
    train, test = ({image.tobytes() for image in splits[name]["image"]} for name in ("train", "test"))
    assert not train & test
    with pytest.raises(ValueError, match="image_size=4 is smaller than the digits, which have 8x8"):
        load_digits_dataset(image_size=4)
    # A nearest-mean classifier is accurate only if images and labels match.
    pixels = {
        name: np.stack([np.ravel(image) for image in split["image"]]).astype(float) for name, split in splits.items()
    }
    labels = {name: np.array(split["label"]) for name, split in splits.items()}
    means = np.stack([pixels["train"][labels["train"] == digit].mean(axis=0) for digit in range(10)])
    nearest = ((pixels["test"][:, None] - means) ** 2).sum(axis=2).argmin(axis=1)
    assert np.mean(nearest == labels["test"]) > 0.85


def test_splits_never_move_and_hold_out_is_a_stratified_tenth_of_train() -> None:
    # Published scores are valid only for these exact splits.
    splits = hold_out(load_digits()["train"])
    for split, expected in ((load_digits()["test"], "2496513fac89aea9"), (splits["test"], "033bdd80a124742a")):
        assert hashlib.sha256(bytes(split["label"])).hexdigest().startswith(expected)
    assert (len(splits["train"]), len(splits["test"])) == (1293, 144)
    assert set(np.bincount(splits["test"]["label"])) <= {14, 15}


def pixels(dataset: AugmentedDataset, index: int) -> np.ndarray:
    return np.asarray(dataset[index]["image"])


def test_an_augmented_image_is_a_function_of_seed_epoch_and_index() -> None:
    train = load_digits()["train"]
    dataset, again, other = (AugmentedDataset(train, small_affine(), seed=seed) for seed in (3, 3, 4))
    first = pixels(dataset, 5)
    assert not np.array_equal(first, np.asarray(train[5]["image"]))
    assert not np.array_equal(first, pixels(other, 5))
    torch.rand(7)
    pixels(again, 8)
    assert np.array_equal(first, pixels(again, 5))
    for epoch in (1, 0):
        dataset.set_epoch(epoch)
        assert np.array_equal(first, pixels(dataset, 5)) == (epoch == 0)
    # Augmentation changes neither the state of the global random generator nor the labels.
    state = torch.get_rng_state()
    assert dataset[5]["label"] == train[5]["label"]
    assert torch.equal(torch.get_rng_state(), state)
    assert len(dataset) == 1437


def test_persistent_workers_use_the_current_epoch() -> None:
    dataset = AugmentedDataset(load_digits()["train"].select(range(4)), small_affine(), seed=0)
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=None, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )
    for epoch in range(2):
        dataset.set_epoch(epoch)
        for index, example in enumerate(loader):
            assert np.array_equal(np.asarray(example["image"]), pixels(dataset, index))


def test_collator_makes_the_batch_that_the_model_takes_and_only_normalizes_tensors() -> None:
    processor = HfViTImageProcessor.for_model(MODEL)
    examples = [load_digits()["train"][index] for index in range(3)]
    batch = ImageClassificationCollator(processor)(examples)
    assert batch["labels"].tolist() == [example["label"] for example in examples]
    assert batch["pixel_values"].shape == (3, 1, 28, 28)
    assert HfViTForImageClassification(MODEL)(**batch).loss.isfinite()
    for example, image in zip(examples, batch["pixel_values"], strict=True):
        assert torch.equal(image, processor(images=example["image"], return_tensors="pt")["pixel_values"][0])
    with pytest.raises(ValueError, match=r"have no label, only image\. .* remove_unused_columns=False"):
        ImageClassificationCollator(processor)([{"image": Image.new("L", (40, 30))}])
    # Tensors are not resized, because augmentation has already resized them.
    processor = HfViTImageProcessor(num_channels=1, size={"shortest_edge": 64}, do_center_crop=True, crop_size=56)
    image = torch.arange(28 * 28).remainder(256).to(torch.uint8).reshape(1, 28, 28)
    batch = ImageClassificationCollator(processor)([{"image": image, "label": 0}] * 2)
    expected = (image.float() / 255 - 0.5) / 0.5
    torch.testing.assert_close(batch["pixel_values"], expected.expand(2, 1, 28, 28))


def test_columns_that_a_collator_reads_are_kept(tmp_path: Path) -> None:
    """The default of `TrainingArguments` removes columns that are not arguments of the model, such as `image`."""
    digits, model = load_digits()["train"].select(range(4)), HfViTForImageClassification(MODEL)
    args = TrainingArguments(str(tmp_path), use_cpu=True, max_steps=1, disable_tqdm=True)
    collator = ImageClassificationCollator(HfViTImageProcessor.for_model(MODEL))
    trainer = HfViTTrainer(model, args, train_dataset=digits, eval_dataset=digits, data_collator=collator)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0
    # Other collators may rely on the removal of columns.
    other = TrainingArguments(str(tmp_path), use_cpu=True)
    assert HfViTTrainer(model, other, train_dataset=digits, data_collator=default_data_collator).args is other
    assert other.remove_unused_columns


def test_loader_moves_the_augmentation_from_epoch_to_epoch(tmp_path: Path) -> None:
    seen: list[int] = []

    class Recorder(AugmentedDataset):
        def __getitem__(self, index: int) -> dict:
            seen.append(int(self.epoch))
            return super().__getitem__(index)

    trainer = digits_trainer(tmp_path)
    trainer.train_dataset = Recorder(load_digits()["train"].select(range(16)), small_affine(), seed=0)
    trainer.train()
    assert seen == [0] * 16 + [1] * 16 + [2] * 16


RECORD = TrainingInfo(
    model_name="A model",
    task="image-classification",
    model_class="HfViTForImageClassification",
    purpose="image classification",
    usage=ImageClassification.usage,
    num_parameters=205066,
    data=DIGITS_INFO,
    metrics={"accuracy": 0.9875, "loss": 0.05},
    baselines={"majority": {"accuracy": 0.1, "loss": 2.3}, "peer": {"accuracy": 0.98, "loss": 0.06}},
    command="python scripts/demo.py --seed 0",
    seconds=61.4,
    hardware="AMD EPYC, 2 cores",
    seed=0,
    recipe={"steps": "920 of 64 images", "precision": "float32"},
    limits="Digits only.",
)


def test_model_card_contains_scores_data_and_hub_metadata(tmp_path: Path) -> None:
    info = dataclasses.replace(RECORD, pictures={"Predictions": "predictions.png"})
    card = ModelCard.load(write_model_card(tmp_path, info))
    metadata = (card.data.license, card.data.pipeline_tag, card.data.library_name)
    assert metadata == ("apache-2.0", "image-classification", "transformers")
    assert {result.metric_type: result.metric_value for result in card.data.eval_results} == RECORD.metrics
    assert {result.dataset_name for result in card.data.eval_results} == {DIGITS_INFO.name}
    for part in (
        "| metric | this model | majority | peer |\n|---|---|---|---|\n| accuracy | **0.9875** | 0.1000 | 0.9800 |\n",
        "| loss | **0.0500** | 2.3000 | 0.0600 |\n\nLower is better for loss.\n\nTrained in 61 s",
        "on AMD EPYC, 2 cores:",
        "| steps | 920 of 64 images |\n| precision | float32 |\n\n",
        *("python scripts/demo.py --seed 0", "![Predictions](predictions.png)", "trust_remote_code=True"),
        *("CC BY 4.0", "205,066 parameters", "Digits only."),
    ):
        assert part in card.text
    assert "{{" not in card.text
    assert "{%" not in card.text


@pytest.mark.parametrize(
    ("metrics", "baseline", "cells", "said"),
    [
        (
            {"accuracy": 0.1, "macro_f1": 0.2},
            {"accuracy": 0.8, "macro_f1": 0.1},
            ["0.1000 | **0.8000**", "**0.2000** | 0.1000"],
            ["This model is behind majority in accuracy (0.1000 against 0.8000)."],
        ),
        (
            {"nme": 0.1145, "abs_rel": 0.3, "pck": 0.8352},
            {"nme": 0.1015, "abs_rel": 0.4, "pck": 0.8685},
            ["0.1145 | **0.1015**", "**0.3000** | 0.4000", "0.8352 | **0.8685**"],
            [
                "Lower is better for nme, abs_rel.",
                "This model is behind majority in nme (0.1145 against 0.1015), pck (0.8352 against 0.8685).",
            ],
        ),
        (  # these scores differ by less than the last displayed digit
            {"accuracy": 0.100001, "loss": 2.0},
            {"accuracy": 0.100002, "loss": 2.0},
            ["0.1000 | 0.1000", "2.0000 | 2.0000"],
            [
                "Lower is better for loss.",
                "This model is no better than majority in accuracy (0.1000), loss (2.0000).",
            ],
        ),
        ({"map_small": 0.1}, {"map_small": math.nan}, ["0.1000 | -"], []),
    ],
)
def test_card_marks_what_is_better(metrics: dict, baseline: dict, cells: list, said: list, tmp_path: Path) -> None:
    text = card_of(tmp_path, metrics=metrics, baselines={"majority": baseline})
    table, rest = text.partition("|---|---|---|\n")[2].partition("\n\nTrained in")[0].partition("\n\n")[::2]
    assert table.splitlines() == [f"| {name} | {pair} |" for name, pair in zip(metrics, cells, strict=True)]
    assert list(filter(None, rest.split("\n\n"))) == said


def card_of(folder: Path, **changes: Any) -> str:
    return write_model_card(folder, dataclasses.replace(RECORD, **changes)).read_text()


def test_model_card_respects_lower_is_better_and_marks_ties(tmp_path: Path) -> None:
    cost = {"metrics": {"cost": 1.0}, "baselines": {"a peer": {"cost": 2.0}}}
    assert "| cost | 1.0000 | **2.0000** |" in card_of(tmp_path, **cost)
    assert "| cost | **1.0000** | 2.0000 |" in card_of(tmp_path, **cost, lower_is_better=["cost"])
    ties = "| pck | **0.5000** | **0.5000** | 0.4000 |\n\nThis model is no better than first in pck (0.5000).\n\n"
    baselines = {"first": {"pck": 0.5}, "second": {"pck": 0.4}}
    assert ties in card_of(tmp_path, metrics={"pck": 0.5}, baselines=baselines)
    with pytest.raises(ValueError, match="baseline 'majority' has no score for loss"):
        card_of(tmp_path, baselines={"majority": {"accuracy": 0.1}})


def test_arguments_are_saved_as_json_without_a_pickle_and_a_record_is_read_off_the_trainer(tmp_path: Path) -> None:
    trainer = digits_trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    trainer.processing_class = HfViTImageProcessor.for_model(MODEL)
    trainer.train()
    trainer.save_model()
    for folder in (tmp_path, tmp_path / "checkpoint-2"):
        assert json.loads((folder / "training_args.json").read_text())["max_steps"] == 2
        assert (folder / "preprocessor_config.json").is_file()
    assert not list(tmp_path.rglob("training_args.bin"))
    assert not [path for path in tmp_path.iterdir() if path.suffix in {".bin", ".pt", ".pth", ".pkl"}]
    rest = {field.name: getattr(RECORD, field.name) for field in dataclasses.fields(RECORD)}
    for name in ("model_class", "num_parameters", "hardware", "seed", "recipe"):
        del rest[name]
    record = TrainingInfo.from_trainer(trainer, recipe={"augmentation": "none"}, **rest)
    assert record.model_class == "HfViTForImageClassification"
    assert record.num_parameters == sum(p.numel() for p in HfViTForImageClassification(MODEL).parameters())
    assert record.hardware == describe_hardware(torch.device("cpu"))
    assert record.recipe == {
        "steps": "2 of 8 images",
        "optimizer": "adamw_torch_fused, learning rate 5e-05, weight decay 0.0",
        "schedule": "linear, 0% of the steps of warm-up",
        "precision": "float32",
        "augmentation": "none",
    }


def subclasses_of(kind: type) -> Iterator[type]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from subclasses_of(subclass)


def test_trainers_override_two_private_methods_of_the_library() -> None:
    ours = [kind for kind in subclasses_of(Trainer) if kind.__module__.startswith("hf_vit.")]
    assert {HfViTTrainer, EvaluatorTrainer} <= {*ours}
    own = {name for name in vars(Trainer) if name.startswith("_") and not name.startswith("__")}
    # Overridden private methods: transformers would upload a pickle during training, and it calls no public method or
    # event between writing the last file of a checkpoint and removing older checkpoints.
    private = {"_push_from_checkpoint", "_save_checkpoint"}
    assert {name for kind in ours for name in own & vars(kind).keys()} == private


STEPS = {"max_steps": 4, "logging_steps": 2, "per_device_train_batch_size": 8}


def test_a_log_has_memory_and_the_speed_without_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: now))

    def wait(seconds: float) -> None:
        nonlocal now
        now += seconds

    def slow_metrics(prediction: EvalPrediction) -> dict[str, float]:
        wait(100)
        return {"accuracy": 1.0}

    trainer = digits_trainer(tmp_path, eval_strategy="steps", eval_steps=1, gradient_accumulation_steps=2, **STEPS)
    trainer.compute_metrics = slow_metrics
    trainer.model.register_forward_pre_hook(lambda *_: wait(1))
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in entries] == [2, 4]
    # A batch of 8 images takes 1 second. The last of the 6 batches of an epoch has 4 images.
    assert [entry["images_per_second"] for entry in entries] == pytest.approx([8, 7])
    for entry in entries:
        assert 50 < entry["peak_memory_mib"] < 100_000
        assert "grad_norm" in entry
        assert "mfu" not in entry  # the peak FLOP/s of a CPU are not available
    clock = Throughput()
    clock.count(3, 5)
    wait(1)
    with clock.paused():
        wait(10)
    clock.count(4, 6)
    assert clock.take() == (7, 11, 1)
    clock.count(1, 1)
    wait(2)
    assert clock.take() == (1, 1, 2)


def test_the_bar_shows_the_log_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {**STEPS, "disable_tqdm": False, "save_strategy": "steps", "save_steps": 2}
    digits_trainer(tmp_path, **{**options, "max_steps": 2}).train()
    capsys.readouterr()
    trainer = digits_trainer(tmp_path, **options)
    trainer.train(resume_from_checkpoint=last_checkpoint(tmp_path))
    bar = capsys.readouterr().err
    assert "1/4 [" not in bar
    assert "2/4 [" in bar
    last = bar.splitlines()[-1]
    assert f"img/s={logged(trainer, 'images_per_second')[-1]:.4g}, " in last
    assert f"memory={logged(trainer, 'peak_memory_mib')[-1]} MiB" in last
    assert "step/s" in bar or "s/step" in bar


def test_the_work_of_a_trained_classifier_is_three_times_its_forward_pass(tmp_path: Path) -> None:
    trainer = digits_trainer(tmp_path, **STEPS)
    assert training_flops(trainer.plain_model, 32, 32) == 3 * forward_flops(trainer.model.config, 32, 32)
    trainer.model.classifier.requires_grad_(False)
    assert training_flops(trainer.plain_model, 32, 64) == 0
    # `peak_flops` returns None for devices that are not in `PEAKS`.
    assert {name: peak_flops(f"NVIDIA {name}") for name in PEAKS} == {n: peak * 1e12 for n, peak in PEAKS.items()}
    assert peak_flops("Tesla T4") is None


PEAKS = {"H200": 989.4, "H100 80GB HBM3": 989.4, "H100 PCIe": 756.0, "A100-SXM4-80GB": 312.0, "L40S": 362.0}
PEAKS |= {"GeForce RTX 4090": 165.2, "L4": 121.0}
PEAKS = {"H200": 989.4, "H100 80GB HBM3": 989.4, "H100 PCIe": 756.0, "A100-SXM4-80GB": 312.0, "L40S": 362.0}
PEAKS |= {"GeForce RTX 4090": 165.2, "L4": 121.0}


STREAM = ["--streaming", "true", "--eval_strategy", "no", "--shuffle_buffer_size", "20", "--auto_augment", "none"]
STAYING = "dataloader_persistent_workers"
STREAM_STEPS = ["--max_steps", "7", "--save_strategy", "steps", "--save_steps", "4"]  # an epoch has 4.5 steps


@pytest.fixture(scope="module")
def colors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the paths of two copies of a dataset, one in class folders and one in tar files."""
    root, names = tmp_path_factory.mktemp("colors"), ["blue", "green", "red"]
    folder, tars = write_colors(root / "folders"), root / "tars"
    for split in ("train", "test"):
        files = sorted((folder / split).glob("*/*.png"))
        for part in range(4):
            images = {f"{file.parent.name}/{file.stem}": file.read_bytes() for file in files[part::4]}
            labels = {key: names.index(key.split("/")[0]) for key in images}
            write_tar(tars / f"{split}-{part}.tar", images, labels)
    (tars / "classes.txt").write_text("\n".join(names))
    return {"folders": folder, "tars": tars}


def arguments_of(data: Path, output_dir: Path, *options: str) -> list[str]:
    model = ["--preset", "tiny", "--config_overrides", json.dumps(CONFIG), "--per_device_train_batch_size", "8"]
    return [*SMALL, *model, *STREAM, "--dataset_name", str(data), "--output_dir", str(output_dir), *options]


def make_task(data: Path, output_dir: Path, *options: str) -> Run:
    task = opened_run(ImageClassification, arguments_of(data, output_dir, *options))
    return task


def test_a_classifier_learns_from_tar_files(colors: dict[str, Path], tmp_path: Path) -> None:
    steps = ["--max_steps", "40", "--save_strategy", "no", "--learning_rate", "3e-3"]
    run(ImageClassification, arguments_of(colors["tars"], tmp_path, *steps), None, report=lambda _: None)
    accuracy = json.loads((tmp_path / "test_scores.json").read_text())["accuracy"]
    assert accuracy > 0.8  # chance level is 1/3
    lines = [json.loads(line) for line in (tmp_path / "test_predictions.jsonl").read_text().splitlines()]
    assert len({line["file"] for line in lines}) == len(lines) == 21
    assert sum(line["label"] == line["prediction"] for line in lines) == round(21 * accuracy)
    card = (tmp_path / "README.md").read_text()
    assert "| training images | a stream, each drawn among 20 |" in card
    # The number of training images is unknown for streams, so it is not reported.
    assert re.search(r"tars: \d for validation, 21 for test, in 3 classes", card)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_training_is_resumed_at_the_same_image(workers: str, colors: dict[str, Path], tmp_path: Path) -> None:
    def train(name: str, *options: str) -> tuple[dict[str, Any], float]:
        readers = ["--dataloader_num_workers", workers, *options]
        run = make_task(colors["tars"], tmp_path / name, *STREAM_STEPS, *readers)
        torch.manual_seed(0)
        trainer = build_run(run).trainer
        trainer.train(resume_from_checkpoint=run.args.resume_from_checkpoint)
        return trainer.model.state_dict(), trainer.state.epoch

    resume = ("--resume_from_checkpoint", str(tmp_path / "whole" / "checkpoint-4"))
    whole = train("whole")
    assert_identical(train("resumed", *resume), whole)
    with pytest.raises(ValueError, match=r"and step': 8.* and step': 4.* skipped or repeated"):
        train("smaller", *resume, "--per_device_train_batch_size", "4")


def test_a_folder_is_streamed_and_the_same_images_are_held_out(colors: dict[str, Path], tmp_path: Path) -> None:
    task = make_task(colors["folders"], tmp_path, "--max_steps", "1", "--save_strategy", "no")
    joined = make_task(colors["folders"], tmp_path, "--streaming", "false", "--train_val_split", "0.1")
    assert count_examples(task) == {"validation": 4, "test": 21}
    assert task.data.splits["validation"]["file"][:] == joined.data.splits["validation"]["file"][:]
    trainer = build_run(task).trainer
    trainer.predict(task.data.examples("test"))
    assert trainer.evaluator.metric.confusion_matrix().sum() == 21
    assert next(iter(trainer.get_train_dataloader()))["pixel_values"].shape == (8, 3, 16, 16)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("kind", ["tars", "folders"])
def test_an_evaluation_takes_the_images_that_were_held_out(kind: str, colors: dict[str, Path], tmp_path: Path) -> None:
    steps = ["--max_steps", "1", "--save_strategy", "no", "--train_val_split", "0.3"]
    run(ImageClassification, arguments_of(colors[kind], tmp_path / kind, *steps), None, report=lambda _: None)
    trained = make_task(colors[kind], tmp_path, *steps)
    options = ["--split", "validation", "--train_val_split", "0.3", "--output_dir", str(tmp_path / "scores")]
    places = ["--model_name_or_path", str(tmp_path / kind), "--dataset_name", str(colors[kind]), "--use_cpu"]
    evaluation = open_evaluation(*plan_evaluation(evaluation_values([*places, *options])))
    assert evaluation.split == "validation"
    held_out = [
        sorted(image.tobytes() for image in split["image"])
        for split in (evaluation.data.splits["validation"], trained.data.splits["validation"])
    ]
    assert len(held_out[0]) > 3
    assert held_out[0] == held_out[1]


def test_an_unreadable_image_stops_a_training_or_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tars(tmp_path / "data", {"train": [0, 1] * 8, "val": [0, 1]})
    write_tar(tmp_path / "data" / "train-00009.tar", {"zz/000": b"no image"}, {"zz/000": 0})
    options = ["--check_images", "false", *STREAM_STEPS, "--max_steps", "9", "--save_strategy", "no"]
    with pytest.raises(OSError, match=r"train-00009\.tar: zz/000\.png"):
        build_run(make_task(tmp_path / "data", tmp_path / "out", *options)).trainer.train()
    trainer = build_run(make_task(tmp_path / "data", tmp_path / "out", *options)).trainer
    trainer.train_dataset.skip_unreadable = True
    trainer.train()
    assert "train-00009.tar: zz/000.png" in caplog.text


def test_persistent_workers_do_not_reuse_another_evaluation_dataset(tmp_path: Path) -> None:
    command = ["--use_cpu", "--output_dir", "out", "--dataloader_num_workers", "2"]
    for options, stays in ((command[:3], False), (command, True), ([*command, f"--{STAYING}", "false"], False)):
        assert vars(parse_arguments((HfViTTrainingArguments,), options)[0])[STAYING] is stays
    trainer = digits_trainer(tmp_path, dataloader_num_workers=1, **{STAYING: True})
    few = trainer.eval_dataset.select(range(3))
    assert len(trainer.get_eval_dataloader().dataset) > 3
    assert len(trainer.get_eval_dataloader(few).dataset) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max_steps", "-1"], "has no known length.* Set --max_steps, --save_strategy steps"),
        (["--max_train_samples", "5"], "streaming=True and max_train_samples=5 exclude each other"),
        (["--streaming", "false", "--class_names", "a,b"], r"class_names=\['a', 'b'\] requires --streaming"),
        ([*STREAM_STEPS, "--class_names", "a,b"], "has the label 2, which is not one of the 2 classes 'a', 'b'"),
    ],
)
def test_mistakes_are_found(options: list[str], message: str, colors: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        make_task(colors["tars"], tmp_path, *options)
