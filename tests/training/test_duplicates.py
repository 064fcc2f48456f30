"""Duplicates of images across splits or labels are reported before training, in a dry run, and in the model card."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from hf_vit.data import load_image_classification
from hf_vit.training import data_notes
from hf_vit.training.tasks.zero_shot_image_classification import ImageTextContrast

from ..helpers.datasets import write_class_folders, write_depth_folders
from ..helpers.dense_trainings import A_FEW_STEPS, ALL_TASKS, arguments_of, write_scenes
from ..helpers.image_text_trainings import arguments_of as captioned
from ..helpers.image_text_trainings import write_captions
from ..helpers.object_trainings import write_figures, write_objects
from ..helpers.options import run, task_of
from ..helpers.pretraining import make_task, write_colors
from .test_data_notes import classify, load


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    messages: list[str] = []
    monkeypatch.setattr(data_notes.logger, "warning", lambda text, *values: messages.append(text % values))
    return messages


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    return write_class_folders(tmp_path / "pets", ["cat", "dog"])


def copy(file: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, to)


def to_table(pets: Path, folder: Path) -> Path:
    for split, rows in load_image_classification(str(pets)).items():
        rows.remove_columns("file").to_parquet(folder / f"{split}.parquet")
    return folder


@pytest.mark.parametrize("is_table", [False, True])
def test_images_of_two_splits_are_named(is_table: bool, pets: Path, tmp_path: Path, warnings: list[str]) -> None:
    assert classify(pets, "--train_val_split", "0").data_notes == []
    copy(pets / "train" / "cat" / "1.png", pets / "test" / "cat" / "copy.png")
    data = to_table(pets, tmp_path / "table") if is_table else pets
    notes = classify(data, "--train_val_split", "0").data_notes
    assert notes == ["1 of 5 test images occur in train as well."]
    (warning,) = warnings
    assert warning.startswith("1 of 5 test images occur in train as well. They are:\n  ")
    assert is_table or warning.endswith("test/cat/copy.png")


@pytest.mark.parametrize("is_across", [False, True])
def test_images_with_two_labels_are_named(is_across: bool, pets: Path, warnings: list[str]) -> None:
    copy(pets / "train" / "cat" / "1.png", pets / ("test" if is_across else "train") / "dog" / "copy.png")
    notes = classify(pets, "--train_val_split", "0").data_notes
    across = ["1 of 5 test images occur in train as well."] if is_across else []
    assert notes == [*across, "2 images occur more than once, with different labels."]
    assert "train/cat/1.png" in warnings[-1]
    assert "dog/copy.png" in warnings[-1]


def test_a_test_of_training_images_is_refused_unless_accepted(pets: Path, warnings: list[str]) -> None:
    for name in ("cat", "dog"):
        for number in range(2):
            copy(pets / "train" / name / f"{number}.png", pets / "test" / name / f"{number}.png")
    error = r"4 of 4 test images occur in train as well\. .*set allow_duplicates"
    with pytest.raises(ValueError, match=error):
        classify(pets, "--train_val_split", "0")
    notes = classify(pets, "--train_val_split", "0", "--allow_duplicates", "true").data_notes
    assert notes == ["4 of 4 test images occur in train as well."]
    for number in (2, 3):  # exactly half of the images
        shutil.copy(pets / "train" / "cat" / f"{number}.png", pets / "test" / "cat")
        Image.new("RGB", (9, number)).save(pets / "test" / "cat" / f"{number - 2}.png")
    assert classify(pets, "--train_val_split", "0", "--allow_duplicates", "true").data_notes[0].startswith("4 of 6")
    shutil.rmtree(pets / "test" / "dog")
    (pets / "test" / "dog").mkdir()
    for number in (5, 6):
        Image.new("RGB", (9, number)).save(pets / "test" / "dog" / f"{number}.png")
    assert classify(pets, "--train_val_split", "0").data_notes == ["2 of 6 test images occur in train as well."]


@pytest.mark.parametrize(
    ("task", "write"),
    [
        ("semantic_segmentation", write_scenes),
        ("universal_segmentation", write_scenes),
        ("depth_estimation", write_depth_folders),
        ("object_detection", write_objects),
        ("keypoint_detection", write_figures),
    ],
)
def test_every_task_compares_images_and_not_objects(task: str, write: Callable[[Path], Path], tmp_path: Path) -> None:
    data = write(tmp_path / "data")
    assert load(task, data).data_notes == []
    (file,) = (data / "train" / "images").glob("1.*")
    (same_size,) = (data / "val" / "images").glob("1.*")
    shutil.copy(file, same_size)
    (note,) = load(task, data).data_notes
    assert re.fullmatch(r"1 of [25] validation images occur in train as well\.", note)


def test_captioned_and_unlabeled_images_are_compared(tmp_path: Path) -> None:
    data = write_captions(tmp_path / "pairs")
    shutil.copy(data / "train" / "images" / "0.png", data / "val" / "images" / "3.png")
    task = task_of(ImageTextContrast, captioned(data, tmp_path / "out"))
    task.load_data()
    assert task.data_notes == ["1 of 11 validation images occur in train as well."]
    data = write_colors(tmp_path / "colors")
    first, second = sorted((data / "train").iterdir())[:2]
    shutil.copy(first / "0.png", data / "test" / second.name / "0.png")
    assert make_task(data, tmp_path / "out").data_notes[-1].endswith("test images occur in train as well.")


def test_what_there_was_no_time_to_compare_is_told(pets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_notes, "DUPLICATES_SECONDS", -1.0)
    notes = classify(pets, "--train_val_split", "0").data_notes
    assert notes == ["Duplicates were looked for among 16.7% of the images, for lack of time."]


def test_streams_are_exempt_with_a_note(pets: Path, tmp_path: Path) -> None:
    stream = ["--streaming", "true", "--max_steps", "1", "--save_strategy", "no", "--eval_strategy", "no"]
    data = to_table(pets, tmp_path / "table")
    notes = classify(data, *stream, "--per_device_train_batch_size", "2", "--train_val_split", "0").data_notes
    assert notes == ["Duplicates were not searched, because the training images are a stream."]


def test_the_dry_run_and_the_card_say_so(tmp_path: Path) -> None:
    data, task = write_scenes(tmp_path / "scenes"), "semantic_segmentation"
    for kind in ("images", "masks"):
        (file,) = (data / "train" / kind).glob("0.*")
        shutil.copy(file, data / "val" / kind)
    lines: list[str] = []
    arguments = arguments_of(task, data, tmp_path / "out", *A_FEW_STEPS)
    run(ALL_TASKS[task], [*arguments, "--dry_run", "true"], None, lines.append)
    note = "1 of 5 validation images occur in train as well."
    assert f"Data: {note}\n" in "\n".join(lines)
    run(ALL_TASKS[task], arguments, None, lines.append)
    assert note in (tmp_path / "out" / "README.md").read_text()
