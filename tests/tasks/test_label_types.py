"""Test training with multi-label targets, regression targets and class weights."""

import csv
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers.modeling_outputs import ImageClassifierOutput

from hf_vit import HfViTForImageClassification
from hf_vit.data import AugmentedDataset
from hf_vit.data.augmentation.datasets import BalancedSampler
from hf_vit.model.task_image_classification import classification_loss
from hf_vit.tasks.common.class_weights import choose_weights
from hf_vit.tasks.common.regularization import Mixing, WeightedLoss

from ..helpers.fresh import run_command, run_without_package
from ..helpers.models import encoder_shape
from ..helpers.options import call_command
from ..helpers.references import assert_close


# Keys have no bias, because its gradient would consist of rounding errors, which Adam would scale up.
CONFIG = {**encoder_shape(16, 2, 32), "patch_size": 4, "key_bias": False}
SMALL = ["--preset", "tiny", "--image_size", "8", "--config_overrides", json.dumps(CONFIG), "--use_cpu"]
SMALL += ["--choose_defaults", "false", "--disable_tqdm", "true", "--report_to", "none", "--eval_strategy", "no"]
SMALL += ["--min_crop_scale", "1", "--auto_augment", "none", "--random_erasing", "0", "--train_val_split", "0"]
STEPS = ["--per_device_train_batch_size", "8", "--save_strategy", "no", "--learning_rate", "3e-3", "--max_steps"]
COLORS = ("red", "green", "blue")
NUM_TRAIN, NUM_TEST = 48, 16
TABLES: dict[str, Callable[[list[int], int], list[Any]]] = {
    "flags": lambda flags, number: [*flags[:2], "" if number % 5 == 0 else flags[2]],
    "names": lambda flags, number: ["|".join(name for name, flag in zip(COLORS, flags, strict=True) if flag)],
    "value": lambda flags, number: [1990 + 10.5 * sum(flags)],
    "class": lambda flags, number: ["rare" if sum(flags) == 3 else "usual"],
}
HEADERS = {"flags": COLORS, "names": ("label",), "value": ("label",), "class": ("label",)}


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with colored images and one label table per entry of `TABLES`."""
    folder, rng = tmp_path_factory.mktemp("colors"), np.random.default_rng(0)
    rows: dict[str, list[list[Any]]] = {name: [["file", "split", *header]] for name, header in HEADERS.items()}
    for number in range(NUM_TRAIN + NUM_TEST):
        flags = [number >> place & 1 for place in range(3)]
        pixels = rng.normal(20, 10, (8, 8, 3)) + 200 * np.array(flags)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{number}.png")
        for name, cells in TABLES.items():
            split = "train" if number < NUM_TRAIN else "test"
            rows[name].append([f"{number}.png", split, *cells(flags, number)])
    for name, lines in rows.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(lines)
    return folder


def arguments_of(tables: Path, table: str, output: Path, *options: str) -> list[str]:
    places = ["--dataset_name", str(tables / f"{table}.csv"), "--output_dir", str(output)]
    return [*places, *SMALL, *options]


def scores_in(output: Path) -> dict[str, Any]:
    scores: dict[str, Any] = json.loads((output / "test_scores.json").read_text())
    return scores


def train(tables: Path, table: str, output: Path, *options: str) -> dict[str, Any]:
    """Train a classifier on a label table and return its scores on the test images."""
    call_command("train image-classification", arguments_of(tables, table, output, *options))
    return scores_in(output)


def evaluate(tables: Path, table: str, model: Path) -> dict[str, Any]:
    data = ["--dataset_name", str(tables / f"{table}.csv"), "--output_dir", str(model / "evaluation"), "--use_cpu"]
    call_command("evaluate", ["--model_name_or_path", str(model), *data])
    return scores_in(model / "evaluation")


def train_on_two_processes(tables: Path, table: str, place: Path, *options: str) -> None:
    arguments = arguments_of(tables, table, place / "two", *options, "--per_device_train_batch_size", "4")
    process = run_command("train image-classification", place / "work", *arguments, processes=2)
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize("table", ["flags", "names"])
def test_several_labels_are_learned(
    table: str, tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    given = ["--problem_type", "multi_label_classification"] if table == "names" else []
    smoothing = ["--label_smoothing_factor", "0.1", "--mixup_alpha", "0.1"]
    scores = train(tables, table, output, *STEPS, "80", *smoothing, *given)
    assert scores.keys() == {"loss", "mean_ap", "macro_f1", "micro_f1"}
    assert min(scores["mean_ap"], scores["micro_f1"]) > 0.9
    model = HfViTForImageClassification.from_pretrained(output)
    names = sorted(COLORS) if table == "names" else [*COLORS]
    assert (model.config.problem_type, [*model.config.id2label.values()]) == ("multi_label_classification", names)
    card = (output / "README.md").read_text()
    assert "predicts a probability for each" in card
    assert "share of each class in training" in card
    assert "multi label classification" in card
    line = json.loads((output / "test_predictions.jsonl").read_text().splitlines()[0])
    assert line.keys() == {"file", "labels", "prediction"}
    assert line["labels"].keys() == line["prediction"].keys() == {*COLORS}

    # Evaluate on a table in the other format (label names or columns of 0 and 1), which has another order of labels.
    again = evaluate(tables, "flags" if table == "names" else "names", output)
    assert again["mean_ap"] == pytest.approx(scores["mean_ap"], abs=0.1)
    call_command("predict", [str(output), str(tables / "3.png")])
    (answer,) = map(json.loads, capsys.readouterr().out.splitlines()[-1:])
    assert {found["label"] for found in answer["top_k"] if found["score"] > 0.5} == {"red", "green"}
    code = """
    folder, photo = sys.argv[1:]
    pipe = transformers.pipeline("image-classification", model=folder, trust_remote_code=True)
    found = {entry["label"]: entry["score"] for entry in pipe(photo)}
    assert found["green"] > 0.5 and found["blue"] > 0.5 and found["red"] < 0.5, found
    """
    if table == "flags":
        run_without_package(code, tmp_path / "work", str(output), str(tables / "6.png"))


def test_values_are_learned_from_their_mean(tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    scores = train(tables, "value", output, *STEPS, "120", "--bf16", "true")
    assert scores["r2"] > 0.8
    assert scores["rmse"] == pytest.approx(scores["loss"] ** 0.5)
    labels = np.array([1990 + 10.5 * (number & 7).bit_count() for number in range(NUM_TRAIN + NUM_TEST)])
    card = (output / "README.md").read_text()
    assert "mean of the training labels" in card
    error = np.abs(labels[NUM_TRAIN:] - labels[:NUM_TRAIN].mean()).mean()
    assert f"{error:.4f}" in card or f"{error:.3f}" in card  # the model card contains the baseline error
    assert evaluate(tables, "value", output)["mae"] == pytest.approx(scores["mae"], abs=0.2)
    call_command("predict", [str(output), str(tables / "7.png")])
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (answer["label"], answer["score"]) == ("label", pytest.approx(1990 + 3 * 10.5, abs=8))
    scores = train(tables, "value", tmp_path / "fresh", *STEPS, "1", "--learning_rate", "1e-9")
    # The head is initialized with the mean target. With a bias of zero, the error would be about 2000.
    assert scores["mae"] < 100


def test_options_that_do_not_go_together(tables: Path, tmp_path: Path) -> None:
    for table, options, message in (
        ("value", "--class_weights balanced", "Regression does not support options for classes"),
        ("value", "--mixup_alpha 0.2", "Regression does not support options for classes"),
        ("value", "--label_smoothing_factor 0.1", "Regression does not support options for classes"),
        ("flags", "--classification_loss bce", "classification_loss=bce"),
        ("class", "--class_weights nowhere.json", "must be balanced, sqrt, none or a JSON file"),
        ("class", "--balanced_sampling true --repeated_augmentations 2", "repeated_augmentations=2"),
        ("names", "--streaming true --balanced_sampling true", "the labels of a stream are unknown"),
        ("names", "--streaming true --problem_type regression", "Streamed data supports one label per image"),
        ("class", "--problem_type regression", "are not numbers"),
    ):
        with pytest.raises(SystemExit, match=message):
            train(tables, table, tmp_path / "out", *STEPS, "1", *options.split())


def test_weights_by_rarity_and_from_a_file(tmp_path: Path) -> None:
    names, counts = ["a", "b", "c"], [80, 20, 0]
    assert choose_weights("balanced", names, lambda: counts) == [0.625, 2.5, 1.0]
    roots = choose_weights("sqrt", names, lambda: counts)
    assert roots[1] / roots[0] == pytest.approx(2, abs=1e-3)
    file = tmp_path / "weights.json"
    file.write_text('{"b": 3}')
    assert choose_weights(str(file), names, lambda: counts) == [1.0, 3.0, 1.0]
    for content, message in (
        ('{"d": 1}', "has weights for unknown classes 'd'. The classes are 'a', 'b', 'c'"),
        ('{"a": -1}', "Weights must be at least 0"),
        ('{"a": "much"}', "Weights must be at least 0"),
        ('{"a": 0, "b": 0, "c": 0}', "one must be above 0"),
        ("[1, 2, 3]", "or a JSON file"),
    ):
        file.write_text(content)
        with pytest.raises(ValueError, match=message):
            choose_weights(str(file), names, lambda: counts)


def test_the_weighted_loss_and_the_smoothing_of_several_labels_by_hand() -> None:
    logits, weights = torch.randn(6, 3, dtype=torch.float64), [1.0, 2.0, 0.5]
    numbers, outputs = torch.tensor([0, 1, 2, 1, 0, 1]), ImageClassifierOutput(logits=logits)
    own = torch.tensor(weights)[numbers] * torch.nn.functional.cross_entropy(logits, numbers, reduction="none")
    loss = WeightedLoss(weights)
    torch.testing.assert_close(loss(outputs, numbers), own.mean())
    torch.testing.assert_close(loss(outputs, numbers, 24), own.sum() / 24)
    soft = torch.nn.functional.one_hot(numbers).double()
    torch.testing.assert_close(loss(outputs, soft), own.mean())
    even = WeightedLoss([1.0] * 3, is_multi=True)
    torch.testing.assert_close(even(outputs, soft), classification_loss(logits, soft, "multi_label_classification"))
    missing = soft.clone()
    missing[0] = float("nan")
    torch.testing.assert_close(
        even(outputs, missing) * 6, even(ImageClassifierOutput(logits=logits[1:]), soft[1:]) * 5
    )
    batch = {"pixel_values": torch.zeros(1, 3, 4, 4), "labels": torch.tensor([[1.0, 0.0, float("nan")]])}
    labels = Mixing(3, label_smoothing=0.2)(batch, 0.0)["labels"]
    torch.testing.assert_close(labels, torch.tensor([[0.9, 0.1, float("nan")]]), equal_nan=True)


def test_rare_classes_count_more_in_a_training(tables: Path, tmp_path: Path) -> None:
    (tmp_path / "weights.json").write_text('{"usual": 0}')
    train(tables, "class", tmp_path, *STEPS, "15", "--class_weights", str(tmp_path / "weights.json"))
    lines = [json.loads(line) for line in (tmp_path / "test_predictions.jsonl").read_text().splitlines()]
    assert {line["prediction"] for line in lines} == {"rare"}  # all other classes have a weight of 0


@pytest.mark.parametrize("counts", [[50, 7, 1], [3, 3, 3], [10, 1]])
def test_balanced_sampling_draws_classes_and_their_images_equally_often(counts: list[int]) -> None:
    def balanced() -> AugmentedDataset:
        return AugmentedDataset([{}] * len(classes), lambda image: image, 0, classes=classes)

    classes = [number for number, count in enumerate(counts) for _ in range(count)]
    dataset = balanced()
    drawn = list(BalancedSampler(dataset))
    # If an image is drawn repeatedly, the augmentation differs, so no pair of image and augmentation occurs twice.
    assert len(set(drawn)) == len(drawn) == len(dataset)
    by_class, by_image = Counter(classes[image] for image, _ in drawn), Counter(image for image, _ in drawn)
    assert max(by_class.values()) - min(by_class.values()) <= 1
    for number in range(len(counts)):
        often = [by_image[image] for image in range(len(classes)) if classes[image] == number]
        assert max(often) - min(often) <= 1
    assert list(BalancedSampler(balanced())) == drawn
    dataset.set_epoch(1)
    assert list(BalancedSampler(dataset)) != drawn


def test_balanced_trainings_resume_and_are_the_same_on_two_processes(tables: Path, tmp_path: Path) -> None:
    # An epoch has 6 steps, so the checkpoints are saved in the middle of an epoch.
    options = ["--balanced_sampling", "true", "--learning_rate", "1e-3", "--max_steps", "9", "--bf16", "false"]
    options += ["--save_strategy", "steps", "--save_steps", "4", "--save_total_limit", "5"]
    alone = [*options, "--per_device_train_batch_size", "8"]
    train(tables, "class", tmp_path / "one", *alone)
    expected = load_file(tmp_path / "one" / "model.safetensors")
    checkpoint = str(tmp_path / "one" / "checkpoint-4")
    train(tables, "class", tmp_path / "one", *alone, "--resume_from_checkpoint", checkpoint)
    again = load_file(tmp_path / "one" / "model.safetensors")
    assert all(torch.equal(weight, again[name]) for name, weight in expected.items())
    train_on_two_processes(tables, "class", tmp_path, *options)
    for name, weight in load_file(tmp_path / "two" / "model.safetensors").items():
        assert_close(weight, expected[name], 1e-4, name)
    options = [*STEPS, "6", "--balanced_sampling", "true", "--class_weights", "balanced", "--bf16", "false"]
    scores = train(tables, "flags", tmp_path / "flags" / "one", *options)
    train_on_two_processes(tables, "flags", tmp_path / "flags", *options)
    assert scores_in(tmp_path / "flags" / "two") == pytest.approx(scores, abs=1e-4)
