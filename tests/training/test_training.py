"""Digits, augmented datasets, the collator, safe saving, and model cards."""

import dataclasses
import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image
from torchvision.transforms import v2
from transformers import TrainingArguments

from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTImageProcessor
from hf_vit.data import DIGITS_INFO, AugmentedDataset, ImageClassificationCollator, hold_out, load_digits_dataset
from hf_vit.data.augmentation.classification import small_affine
from hf_vit.training import HfViTTrainer, ImageClassification, TrainingInfo, write_model_card
from hf_vit.training.publishing.model_card import describe_hardware

from ..helpers.datasets import load_digits


CONFIG = HfViTConfig.from_preset(
    "mnist", hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
)


def digest(labels: list[int]) -> str:
    return hashlib.sha256(bytes(labels)).hexdigest()[:16]


def test_digits_are_1437_and_360_images_of_28_pixels_with_names() -> None:
    assert {name: len(split) for name, split in load_digits().items()} == {"train": 1437, "test": 360}
    example = load_digits()["test"][0]
    assert (example["image"].size, example["image"].mode) == ((28, 28), "L")
    assert load_digits()["train"].features["label"].names == list("0123456789")


def test_digits_are_stratified() -> None:
    train, test = (np.bincount(load_digits()[name]["label"], minlength=10) for name in ("train", "test"))
    assert np.abs(test - (train + test) * 360 / 1797).max() <= 1


def test_digits_and_labels_belong_together() -> None:
    # The nearest of the ten class means classifies most digits correctly, which shows that images and labels match.
    pixels, labels = {}, {}
    for name, split in load_digits().items():
        pixels[name] = np.stack([np.asarray(image, dtype=float).ravel() for image in split["image"]])
        labels[name] = np.array(split["label"])
    means = np.stack([pixels["train"][labels["train"] == digit].mean(axis=0) for digit in range(10)])
    nearest = ((pixels["test"][:, None] - means) ** 2).sum(axis=2).argmin(axis=1)
    assert np.mean(nearest == labels["test"]) > 0.85


def test_no_test_image_is_a_training_image() -> None:
    train, test = ({image.tobytes() for image in load_digits()[name]["image"]} for name in ("train", "test"))
    assert not train & test


def test_splits_never_move() -> None:
    # Published scores refer to exactly these images.
    assert digest(load_digits()["test"]["label"]) == "2496513fac89aea9"
    assert digest(hold_out(load_digits()["train"])["test"]["label"]) == "033bdd80a124742a"


def test_hold_out_is_a_stratified_tenth_of_train() -> None:
    splits = hold_out(load_digits()["train"])
    assert (len(splits["train"]), len(splits["test"])) == (1293, 144)
    assert set(np.bincount(splits["test"]["label"])) <= {14, 15}


def test_digits_refuse_to_shrink() -> None:
    with pytest.raises(ValueError, match="image_size=4 is smaller than the digits, which have 8x8"):
        load_digits_dataset(image_size=4)


def pixels(dataset: AugmentedDataset, index: int) -> np.ndarray:
    return np.asarray(dataset[index]["image"])


def test_an_augmented_image_is_a_function_of_seed_epoch_and_index() -> None:
    dataset, again = (AugmentedDataset(load_digits()["train"], small_affine(), seed=3) for _ in range(2))
    first = pixels(dataset, 5)
    assert not np.array_equal(first, np.asarray(load_digits()["train"][5]["image"]))
    torch.rand(7)
    pixels(again, 8)
    assert np.array_equal(first, pixels(again, 5))
    dataset.set_epoch(1)
    assert not np.array_equal(first, pixels(dataset, 5))
    dataset.set_epoch(0)
    assert np.array_equal(first, pixels(dataset, 5))
    assert not np.array_equal(first, pixels(AugmentedDataset(load_digits()["train"], small_affine(), seed=4), 5))


def test_augmentation_leaves_the_global_generator_and_the_label_alone() -> None:
    dataset = AugmentedDataset(load_digits()["train"], small_affine(), seed=0)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    example = dataset[5]
    assert torch.equal(torch.rand(3), expected)
    assert example["label"] == load_digits()["train"][5]["label"]
    assert len(dataset) == 1437


def test_worker_processes_that_stay_learn_of_the_next_epoch() -> None:
    dataset = AugmentedDataset(load_digits()["train"].select(range(4)), small_affine(), seed=0)
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=None, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )
    for epoch in range(2):
        dataset.set_epoch(epoch)
        for index, example in enumerate(loader):
            assert np.array_equal(np.asarray(example["image"]), pixels(dataset, index))


def test_collator_makes_the_batch_that_the_model_takes() -> None:
    processor = HfViTImageProcessor.for_model(CONFIG)
    examples = [load_digits()["train"][index] for index in range(3)]
    batch = ImageClassificationCollator(processor)(examples)
    assert batch["labels"].tolist() == [example["label"] for example in examples]
    assert batch["pixel_values"].shape == (3, 1, 28, 28)
    assert HfViTForImageClassification(CONFIG)(**batch).loss.isfinite()
    for index, example in enumerate(examples):
        alone = processor(images=example["image"], return_tensors="pt")["pixel_values"]
        assert torch.equal(batch["pixel_values"][index], alone[0])


def test_collator_names_missing_columns() -> None:
    collate = ImageClassificationCollator(HfViTImageProcessor.for_model(CONFIG))
    with pytest.raises(ValueError, match=r"have no label, only image\. .* remove_unused_columns=False"):
        collate([{"image": Image.new("L", (40, 30))}])


def test_collator_only_normalizes_tensors_which_augmentation_has_brought_to_size() -> None:
    processor = HfViTImageProcessor(num_channels=1, size={"shortest_edge": 64}, do_center_crop=True, crop_size=56)
    image = torch.arange(28 * 28, dtype=torch.int64).remainder(256).to(torch.uint8).reshape(1, 28, 28)
    batch = ImageClassificationCollator(processor)([{"image": image, "label": 0}] * 2)
    expected = (image.float() / 255 - 0.5) / 0.5
    torch.testing.assert_close(batch["pixel_values"], expected.expand(2, 1, 28, 28))


def train(folder: Path) -> HfViTTrainer:
    processor = HfViTImageProcessor.for_model(CONFIG)
    trainer = HfViTTrainer(
        model=HfViTForImageClassification(CONFIG),
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=2,
            save_steps=2,
            remove_unused_columns=False,
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=AugmentedDataset(load_digits()["train"], v2.Identity(), seed=0),
        data_collator=ImageClassificationCollator(processor),
        processing_class=processor,
    )
    trainer.train()
    trainer.save_model()
    return trainer


def test_trainer_saves_its_arguments_as_json_and_not_as_a_pickle(tmp_path: Path) -> None:
    train(tmp_path)
    for folder in (tmp_path, tmp_path / "checkpoint-2"):
        assert json.loads((folder / "training_args.json").read_text())["max_steps"] == 2
        assert (folder / "preprocessor_config.json").is_file()
    assert not list(tmp_path.rglob("training_args.bin"))
    pickles = [path for path in tmp_path.iterdir() if path.suffix in {".bin", ".pt", ".pth", ".pkl"}]
    assert not pickles


def test_loader_moves_the_augmentation_from_epoch_to_epoch(tmp_path: Path) -> None:
    processor = HfViTImageProcessor.for_model(CONFIG)
    seen: list[int] = []

    class Recorder(AugmentedDataset):
        def __getitem__(self, index: int) -> dict:
            seen.append(int(self.epoch))
            return super().__getitem__(index)

    HfViTTrainer(
        model=HfViTForImageClassification(CONFIG),
        args=TrainingArguments(
            output_dir=str(tmp_path),
            num_train_epochs=3,
            save_strategy="no",
            remove_unused_columns=False,
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=Recorder(load_digits()["train"].select(range(16)), small_affine(), seed=0),
        data_collator=ImageClassificationCollator(processor),
    ).train()
    assert seen == [0] * 16 + [1] * 16 + [2] * 16


RECORD = TrainingInfo(
    model_name="A model",
    task="image-classification",
    model_class="HfViTForImageClassification",
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


def test_card_has_metadata_that_the_hub_reads(tmp_path: Path) -> None:
    card = ModelCard.load(write_model_card(tmp_path, RECORD))
    assert (card.data.license, card.data.pipeline_tag, card.data.library_name) == (
        "apache-2.0",
        "image-classification",
        "transformers",
    )
    scores = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert scores == RECORD.metrics
    assert {result.dataset_name for result in card.data.eval_results} == {DIGITS_INFO.name}


def test_card_says_what_was_measured_how_and_on_what(tmp_path: Path) -> None:
    text = write_model_card(
        tmp_path, dataclasses.replace(RECORD, pictures={"Predictions": "predictions.png"})
    ).read_text()
    assert (
        "| metric | this model | majority | peer |\n|---|---|---|---|\n| accuracy | **0.9875** | 0.1000 | 0.9800 |\n"
        in text
    )
    assert "| loss | **0.0500** | 2.3000 | 0.0600 |\n\nLower is better for loss.\n\nTrained in 61 seconds" in text
    assert "on AMD EPYC, 2 cores:" in text
    assert "| steps | 920 of 64 images |\n| precision | float32 |\n\n" in text
    for part in (
        "python scripts/demo.py --seed 0",
        "![Predictions](predictions.png)",
        "trust_remote_code=True",
        "CC BY 4.0",
        "205,066 parameters",
        "Digits only.",
    ):
        assert part in text
    assert "{{" not in text
    assert "{%" not in text


@pytest.mark.parametrize(
    ("metrics", "baseline", "cells", "sentences"),
    [
        ({"accuracy": 0.8}, {"accuracy": 0.1}, ["**0.8000** | 0.1000"], []),
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
        (  # equal after rounding to the displayed digits
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
    ids=["wins", "loses one", "lower is better", "ties", "unknown"],
)
def test_card_marks_what_is_better_and_says_where_a_baseline_is(
    metrics: dict, baseline: dict, cells: list[str], sentences: list[str], tmp_path: Path
) -> None:
    info = dataclasses.replace(RECORD, metrics=metrics, baselines={"majority": baseline})
    text = write_model_card(tmp_path, info).read_text()
    table, said = text.partition("|---|---|---|\n")[2].partition("\n\nTrained in")[0].partition("\n\n")[::2]
    assert table.splitlines() == [f"| {name} | {pair} |" for name, pair in zip(metrics, cells, strict=True)]
    assert list(filter(None, said.split("\n\n"))) == sentences


def test_card_takes_the_users_word_for_which_scores_are_better_when_lower(tmp_path: Path) -> None:
    info = dataclasses.replace(RECORD, metrics={"cost": 1.0}, baselines={"a peer": {"cost": 2.0}})
    assert "| cost | 1.0000 | **2.0000** |" in write_model_card(tmp_path, info).read_text()
    info = dataclasses.replace(info, lower_is_better=["cost"])
    assert "| cost | **1.0000** | 2.0000 |" in write_model_card(tmp_path, info).read_text()


def test_card_marks_all_that_share_the_best_score(tmp_path: Path) -> None:
    info = dataclasses.replace(RECORD, metrics={"pck": 0.5}, baselines={"first": {"pck": 0.5}, "second": {"pck": 0.4}})
    text = write_model_card(tmp_path, info).read_text()
    assert (
        "| pck | **0.5000** | **0.5000** | 0.4000 |\n\nThis model is no better than first in pck (0.5000).\n\n" in text
    )


def test_card_refuses_a_baseline_without_the_metric(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="baseline 'majority' has no score for loss"):
        write_model_card(tmp_path, dataclasses.replace(RECORD, baselines={"majority": {"accuracy": 0.1}}))


def test_record_reads_off_the_trainer_what_it_knows(tmp_path: Path) -> None:
    rest = {field.name: getattr(RECORD, field.name) for field in dataclasses.fields(RECORD)}
    for name in ("model_class", "num_parameters", "hardware", "seed", "recipe"):
        del rest[name]
    record = TrainingInfo.from_trainer(train(tmp_path), recipe={"augmentation": "none"}, **rest)
    assert record.model_class == "HfViTForImageClassification"
    assert record.num_parameters == sum(p.numel() for p in HfViTForImageClassification(CONFIG).parameters())
    assert record.hardware == describe_hardware(torch.device("cpu"))
    assert record.recipe == {
        "steps": "2 of 8 images",
        "optimizer": "adamw_torch_fused, learning rate 5e-05, weight decay 0.0",
        "schedule": "linear, 0% of the steps of warm-up",
        "precision": "float32",
        "augmentation": "none",
    }
