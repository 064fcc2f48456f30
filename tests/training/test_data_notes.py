"""Test that missing classes, missing targets and duplicate images are reported before training or raise an error."""

import json
import re
import shutil
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hf_vit.data import load_image_classification, load_semantic_segmentation
from hf_vit.data.reading.classes import ClassList, index_table
from hf_vit.runs import Run
from hf_vit.runs.evaluate import open_evaluation, plan_evaluation
from hf_vit.runs.report import evaluate_run
from hf_vit.tasks import TASKS
from hf_vit.tasks.common import data_notes
from hf_vit.tasks.zero_shot_image_classification import ImageTextContrast
from hf_vit.training import HfViTTrainingArguments

from ..helpers.datasets import write_class_folders, write_depth_folders, write_image
from ..helpers.dense_trainings import A_FEW_STEPS, ALL_TASKS, arguments_of, run_task, train, write_scenes
from ..helpers.image_text_trainings import arguments_of as captioned
from ..helpers.image_text_trainings import write_captions
from ..helpers.object_trainings import write_figures, write_objects
from ..helpers.options import evaluation_values, opened_run, run
from ..helpers.pretraining import make_task, write_colors


SEMANTIC, UNIVERSAL = "semantic_segmentation", "universal_segmentation"
BINARY = ["--class_names", "floor,cat", "--thing_classes", "cat"]
NO_SPLIT = ("--train_val_split", "0")
WRITERS: dict[str, Callable[[Path], Path]] = {
    "depth_estimation": write_depth_folders,
    "object_detection": write_objects,
    "keypoint_detection": write_figures,
}


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    messages: list[str] = []
    monkeypatch.setattr(data_notes.logger, "warning", lambda text, *values: messages.append(text % values))
    return messages


def change_masks(scenes: Path, to: dict[int, int], files: Iterable[str] = ("*/masks/*.png",)) -> None:
    """Replace class numbers in mask files. `to` maps old to new numbers."""
    table = np.arange(256, dtype=np.uint8)
    table[list(to)] = list(to.values())
    for pattern in files:
        for file in scenes.glob(pattern):
            write_image(file, table[np.array(Image.open(file))])


@pytest.fixture
def scenes(tmp_path: Path) -> Path:
    return write_scenes(tmp_path / "scenes")


@pytest.fixture
def black_and_white(scenes: Path) -> Path:
    """Write masks in which floor pixels are 0 and animal pixels are 255."""
    change_masks(scenes, {255: 0})
    change_masks(scenes, {1: 255, 2: 255})
    (scenes / "classes.txt").unlink()
    return scenes


def load(task: str, data: Path, *options: str) -> Run:
    """Load the training data in the same way as the training command."""
    made = opened_run(ALL_TASKS[task], arguments_of(task, data, data.parent / "out", *options))
    return made


@pytest.mark.parametrize(("task", "options"), [(SEMANTIC, BINARY[:2]), (UNIVERSAL, BINARY)])
def test_masks_of_0_and_255_raise_without_binary_masks(task: str, options: list[str], black_and_white: Path) -> None:
    out = black_and_white.parent / "out"
    with pytest.raises(SystemExit, match=r"8 train masks have the class 'floor'; .*--binary_masks true"):
        run_task(task, black_and_white, out, *options)
    assert not out.exists()
    loaded = load(task, black_and_white, *options, "--binary_masks", "true")
    assert loaded.notes == []
    example = loaded.data.examples("train")[0]
    mask = np.array(Image.open(black_and_white / "train" / "masks" / "0.png")) == 255
    animal = example["segmentation_map"] == 1 if task == SEMANTIC else example["masks"][1]
    assert np.array_equal(animal.numpy(), mask)
    assert mask.any()


def test_an_evaluation_alone_refuses_masks_of_0_and_255(black_and_white: Path) -> None:
    folder = black_and_white.parent
    trained = train(SEMANTIC, black_and_white, folder / "out", *A_FEW_STEPS, *BINARY[:2], "--binary_masks", "true")
    arguments = ["--model_name_or_path", str(folder / "out"), "--dataset_name", str(black_and_white), "--use_cpu"]
    arguments += ["--output_dir", str(folder / "scores"), "--disable_tqdm", "true", *BINARY[:2]]
    planned = plan_evaluation(evaluation_values([*arguments, "--binary_masks", "false"]))
    message = r"5 validation masks have the class 'floor'.*At least two classes are required"
    with pytest.raises(ValueError, match=message):
        open_evaluation(*planned)
    evaluation = open_evaluation(*plan_evaluation(evaluation_values(arguments)))  # as in the recipe of the model
    assert evaluate_run(evaluation, evaluation.split)[0]["mean_iou"] == pytest.approx(trained["mean_iou"], rel=1e-5)


def test_binary_masks_have_two_numbers_and_two_classes(scenes: Path) -> None:
    assert index_table(ClassList(("a", "b"), binary_masks=True))[[0, 1, 254, 255]].tolist() == [1, 0, 0, 2]
    for options in ({"names": ("a",)}, {"names": ("a", "b"), "reduce_labels": True}):
        with pytest.raises(ValueError, match=r"binary_masks is for masks of 0 and 255 with two classes"):
            ClassList(**options, binary_masks=True)
    data = load_semantic_segmentation(str(scenes), class_names=["floor", "cat"], binary_masks=True)
    with pytest.raises(ValueError, match=r"has the labels 1, which are outside the class list"):
        data.examples("train")[0]


@pytest.mark.parametrize("task", [SEMANTIC, UNIVERSAL])
def test_classes_without_training_pixels_and_masks_of_no_class_are_named(
    task: str, scenes: Path, warnings: list[str]
) -> None:
    change_masks(scenes, {2: 0}, ["train/masks/*.png"])
    missing = "No training images have 'dog': a model cannot learn them. But validation has 'dog'."
    if task == SEMANTIC:  # both tasks write this part of the model card with the same code
        train(task, scenes, scenes.parent / "out", *A_FEW_STEPS)
        assert "Never seen in training: 'dog'." in (scenes.parent / "out" / "README.md").read_text()
    else:
        load(task, scenes)
    assert warnings == [missing]
    warnings.clear()
    change_masks(scenes, {0: 255, 1: 255, 2: 255}, ["train/masks/[25].png", "val/masks/1.png"])
    notes = load(task, scenes).notes
    assert notes == [
        "2 of 8 train masks have no pixel of any class.",
        "1 of 5 validation masks have no pixel of any class.",
        "Never seen in training: 'dog'.",
    ]
    images = scenes.absolute() / "train" / "images"
    assert warnings[0] == f"{notes[0][:-1]} and are not used:\n  {images / '2.png'}\n  {images / '5.png'}"
    assert "val/images/1.png" in warnings[1]
    assert warnings[2:] == [missing]


def test_complete_data_have_no_notes(scenes: Path, tmp_path: Path, warnings: list[str]) -> None:
    objects, figures = write_objects(tmp_path / "objects"), write_figures(tmp_path / "figures")
    places = {"object_detection": objects, "keypoint_detection": figures}
    for task in ALL_TASKS:
        assert load(task, places.get(task, scenes)).notes == []
    assert not warnings


def test_note_states_the_share_of_targets_read_within_the_time_limit(
    scenes: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_notes, "MAX_SECONDS", -1.0)
    (note,) = load(SEMANTIC, scenes).notes
    assert re.fullmatch(r"Never seen in training \(among the 1 of 8 that were read\): '(cat|dog)'\.", note)
    assert "No training images (among the 1 of 8 that were read) have" in warnings[0]
    change_masks(scenes, {1: 255, 2: 255})
    # No other problem is reported: a single mask is too little evidence.
    assert len(load(SEMANTIC, scenes).notes) == 1


@contextmanager
def changed(data: Path) -> Iterator[dict[str, Any]]:
    """Yield the training annotations for modification, and write them back at the end."""
    file = data / "train" / "annotations.json"
    content = json.loads(file.read_text())
    yield content
    file.write_text(json.dumps(content))


@pytest.mark.parametrize("task", ["object_detection", "keypoint_detection"])
def test_classes_without_boxes_and_keypoints_never_labeled_are_named(
    task: str, tmp_path: Path, warnings: list[str]
) -> None:
    with changed(WRITERS[task](tmp_path / "data")) as content:
        if task == "object_detection":  # crowd annotations are kept, because training ignores them
            entries, name, examples = content["annotations"], "leaf", "images"
            content["annotations"] = [entry for entry in entries if entry["category_id"] == 1 or entry["iscrowd"]]
        else:
            name, examples = "left_foot", "objects"
            for entry in content["annotations"]:
                entry["keypoints"][3:6] = [0, 0, 0]
    assert load(task, tmp_path / "data").notes == [f"Never seen in training: {name!r}."]
    message = f"No training {examples} have {name!r}: a model cannot learn them. But validation has {name!r}."
    assert warnings == [message]


def classify(data: Path, *options: str) -> list[str]:
    """Load the data of a classifier in the same way as the training command, and return the data notes."""
    places = ["--dataset_name", str(data), "--output_dir", str(data.parent / "out")]
    fixed = ["--preset", "tiny", "--use_cpu", "--disable_tqdm", "true", "--report_to", "none"]
    task = opened_run(TASKS["image-classification"], [*fixed, *places, *options])
    return task.notes


def test_classes_without_a_training_image_are_named(tmp_path: Path, warnings: list[str]) -> None:
    splits = load_image_classification(str(write_class_folders(tmp_path / "pets", ["cat", "cow", "dog"])))
    names = splits["train"].features["label"]
    for split, rows, labels in (("train", "train", [0, 2, 0, 2]), ("validation", "test", [0, 1, 2])):
        rows = splits[rows].select(range(len(labels))).remove_columns("label")
        rows.add_column("label", labels, feature=names).to_parquet(tmp_path / "table" / f"{split}.parquet")
    assert classify(tmp_path / "table") == ["Never seen in training: 'cow'."]
    assert warnings == ["No training images have 'cow': a model cannot learn them. But validation has 'cow'."]
    warnings.clear()
    stream = ["--streaming", "true", "--max_steps", "1", "--save_strategy", "no", "--eval_strategy", "no"]
    assert classify(tmp_path / "table", *stream, "--per_device_train_batch_size", "2") == [
        "Duplicates were not searched, because the training images are a stream.",
        "Never seen in training (among the 4 that were read): 'cow'.",
    ]
    with pytest.raises(ValueError, match=r"All 1 train images have the class '.*'. At least two classes are required"):
        classify(tmp_path / "table", "--max_train_samples", "1")


def test_classes_whose_names_look_alike_are_named(
    tmp_path: Path, warnings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    composed, decomposed = (unicodedata.normalize(form, "Épagneul") for form in ("NFC", "NFD"))
    names = ["cat", "Cat", "black cat", "black  cat", composed, decomposed, "cow"]
    note = "Names that differ only in case, spaces or Unicode form: 'Cat', 'cat' and "
    notes = classify(write_class_folders(tmp_path / "pets", names))
    assert notes == [f"{note}{decomposed!r}, {composed!r} and 'black  cat', 'black cat'."]
    assert note in caplog.text
    assert not warnings
    assert "Names that differ" not in " ".join(classify(write_class_folders(tmp_path / "two", ["cat", "dog"])))


def test_what_was_changed_when_data_were_opened_is_in_the_card(tmp_path: Path) -> None:
    with changed(write_objects(tmp_path / "objects")) as content:
        content["annotations"].append({**content["annotations"][0], "id": 9999})
    train("object_detection", tmp_path / "objects", tmp_path / "boxes", *A_FEW_STEPS)
    note = "1 exact duplicates of boxes with the same image and class were removed."
    assert note in (tmp_path / "boxes" / "README.md").read_text()
    with changed(write_figures(tmp_path / "figures")) as content:
        content["annotations"][0]["keypoints"][:3] = [-1, -1, 2]
    train("keypoint_detection", tmp_path / "figures", tmp_path / "poses", *A_FEW_STEPS)
    assert "1 keypoints at -1, -1 are treated as not labeled." in (tmp_path / "poses" / "README.md").read_text()


def test_targets_are_read_in_shares_by_several_processes(
    scenes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_masks(scenes, {0: 255, 1: 255, 2: 255}, ["train/masks/[25].png"])
    examples = load_semantic_segmentation(str(scenes)).examples("train")
    args = HfViTTrainingArguments(str(tmp_path / "out"), use_cpu=True, report_to="none", disable_tqdm=True)
    whole = data_notes.find_seen_classes(examples, 3, args)
    parts: list = []
    for rank in range(3):
        monkeypatch.setattr(data_notes, "gather_object", lambda part: parts.extend(part) or parts)
        monkeypatch.setattr(HfViTTrainingArguments, "process_index", rank)
        monkeypatch.setattr(HfViTTrainingArguments, "world_size", 3)
        shared = data_notes.find_seen_classes(examples, 3, args)
    assert torch.equal(shared.is_seen, whole.is_seen)
    assert (shared.empty, shared.num_read) == (whole.empty, 8)
    assert shared.ignored_share == pytest.approx(whole.ignored_share)
    assert [Path(file).name for file in whole.empty] == ["2.png", "5.png"]


@pytest.mark.parametrize(("data", "output"), [("scenes", "scenes/out"), ("out/scenes", "out"), ("scenes", "scenes")])
def test_results_among_the_data_are_refused_before_anything_is_written(data: str, output: str, tmp_path: Path) -> None:
    write_scenes(tmp_path / data)
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    before = sorted(tmp_path.rglob("*"))
    for root in (tmp_path, tmp_path / "link"):
        with pytest.raises(SystemExit, match=r"must neither contain the data.*Choose another output"):
            run_task(SEMANTIC, root / data, tmp_path / output)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    return write_class_folders(tmp_path / "pets", ["cat", "dog"])


def test_images_of_two_splits_and_with_two_labels_are_named(pets: Path, tmp_path: Path, warnings: list[str]) -> None:
    image, across = pets / "train" / "cat" / "1.png", "1 of 5 test images occur in train as well."
    assert classify(pets, *NO_SPLIT) == []
    shutil.copy(image, pets / "test" / "cat" / "copy.png")
    for split, rows in load_image_classification(str(pets)).items():
        rows.remove_columns("file").to_parquet(tmp_path / "table" / f"{split}.parquet")
    for data in (pets, tmp_path / "table"):
        warnings.clear()
        assert classify(data, *NO_SPLIT) == [across]
        (warning,) = warnings
        assert warning.startswith(f"{across} They are:\n  ")
        assert data != pets or warning.endswith("test/cat/copy.png")
    (pets / "test" / "cat" / "copy.png").unlink()
    for split, others in (("test", [across]), ("train", [])):
        other = shutil.copy(image, pets / split / "dog" / "copy.png")
        assert classify(pets, *NO_SPLIT) == [*others, "2 images occur more than once, with different labels."]
        assert "train/cat/1.png" in warnings[-1]
        assert "dog/copy.png" in warnings[-1]
        other.unlink()


def test_a_test_of_training_images_is_refused_unless_accepted(pets: Path) -> None:
    def draw(name: str, number: int, height: int) -> None:
        Image.new("RGB", (9, height)).save(pets / "test" / name / f"{number}.png")

    accepted = (*NO_SPLIT, "--allow_duplicates", "true")
    for name in ("cat", "dog"):
        for number in range(2):
            shutil.copy(pets / "train" / name / f"{number}.png", pets / "test" / name)
    with pytest.raises(ValueError, match=r"4 of 4 test images occur in train as well\. .*set allow_duplicates"):
        classify(pets, *NO_SPLIT)
    assert classify(pets, *accepted) == ["4 of 4 test images occur in train as well."]
    for number in (2, 3):
        shutil.copy(pets / "train" / "cat" / f"{number}.png", pets / "test" / "cat")
        draw("cat", number - 2, number)
    assert classify(pets, *accepted)[0].startswith("4 of 6")
    for number in (0, 1):
        draw("dog", number, number + 5)
    assert classify(pets, *NO_SPLIT) == ["2 of 6 test images occur in train as well."]


@pytest.mark.parametrize("task", ["semantic_segmentation", "universal_segmentation", *WRITERS])
def test_every_task_compares_images_and_not_objects(task: str, tmp_path: Path) -> None:
    data = WRITERS.get(task, write_scenes)(tmp_path / "data")
    (file,) = (data / "train" / "images").glob("1.*")
    (same_size,) = (data / "val" / "images").glob("1.*")
    shutil.copy(file, same_size)
    (note,) = load(task, data).notes
    assert re.fullmatch(r"1 of [25] validation images occur in train as well\.", note)


def test_captioned_and_unlabeled_images_are_compared(tmp_path: Path) -> None:
    data = write_captions(tmp_path / "pairs")
    shutil.copy(data / "train" / "images" / "0.png", data / "val" / "images" / "3.png")
    task = opened_run(ImageTextContrast, captioned(data, tmp_path / "out"))
    assert task.notes == ["1 of 11 validation images occur in train as well."]
    data = write_colors(tmp_path / "colors")
    first, second = sorted((data / "train").iterdir())[:2]
    shutil.copy(first / "0.png", data / "test" / second.name / "0.png")
    assert make_task(data, tmp_path / "out").notes[-1].endswith("test images occur in train as well.")


def test_note_states_the_share_of_images_searched_for_duplicates(pets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_notes, "DUPLICATES_SECONDS", -1.0)
    message = "The search for duplicates covered 16.7% of the images within its time limit."
    assert classify(pets, *NO_SPLIT) == [message]


def test_dry_run_reports_duplicates_between_splits(scenes: Path, tmp_path: Path) -> None:
    for kind in ("images", "masks"):
        (file,) = (scenes / "train" / kind).glob("0.*")
        shutil.copy(file, scenes / "val" / kind)
    lines: list[str] = []
    arguments = arguments_of(SEMANTIC, scenes, tmp_path / "out", *A_FEW_STEPS, "--dry_run", "true")
    run(ALL_TASKS[SEMANTIC], arguments, None, lines.append)
    assert "Data: 1 of 5 validation images occur in train as well.\n" in "\n".join(lines)
