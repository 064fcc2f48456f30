"""Data problems are reported before training and in the model card; data without any usable target are refused."""

import json
import unicodedata
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hf_vit.data import load_image_classification, load_semantic_segmentation
from hf_vit.data.formats.classes import ClassList, index_table
from hf_vit.training import TASKS, HfViTTrainingArguments, Task, data_notes
from hf_vit.training.run import plan_evaluation

from ..helpers.datasets import write_class_folders, write_image
from ..helpers.dense_trainings import A_FEW_STEPS, ALL_TASKS, arguments_of, run_task, train, write_scenes
from ..helpers.object_trainings import write_figures, write_objects
from ..helpers.options import evaluation_values, task_of


SEMANTIC, UNIVERSAL = "semantic_segmentation", "universal_segmentation"
BINARY = ["--class_names", "floor,cat", "--thing_classes", "cat"]


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    messages: list[str] = []
    monkeypatch.setattr(data_notes.logger, "warning", lambda text, *values: messages.append(text % values))
    return messages


def change_masks(scenes: Path, to: dict[int, int], files: Iterable[str] = ("*/masks/*.png",)) -> None:
    """Replace values of masks."""
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
    """Masks with 0 for the floor and 255 for animals."""
    change_masks(scenes, {255: 0})
    change_masks(scenes, {1: 255, 2: 255})
    (scenes / "classes.txt").unlink()
    return scenes


def options_of(task: str) -> list[str]:
    return BINARY if task == UNIVERSAL else BINARY[:2]


def load(task: str, data: Path, *options: str) -> Task:
    """Load the training data as the script does."""
    made = task_of(ALL_TASKS[task], arguments_of(task, data, data.parent / "out", *options))
    made.load_data()
    return made


@pytest.mark.parametrize("task", [SEMANTIC, UNIVERSAL])
def test_masks_of_0_and_255_are_refused_unless_said_to_be_so(task: str, black_and_white: Path) -> None:
    out = black_and_white.parent / "out"
    with pytest.raises(SystemExit, match=r"8 train masks all pixels are of the class 'floor', .*--binary_masks true"):
        run_task(task, black_and_white, out, *options_of(task))
    assert not out.exists()
    loaded = load(task, black_and_white, *options_of(task), "--binary_masks", "true")
    assert loaded.data_notes == []
    example = loaded.loaded.examples("train")[0]
    mask = np.array(Image.open(black_and_white / "train" / "masks" / "0.png")) == 255
    animal = example["segmentation_map"] == 1 if task == SEMANTIC else example["masks"][1]
    assert np.array_equal(animal.numpy(), mask)
    assert mask.any()


def test_an_evaluation_alone_refuses_masks_of_0_and_255(black_and_white: Path) -> None:
    folder = black_and_white.parent
    binary = [*options_of(SEMANTIC), "--binary_masks", "true"]
    trained = train(SEMANTIC, black_and_white, folder / "out", *A_FEW_STEPS, *binary)
    arguments = ["--model_name_or_path", str(folder / "out"), "--dataset_name", str(black_and_white), "--use_cpu"]
    arguments += ["--output_dir", str(folder / "scores"), "--disable_tqdm", "true", *options_of(SEMANTIC)]
    task, saved = plan_evaluation(evaluation_values(arguments))
    with pytest.raises(
        ValueError, match=r"5 validation masks all pixels are of the class 'floor'.*any model scores 1"
    ):
        task.make_evaluation_trainer(saved)
    task, saved = plan_evaluation(evaluation_values([*arguments, "--binary_masks", "true"]))
    trainer, split = task.make_evaluation_trainer(saved)
    assert task.evaluate(trainer, split)[0]["mean_iou"] == pytest.approx(trained["mean_iou"], rel=1e-5)


def test_binary_masks_have_two_numbers_and_two_classes(tmp_path: Path, scenes: Path) -> None:
    assert index_table(ClassList(("a", "b"), binary_masks=True))[[0, 1, 254, 255]].tolist() == [1, 0, 0, 2]
    for options in ({"names": ("a",)}, {"names": ("a", "b"), "reduce_labels": True}):
        with pytest.raises(ValueError, match=r"binary_masks is for masks of 0 and 255 with two classes"):
            ClassList(**options, binary_masks=True)
    data = load_semantic_segmentation(str(scenes), class_names=["floor", "cat"], binary_masks=True)
    with pytest.raises(ValueError, match=r"has the labels 1, which are outside the class list"):
        data.examples("train")[0]


@pytest.mark.parametrize("task", [SEMANTIC, UNIVERSAL])
def test_a_class_without_a_training_pixel_is_named_also_in_the_card(
    task: str, scenes: Path, warnings: list[str]
) -> None:
    change_masks(scenes, {2: 0}, ["train/masks/*.png"])
    train(task, scenes, scenes.parent / "out", *A_FEW_STEPS)
    assert warnings == ["No training images have 'dog': a model cannot learn them. But validation has 'dog'."]
    assert "Never seen in training: 'dog'." in (scenes.parent / "out" / "README.md").read_text()


@pytest.mark.parametrize("task", [SEMANTIC, UNIVERSAL])
def test_a_mask_of_no_class_among_others_is_named_also_in_the_card(
    task: str, scenes: Path, warnings: list[str]
) -> None:
    change_masks(scenes, {0: 255, 1: 255, 2: 255}, ["train/masks/[25].png", "val/masks/1.png"])
    notes = load(task, scenes).data_notes
    assert notes == [
        "2 of 8 train masks have no pixel of any class.",
        "1 of 5 validation masks have no pixel of any class.",
    ]
    images = scenes.absolute() / "train" / "images"
    assert warnings[0] == f"{notes[0][:-1]}, and count for nothing:\n  {images / '2.png'}\n  {images / '5.png'}"
    assert "val/images/1.png" in warnings[1]


def test_whole_data_are_noted_nothing_of(scenes: Path, tmp_path: Path, warnings: list[str]) -> None:
    for task, data in {
        SEMANTIC: scenes,
        UNIVERSAL: scenes,
        "depth_estimation": scenes,
        "object_detection": write_objects(tmp_path / "objects"),
        "keypoint_detection": write_figures(tmp_path / "figures"),
    }.items():
        assert load(task, data).data_notes == []
    assert not warnings


def test_what_there_was_no_time_to_read_is_told(
    scenes: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_notes, "MAX_SECONDS", -1.0)
    notes = load(SEMANTIC, scenes).data_notes
    assert notes in (
        [f"Never seen in training (among the 1 of 8 that were read): {name!r}."] for name in ("cat", "dog")
    )
    assert "No training images (among the 1 of 8 that were read) have" in warnings[0]
    change_masks(scenes, {1: 255, 2: 255})
    assert len(load(SEMANTIC, scenes).data_notes) == 1  # one mask does not represent the others


@pytest.mark.parametrize(
    ("task", "write", "name"),
    [("object_detection", write_objects, "leaf"), ("keypoint_detection", write_figures, "left_foot")],
)
def test_classes_without_boxes_and_keypoints_never_labeled_are_named(
    task: str, write: object, name: str, tmp_path: Path, warnings: list[str]
) -> None:
    file = write(tmp_path / "data") / "train" / "annotations.json"
    content = json.loads(file.read_text())
    if task == "object_detection":  # keeps a crowd annotation, which training ignores
        content["annotations"] = [
            entry for entry in content["annotations"] if entry["category_id"] == 1 or entry["iscrowd"]
        ]
    else:
        for entry in content["annotations"]:
            entry["keypoints"][3:6] = [0, 0, 0]
    file.write_text(json.dumps(content))
    notes = load(task, tmp_path / "data").data_notes
    assert notes == [f"Never seen in training: {name!r}."]
    examples = {"object_detection": "images", "keypoint_detection": "objects"}[task]
    assert warnings == [
        f"No training {examples} have {name!r}: a model cannot learn them. But validation has {name!r}."
    ]


def classify(data: Path, *options: str) -> Task:
    task_class = TASKS["image-classification"]
    arguments = [
        "--preset",
        "tiny",
        "--dataset_name",
        str(data),
        "--output_dir",
        str(data.parent / "out"),
        "--use_cpu",
    ]
    arguments += ["--disable_tqdm", "true", "--report_to", "none", *options]
    task = task_of(task_class, arguments)
    task.load_data()
    return task


def test_classes_without_a_training_image_are_named(tmp_path: Path, warnings: list[str]) -> None:
    folder = write_class_folders(tmp_path / "pets", ["cat", "cow", "dog"])
    names = load_image_classification(str(folder))["train"].features["label"]
    for split, labels in {"train": [0, 2, 0, 2], "validation": [0, 1, 2]}.items():
        images = load_image_classification(str(folder))["train" if split == "train" else "test"]
        rows = images.select(range(len(labels))).remove_columns("label")
        rows.add_column("label", labels, feature=names).to_parquet(tmp_path / "table" / f"{split}.parquet")
    notes = classify(tmp_path / "table").data_notes
    assert notes == ["Never seen in training: 'cow'."]
    assert warnings == ["No training images have 'cow': a model cannot learn them. But validation has 'cow'."]
    warnings.clear()
    stream = ["--streaming", "true", "--max_steps", "1", "--save_strategy", "no", "--eval_strategy", "no"]
    notes = classify(tmp_path / "table", *stream, "--per_device_train_batch_size", "2").data_notes
    assert notes == [
        "Duplicates were not looked for, as the training images are a stream.",
        "Never seen in training (among the 4 that were read): 'cow'.",
    ]
    with pytest.raises(ValueError, match=r"All 1 train images are of the class '.*', but two classes are the least"):
        classify(tmp_path / "table", "--max_train_samples", "1")


def test_classes_whose_names_look_alike_are_named_also_in_the_card(
    tmp_path: Path, warnings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    composed, decomposed = (unicodedata.normalize(form, "Épagneul") for form in ("NFC", "NFD"))
    folder = write_class_folders(
        tmp_path / "pets", ["cat", "Cat", "black cat", "black  cat", composed, decomposed, "cow"]
    )
    note = "Names that differ only in case, spaces or Unicode form: 'Cat', 'cat' and "
    assert classify(folder).data_notes == [f"{note}{decomposed!r}, {composed!r} and 'black  cat', 'black cat'."]
    assert note in caplog.text
    assert not warnings
    assert "Names that differ" not in " ".join(
        classify(write_class_folders(tmp_path / "two", ["cat", "dog"])).data_notes
    )


def test_what_was_changed_when_data_were_opened_is_in_the_card(tmp_path: Path) -> None:
    file = write_objects(tmp_path / "objects") / "train" / "annotations.json"
    content = json.loads(file.read_text())
    content["annotations"].append({**content["annotations"][0], "id": 9999})
    file.write_text(json.dumps(content))
    train("object_detection", tmp_path / "objects", tmp_path / "boxes", *A_FEW_STEPS)
    assert (
        "1 exact duplicates of boxes with the same image and class were removed."
        in (tmp_path / "boxes" / "README.md").read_text()
    )
    file = write_figures(tmp_path / "figures") / "train" / "annotations.json"
    content = json.loads(file.read_text())
    content["annotations"][0]["keypoints"][:3] = [-1, -1, 2]
    file.write_text(json.dumps(content))
    train("keypoint_detection", tmp_path / "figures", tmp_path / "poses", *A_FEW_STEPS)
    assert "1 keypoints at -1, -1 are treated as not labeled." in (tmp_path / "poses" / "README.md").read_text()


def test_targets_are_read_in_shares_by_several_processes(
    scenes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_masks(scenes, {0: 255, 1: 255, 2: 255}, ["train/masks/[25].png"])
    examples = load_semantic_segmentation(str(scenes)).examples("train")
    args = HfViTTrainingArguments(str(tmp_path / "out"), use_cpu=True, report_to="none", disable_tqdm=True)
    whole = data_notes.see_classes(examples, 3, args)
    parts: list = []
    for rank in range(3):
        monkeypatch.setattr(data_notes, "gather_object", lambda part: parts.extend(part) or parts)
        monkeypatch.setattr(HfViTTrainingArguments, "process_index", rank)
        monkeypatch.setattr(HfViTTrainingArguments, "world_size", 3)
        shared = data_notes.see_classes(examples, 3, args)
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
        with pytest.raises(SystemExit, match=r"must not contain the data.*Choose another output"):
            run_task(SEMANTIC, root / data, tmp_path / output)
    assert sorted(tmp_path.rglob("*")) == before
