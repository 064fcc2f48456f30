"""Loading of training and evaluation data: order of checks, skipped images, held-out images and sampling."""

import json
from functools import partial
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from hf_vit.training import HfViTTrainingArguments
from hf_vit.training.arguments import ClassificationArguments
from hf_vit.training.load_data import load_evaluation_targets, load_targets
from hf_vit.training.tasks.image_classification import open_labeled

from ..helpers.datasets import truncate, write_class_folders, write_pictures
from ..helpers.fresh import ROOT, run_python
from .errors import expect_error


NAMES = ["cat", "dog", "fox"]
LABEL2ID = {name: number for number, name in enumerate(NAMES)}


def load_splits(data: ClassificationArguments, args: HfViTTrainingArguments) -> DatasetDict:
    return load_targets(partial(open_labeled, data.dataset_name, **data.source_options()), data, args).splits


def load_evaluation_split(
    data: ClassificationArguments, split: str | None, label2id: dict[str, int], args: HfViTTrainingArguments
) -> tuple[str, Dataset]:
    load = partial(open_labeled, data.dataset_name, **data.source_options())
    name, loaded = load_evaluation_targets(load, data, split, label2id, args)
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
    """Return a data folder with class folders but no splits."""
    folder = tmp_path / "unsplit"
    write_pictures(folder, *(f"{name}/{number}.png" for name in NAMES for number in range(8)))
    return folder


def test_a_share_of_train_is_held_out_where_there_is_no_validation(photos: Path, args: HfViTTrainingArguments) -> None:
    splits = load_splits(ClassificationArguments(dataset_name=str(photos), train_val_split=0.25), args)
    assert sizes(splits) == {"train": 9, "validation": 3, "test": 6}
    assert sorted(splits["validation"]["label"]) == [0, 1, 2]
    everything = load_splits(ClassificationArguments(dataset_name=str(photos), train_val_split=0), args)
    assert sizes(everything) == {"train": 12, "test": 6}
    trial = {"train_val_split": 0.25, "max_train_samples": 5, "max_eval_samples": 2}
    splits = load_splits(ClassificationArguments(dataset_name=str(photos), **trial), args)
    assert sizes(splits) == {"train": 5, "validation": 2, "test": 2}


def test_unreadable_images_of_all_splits_are_named_at_once_or_left_out(photos, args):
    truncate(photos / "train" / "dog" / "2.png")
    truncate(photos / "test" / "fox" / "0.png")
    options = {"dataset_name": str(photos), "train_val_split": 0}
    with pytest.raises(ValueError, match=r"(?s)2 of 18 .*train/dog/2\.png.*test/fox/0\.png.*set skip_unreadable"):
        load_splits(ClassificationArguments(**options), args)
    splits = load_splits(ClassificationArguments(**options, skip_unreadable=True), args)
    assert sizes(splits) == {"train": 11, "test": 5}
    unchecked = load_splits(ClassificationArguments(**options, check_images=False), args)
    assert sizes(unchecked) == {"train": 12, "test": 6}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("damaged", range(4))
def test_a_class_keeps_its_other_images_when_one_is_damaged(photos, args, damaged):
    # Unreadable images are removed before the split. Otherwise, the validation split could lose its only image of a
    # class.
    truncate(photos / "train" / "dog" / f"{damaged}.png")
    data = ClassificationArguments(dataset_name=str(photos), train_val_split=0.25, skip_unreadable=True)
    splits = load_splits(data, args)
    assert set(splits["train"]["label"]) == set(splits["validation"]["label"]) == {0, 1, 2}
    assert len(splits["train"]) + len(splits["validation"]) == 11


def test_labels_are_numbered_as_the_model_does(photos: Path, args: HfViTTrainingArguments) -> None:
    label2id, data = {"fox": 0, "cow": 1, "cat": 2, "dog": 3}, ClassificationArguments(dataset_name=str(photos))
    name, split = load_evaluation_split(data, None, label2id, args)
    assert (name, split.features["label"].names) == ("test", list(label2id))
    assert split["label"][:] == [2, 2, 3, 3, 0, 0]  # in the order of the folders: cat, dog, fox
    with pytest.raises(ValueError, match=r"The model has no classes dog, fox of .*photos; its classes are cat, cow"):
        load_evaluation_split(data, "test", {"cat": 0, "cow": 1}, args)
    expect_error(r"has no split 'val'. Choose test or train", load_evaluation_split, data, "val", label2id, args)


@pytest.mark.parametrize("label2id", [LABEL2ID, {"fox": 0, "dog": 1, "cat": 2}])
def test_the_validation_images_of_a_training_are_evaluated_where_there_are_no_others(unsplit, args, label2id):
    truncate(unsplit / "dog" / "2.png")
    options = {"dataset_name": str(unsplit), "skip_unreadable": True, "train_val_split": 0.25}
    trained = load_splits(ClassificationArguments(**options), args)
    for split in (None, "validation"):
        name, images = load_evaluation_split(ClassificationArguments(**options), split, label2id, args)
        assert (name, images["file"][:]) == ("validation", trained["validation"]["file"][:])
        assert not set(images["file"]) & set(trained["train"]["file"])
        assert images["label"][:] == [label2id[Path(file).parent.name] for file in images["file"]]


def test_scoring_training_images_is_warned_of(unsplit, args, caplog):
    data = ClassificationArguments(dataset_name=str(unsplit), train_val_split=0)
    with pytest.raises(ValueError, match=r"has no split 'validation'. Choose train\."):
        load_evaluation_split(data, "validation", LABEL2ID, args)
    for split in (None, "train"):
        assert not caplog.records
        name, images = load_evaluation_split(data, split, LABEL2ID, args)
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
from hf_vit.training.arguments import ClassificationArguments
from hf_vit.training.load_data import load_targets
from hf_vit.training.tasks.image_classification import open_labeled

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
    for name in ("train/cat/1.png", "train/dog/0.png", "test/fox/1.png"):
        truncate(photos / name)
    (photos.parent / "check.py").write_text(SHARED_CHECK)
    finished = run_python("check.py", workdir=photos.parent, processes=2, PYTHONPATH=str(ROOT))
    assert finished.returncode == 0, finished.stderr
    (first, error), (second, same) = (json.loads((photos.parent / f"{rank}.json").read_text()) for rank in (0, 1))
    assert (first, second) == (9, 9)
    assert error == same
    files = [line.strip().partition(" cannot")[0] for line in error.splitlines()[1:-1]]
    assert [str(Path(file).relative_to(photos)) for file in files] == [
        "train/cat/1.png",
        "train/dog/0.png",
        "test/fox/1.png",
    ]
