"""Test loading training and evaluation data: order of checks, skipped images, held-out images and sampling."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from hf_vit.data.datasets import Division
from hf_vit.tasks.common.arguments import ClassificationArguments
from hf_vit.tasks.common.load_data import NotHeldOutError, load_evaluation_targets, load_targets
from hf_vit.tasks.image_classification import open_labeled
from hf_vit.training import HfViTTrainingArguments

from ..helpers.datasets import truncate, write_class_folders, write_pictures
from ..helpers.fresh import ROOT, run_python
from .errors import expect_error


NAMES = ["cat", "dog", "fox"]
LABEL2ID = {name: number for number, name in enumerate(NAMES)}


def load(folder: Path, args: HfViTTrainingArguments, **options: Any) -> DatasetDict:
    data = ClassificationArguments(dataset_name=str(folder), **options)
    return load_targets(partial(open_labeled, str(folder), **data.source_options()), data, args).splits


def load_evaluated(
    folder: Path, args: HfViTTrainingArguments, split: str | None, label2id: dict[str, int], **options: Any
) -> tuple[str, Dataset]:
    data = ClassificationArguments(dataset_name=str(folder), **options)
    opened = partial(open_labeled, str(folder), **data.source_options())
    name, loaded = load_evaluation_targets(opened, data, split, label2id, args)
    assert loaded.names == tuple(label2id)
    return name, loaded.splits[name]


def sizes(splits: DatasetDict) -> dict[str, int]:
    return {name: len(split) for name, split in splits.items()}


@pytest.fixture
def args(tmp_path: Path) -> HfViTTrainingArguments:
    return HfViTTrainingArguments(output_dir=str(tmp_path / "output"), use_cpu=True, report_to="none")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_class_folders(tmp_path / "photos", NAMES)


@pytest.fixture
def unsplit(tmp_path: Path) -> Path:
    """Return a data folder with class folders that are not divided into splits."""
    write_pictures(tmp_path / "unsplit", *(f"{name}/{number}.png" for name in NAMES for number in range(8)))
    return tmp_path / "unsplit"


def test_a_share_of_train_is_held_out_where_there_is_no_validation(photos: Path, args: HfViTTrainingArguments) -> None:
    splits = load(photos, args, train_val_split=0.25)
    assert sizes(splits) == {"train": 9, "validation": 3, "test": 6}
    assert sorted(splits["validation"]["label"]) == [0, 1, 2]
    assert sizes(load(photos, args, train_val_split=0)) == {"train": 12, "test": 6}
    few = load(photos, args, train_val_split=0.25, max_train_samples=5, max_eval_samples=2)
    assert sizes(few) == {"train": 5, "validation": 2, "test": 2}


def test_unreadable_images_of_all_splits_are_named_at_once_or_left_out(photos, args):
    for name in ("train/dog/2.png", "test/fox/0.png"):
        truncate(photos / name)
    message = r"(?s)2 of 18 .*train/dog/2\.png.*test/fox/0\.png.*set skip_unreadable"
    expect_error(message, load, photos, args, train_val_split=0)
    assert sizes(load(photos, args, train_val_split=0, skip_unreadable=True)) == {"train": 11, "test": 5}
    assert sizes(load(photos, args, train_val_split=0, check_images=False)) == {"train": 12, "test": 6}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("damaged", range(4))
def test_a_class_keeps_its_other_images_when_one_is_damaged(photos, args, damaged):
    # Unreadable images are removed before the split. Otherwise, the validation split could lose its only image of a
    # class.
    truncate(photos / "train" / "dog" / f"{damaged}.png")
    splits = load(photos, args, train_val_split=0.25, skip_unreadable=True)
    assert set(splits["train"]["label"]) == set(splits["validation"]["label"]) == {0, 1, 2}
    assert len(splits["train"]) + len(splits["validation"]) == 11


def test_labels_are_numbered_as_the_model_does(photos: Path, args: HfViTTrainingArguments) -> None:
    label2id = {"fox": 0, "cow": 1, "cat": 2, "dog": 3}
    name, split = load_evaluated(photos, args, None, label2id)
    assert (name, split.features["label"].names) == ("test", list(label2id))
    # Images are sorted by their class folders: cat, dog, fox.
    assert split["label"][:] == [2, 2, 3, 3, 0, 0]
    message = r"The model has no classes dog, fox of .*photos; its classes are cat, cow"
    expect_error(message, load_evaluated, photos, args, "test", {"cat": 0, "cow": 1})
    expect_error(r"has no split 'val'. Choose test or train", load_evaluated, photos, args, "val", label2id)


@pytest.mark.parametrize("label2id", [LABEL2ID, {"fox": 0, "dog": 1, "cat": 2}])
def test_the_validation_images_of_a_training_are_evaluated_where_there_are_no_others(unsplit, args, label2id):
    truncate(unsplit / "dog" / "2.png")
    options = {"skip_unreadable": True, "train_val_split": 0.25}
    trained = load(unsplit, args, **options)
    for split in (None, "validation"):
        name, images = load_evaluated(unsplit, args, split, label2id, **options)
        assert (name, images["file"][:]) == ("validation", trained["validation"]["file"][:])
        assert not set(images["file"]) & set(trained["train"]["file"])
        assert images["label"][:] == [label2id[Path(file).parent.name] for file in images["file"]]


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Return a data folder with 90 training images, 60 validation images and 12 test images."""
    counts = {"train": 30, "validation": 20, "test": 4}
    places = [f"{split}/{name}/{i}.png" for split, count in counts.items() for name in NAMES for i in range(count)]
    write_pictures(tmp_path / "many", *places)
    return tmp_path / "many"


@pytest.mark.parametrize("is_held_out", [True, False])
def test_images_that_choose_the_weights_do_not_calibrate(many, args, is_held_out):
    if is_held_out:
        shutil.rmtree(many / "validation")
    data = ClassificationArguments(dataset_name=str(many), train_val_split=0.5)
    known, open_data = Division(holds_out=True, chooses_weights=True), partial(open_labeled, str(many))
    trained = load_targets(open_data, data, args, weights_are_chosen=True).splits
    count = 45 if is_held_out else 60
    assert sizes(trained) == {
        **{"train": 45 if is_held_out else 90, "validation": (count + 1) // 2},
        **{"test": 12, "calibration": count // 2},
    }
    files = {name: set(split["file"]) for name, split in trained.items()}
    assert len(set.union(*files.values())) == sum(map(len, files.values()))
    for split in ("validation", "calibration"):
        _, found = load_evaluation_targets(open_data, data, split, LABEL2ID, args, known=known)
        assert found.splits[split]["file"][:] == trained[split]["file"][:]
    data.calibrate = False  # all validation images choose
    assert "calibration" not in load_targets(open_data, data, args, weights_are_chosen=True).splits
    with pytest.raises(NotHeldOutError, match=rf"All {count} held-out images .* chose the weights"):
        load_evaluation_targets(open_data, data, "calibration", LABEL2ID, args, known=replace(known, calibrates=False))


def test_calibration_uses_images_that_training_neither_saw_nor_reported(many, args):
    def chosen(share: float | None, as_test: bool = False, is_known: bool = True) -> set[str]:
        data = ClassificationArguments(dataset_name=str(many), train_val_split=share, validation_as_test=as_test)
        known, open_data = Division(holds_out=is_known), partial(open_labeled, str(many))
        _, found = load_evaluation_targets(open_data, data, "calibration", LABEL2ID, args, known=known)
        files = found.splits["calibration"]["file"][:]
        return {f"{len(files)} of {Path(file).relative_to(many).parts[0]}" for file in files}

    # A validation split next to a test split is that of the user, even if training used another one as test split.
    assert chosen(0.5, as_test=True) == chosen(0.0) == chosen(None, is_known=False) == {"60 of validation"}
    shutil.rmtree(many / "test")
    assert chosen(0.5, as_test=True) == {"45 of train"}
    for share in (0.5, 0.0):
        with pytest.raises(NotHeldOutError, match="training, except for the reported ones") as raised:
            chosen(share)
        assert raised.value.options == "--train_val_split 0.45 --validation_as_test true"
    shutil.rmtree(many / "validation")
    assert chosen(0.5) == {"45 of train"}
    for unknown in ({"share": 0.0}, {"share": None, "is_known": False}):
        with pytest.raises(NotHeldOutError, match=r"No images .* are known to be held out"):
            chosen(**unknown)


def test_scoring_training_images_is_warned_of(unsplit, args, caplog):
    message, options = r"has no split 'validation'. Choose train\.", {"train_val_split": 0}
    expect_error(message, load_evaluated, unsplit, args, "validation", LABEL2ID, **options)
    for split in (None, "train"):
        assert not caplog.records
        name, images = load_evaluated(unsplit, args, split, LABEL2ID, **options)
        assert (name, len(images)) == ("train", 24)
        assert "Evaluating on training images" in caplog.text
        caplog.clear()


SHARED_CHECK = """
import json
from functools import partial
from pathlib import Path
from accelerate import PartialState
from hf_vit.data import datasets
from hf_vit.training import HfViTTrainingArguments
from hf_vit.tasks.common.arguments import ClassificationArguments
from hf_vit.tasks.common.load_data import load_targets
from hf_vit.tasks.image_classification import open_labeled

opened = []
decode_image = datasets.decode_image
datasets.decode_image = lambda *image: (opened.append(1), decode_image(*image))[1]
args = HfViTTrainingArguments(output_dir="output", use_cpu=True)
data = ClassificationArguments(dataset_name="photos", train_val_split=0)
try:
    load_targets(partial(open_labeled, data.dataset_name, **data.source_options()), data, args)
except ValueError as error:
    Path(f"{args.process_index}.json").write_text(json.dumps([len(opened), str(error)]))
PartialState().destroy_process_group()
"""


def test_two_processes_share_the_check_and_what_they_find(photos: Path) -> None:
    damaged = ("train/cat/1.png", "train/dog/0.png", "test/fox/1.png")
    for name in damaged:
        truncate(photos / name)
    (photos.parent / "check.py").write_text(SHARED_CHECK)
    finished = run_python("check.py", workdir=photos.parent, processes=2, PYTHONPATH=str(ROOT))
    assert finished.returncode == 0, finished.stderr
    (first, error), (second, same) = (json.loads((photos.parent / f"{rank}.json").read_text()) for rank in (0, 1))
    assert (first, second) == (9, 9)
    assert error == same
    files = [line.strip().partition(" cannot")[0] for line in error.splitlines()[1:-1]]
    assert files == [f"{photos}/{name}" for name in damaged]
