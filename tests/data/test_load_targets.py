"""Test training data with targets: checks, held-out images, sampling, and mapping to the classes of a model."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import DatasetDict
from PIL import Image

from hf_vit.data import load_keypoint_detection, load_semantic_segmentation
from hf_vit.data.datasets import TargetData
from hf_vit.tasks.common.load_data import load_targets, with_model_classes
from hf_vit.tasks.shared import MaskArguments
from hf_vit.training import HfViTTrainingArguments

from ..helpers.dense_trainings import NUM_TRAIN, make_trainer, write_scenes
from ..helpers.object_trainings import write_figures, write_objects
from .errors import expect_error


TASKS = {"object_detection": write_objects, "keypoint_detection": write_figures}


@pytest.fixture
def scenes(tmp_path: Path) -> Path:
    return write_scenes(tmp_path / "scenes")


def load(scenes: Path, **options: object) -> TargetData:
    args = HfViTTrainingArguments(output_dir=str(scenes / "out"), use_cpu=True, report_to="none", disable_tqdm=True)
    data_args = MaskArguments(dataset_name=str(scenes), **options)
    return load_targets(lambda: load_semantic_segmentation(str(scenes)), data_args, args)


def sizes(data: TargetData) -> dict[str, int]:
    return {name: len(rows) for name, rows in data.splits.items()}


def test_wrong_pairs_are_named_or_left_out_if_asked(scenes: Path) -> None:
    Image.fromarray(np.full((18, 20), 9, dtype=np.uint8)).save(scenes / "train" / "masks" / "0.png")
    Image.new("RGB", (5, 5)).save(scenes / "val" / "images" / "1.png")
    expect_error(r"(?s)2 of 13 images cannot be trained on:.*labels 9.*has 5 x 5 pixels, but", load, scenes)
    assert sizes(load(scenes, skip_unreadable=True)) == {"train": NUM_TRAIN - 1, "validation": 4}


@pytest.mark.parametrize(("task", "write"), TASKS.items())
def test_images_of_another_size_than_their_annotations_say_are_named_before_training(task, write, tmp_path):
    data = write(tmp_path / "data")
    turned = Image.Exif()
    turned[0x0112] = 6  # this EXIF orientation rotates the image by 90 degrees
    Image.new("RGB", (44, 41)).save(data / "train" / "images" / "0.png", exif=turned)
    Image.new("RGB", (50, 43)).save(data / "train" / "images" / "7.png")
    first = r"0\.png is 41 pixels wide and 44 high, but .* width of 44 and a height of 40"
    message = rf"(?s)cannot be trained on:.*{first}.*7\.png is 50 pixels wide and 43 high"
    expect_error(message, make_trainer, task, data, tmp_path / "out")
    kept = make_trainer(task, data, tmp_path / "out", "--skip_unreadable", "true").train_dataset
    assert {"0.png", "7.png"}.isdisjoint(Path(kept[index]["file"]).name for index in range(len(kept)))


def test_without_validation_a_share_is_held_out_and_always_the_same_and_a_trial_takes_a_few(scenes: Path) -> None:
    assert sizes(load(scenes, max_train_samples=3, max_eval_samples=2)) == {"train": 3, "validation": 2}
    shutil.rmtree(scenes / "val")
    first, second = load(scenes, train_val_split=0.25), load(scenes, train_val_split=0.25)
    assert sizes(first) == {"train": 6, "validation": 2}
    assert first.splits["validation"]["file"][:] == second.splits["validation"]["file"][:]
    assert not {*first.splits["validation"]["file"]} & {*first.splits["train"]["file"]}
    assert sizes(load(scenes, train_val_split=0.0)) == {"train": NUM_TRAIN}


def test_classes_and_keypoints_are_those_of_the_model_by_their_names(tmp_path: Path) -> None:
    data = load_keypoint_detection(str(write_figures(tmp_path / "figures")))
    assert data.names == ("top", "left_foot", "right_foot")
    model = {"tail": 0, "right_foot": 1, "top": 2, "left_foot": 3}
    both = (data, with_model_classes(data, model))
    given, target = (next(iter(own.examples("validation").read_targets())) for own in both)
    assert torch.equal(target["keypoints"][[2, 3, 1]], given["keypoints"])
    assert not target["keypoints"][0].any()
    assert torch.equal(target["box"], given["box"])
    # A model may have more than 256 classes, although a mask of 8-bit integers distinguishes only 256.
    names = [f"class {number}" for number in range(300)]
    data = TargetData(DatasetDict(), lambda row: {"class_labels": torch.tensor([0, 299])}, tuple(names))
    model = {name: 299 - number for number, name in enumerate(names)}
    assert with_model_classes(data, model).read_target({})["class_labels"].tolist() == [299, 0]
