"""Test loading image classification datasets from all sources, and errors for invalid datasets."""

import csv
import json
from itertools import product
from pathlib import Path

import datasets
import numpy as np
import pytest
from datasets import ClassLabel, DatasetDict, Features, Image, Value

from hf_vit.data import hold_out, load_image_classification

from ..helpers.datasets import dataset_of, encoded, picture, truncate, write_idx, write_idx_file, write_pictures
from .errors import expect_error


USUAL_COLUMNS = (
    "image label, image_path labels, path class, file category, filename target, file_name fine_label, Image label"
)


def load(source: Path, **options) -> DatasetDict:
    """Load a dataset, and check properties that do not depend on the source."""
    splits = load_image_classification(str(source), **options)
    features = {name: split.features for name, split in splits.items()}
    for name in splits:
        assert list(features[name]) == ["image", "label", "file"]
        assert features[name]["file"] == Value("string")
        assert features[name]["image"] == Image()
        assert isinstance(features[name]["label"], ClassLabel)
        assert features[name] == next(iter(features.values()))
    return splits


def names(splits: DatasetDict, split: str) -> list[str]:
    """Return the class name of each example in a split."""
    feature = splits[split].features["label"]
    return [feature.names[label] for label in splits[split]["label"]]


def by_split(splits: DatasetDict) -> dict[str, list[str]]:
    return {split: names(splits, split) for split in splits}


def classes(splits: DatasetDict) -> list[str]:
    return next(iter(splits.values())).features["label"].names


def write_csv(file: Path, columns: list[str], *rows: list, delimiter: str = ",") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as stream:
        csv.writer(stream, delimiter=delimiter).writerows([columns, *rows])


@pytest.mark.parametrize("place", [".", "MNIST/raw"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("options", [{}, {"spelling": "."}, {"prefix": "qmnist-"}])
def test_idx_files_give_their_pixels_and_labels(tmp_path, place, packed, options):
    options = {**options, "packed": packed}
    train = write_idx(tmp_path / place, "train", [2, 0, 1, 1], **options)
    test = write_idx(tmp_path / place, "t10k", [1, 2], **options)
    splits = load(tmp_path)
    assert list(splits) == ["train", "test"]
    for split, pixels in (("train", train), ("test", test)):
        assert all(image.mode == "L" for image in splits[split]["image"])
        assert np.array_equal(np.stack([np.asarray(image) for image in splits[split]["image"]]), pixels)
    assert splits["train"]["label"][:] == [2, 0, 1, 1]
    assert classes(splits) == ["0", "1", "2"]


def test_of_several_idx_files_the_unpacked_are_read_and_several_sets_are_refused(tmp_path):
    write_idx(tmp_path / "letters", "train", [1, 2, 3])
    # Class numbers are used as class names. They need not start at 0.
    assert classes(load(tmp_path / "letters")) == ["1", "2", "3"]
    write_idx(tmp_path / "MNIST" / "raw", "train", [0, 1])
    write_idx(tmp_path, "train", [1, 2, 3], prefix="qmnist-")
    expect_error(r"idx files of several datasets: '.*/MNIST/raw', '.*/qmnist-'\. Give the fol", load, tmp_path)
    assert classes(load(tmp_path / "MNIST")) == ["0", "1"]
    write_idx(tmp_path / "MNIST" / "raw", "train", [0, 1], prefix="qmnist-")
    expect_error(r"several datasets: '.*/MNIST/raw', '.*/MNIST/raw/qmnist-'", load, tmp_path / "MNIST")
    both = tmp_path / "both"
    write_idx(both, "train", [0, 1, 2], packed=True)
    pixels = write_idx(both, "train", [0, 1])
    assert np.array_equal(np.asarray(load(both)["train"][0]["image"]), pixels[0])
    write_idx_file(both / "train-images-idx3-ubyte", np.arange(24).reshape(2, 3, 4))  # images need not be square
    assert np.array_equal(np.asarray(load(both)["train"][1]["image"]), np.arange(12, 24).reshape(3, 4))


def test_bad_idx_files_are_named(tmp_path):
    for kind, packed in product(("images-idx3", "labels-idx1"), (False, True)):
        write_idx(tmp_path / f"{kind}-{packed}", "train", [0, 1, 0, 1], packed=packed)
        file = next((tmp_path / f"{kind}-{packed}").glob(f"*{kind}*"))
        truncate(file, 0.8)
        expect_error(rf"{file.name} (is truncated|cannot be decompressed).*Download it again", load, file.parent)
    folder, labels = tmp_path / "wrong", tmp_path / "wrong" / "train-labels-idx1-ubyte"
    write_idx(folder, "train", [0, 1])
    write_idx_file(labels, np.array([0, 1, 0]))
    expect_error(r"images-idx3-ubyte contains 2 images, but .*-ubyte contains 3 labels", load, folder)
    labels.write_bytes(b"<html>")
    expect_error(r"labels-idx1-ubyte starts with the bytes 3c 68 74 6d instead of 00 00 08 01", load, folder)
    labels = labels.rename(f"{labels}.gz")
    expect_error(r"labels-idx1-ubyte\.gz cannot be decompressed: Not a gzipped file", load, folder)
    labels.unlink()
    expect_error(r"train-images-idx3-ubyte has no matching idx file of labels", load, folder)


def test_parquet_files_say_their_split_or_are_one_training_set(tmp_path):
    for files in (
        ("data/train-00000-of-00001.parquet", "data/validation-00000-of-00001.parquet", "data/test-0.parquet"),
        ("train.parquet", "val.parquet", "test.parquet"),
        ("train/0000.parquet", "dev/0000.parquet", "test/0000.parquet"),
    ):
        folder = tmp_path / files[1].replace("/", "-")
        for name, labels in zip(files, ([0, 1, 1], [1], [0, 0]), strict=True):
            dataset_of(labels, ["dog", "cat"]).to_parquet(folder / name)
        splits = load(folder)
        assert by_split(splits) == {"train": ["dog", "cat", "cat"], "validation": ["cat"], "test": ["dog", "dog"]}
        assert np.array_equal(np.asarray(splits["train"][2]["image"]), np.asarray(picture(2)))
    folder = tmp_path / "odd [name]"
    dataset_of([0, 1], ["dog", "cat"]).to_parquet(folder / "0.parquet")
    dataset_of([1], ["dog", "cat"]).to_parquet(folder / "1.parquet")
    assert names(load(folder), "train") == ["dog", "cat", "cat"]
    assert names(load(folder / "0.parquet"), "train") == ["dog", "cat"]


def test_parquet_without_the_metadata_of_datasets(tmp_path):
    content = [encoded(picture(number)) for number in range(3)]
    images = Features({"img": {"bytes": Value("binary"), "path": Value("string")}, "labels": Value("int32")})
    columns = {"img": [{"bytes": image, "path": "a.png"} for image in content], "labels": [2, 0, 2]}
    datasets.Dataset.from_dict(columns, features=images).to_parquet(tmp_path / "train.parquet")
    bare = datasets.Dataset.from_dict({"image": content, "class": ["0", "2", "2"]})
    bare.cast_column("image", Value("binary")).to_parquet(tmp_path / "test.parquet")
    splits = load(tmp_path)
    assert (by_split(splits), classes(splits)) == ({"train": list("202"), "test": list("022")}, ["0", "2"])
    assert np.array_equal(np.asarray(splits["test"][1]["image"]), np.asarray(picture(1)))
    # The error contains the name of the truncated or empty file.
    dataset_of([0, 1], ["dog", "cat"]).to_parquet(tmp_path / "train.parquet")
    dataset_of([0, 1], ["dog", "cat"]).select([]).to_parquet(tmp_path / "test.parquet")
    expect_error(r"'test' cannot be read from '.*/test.parquet': .*no data", load, tmp_path)
    truncate(tmp_path / "train.parquet")
    expect_error(r"'train' cannot be read from '.*/train.parquet': Parquet magic bytes", load, tmp_path)


def test_columns_of_other_names_or_contents_are_named_and_chosen(tmp_path):
    cifar = dataset_of([0, 1], ["apple", "bear"], "img", "fine_label")
    cifar = cifar.add_column("coarse_label", [1, 0], feature=ClassLabel(names=["animal", "fruit"]))
    cifar.to_parquet(tmp_path / "cifar.parquet")
    message = r"several possible columns: 'fine_label', 'coarse_label'. Set label_column_name to one"
    expect_error(message, load, tmp_path / "cifar.parquet")
    for column, labels in (("coarse_label", ["fruit", "animal"]), ("fine_label", ["apple", "bear"])):
        assert names(load(tmp_path / "cifar.parquet", label_column_name=column), "train") == labels
    file = tmp_path / "train.parquet"
    dataset_of(["a", "b"], None, "picture", "kind").to_parquet(file)
    expect_error(r"'train' has no column with a usual name \(label, .*\), only 'picture', 'kind'", load, file)
    message = r"no column 'species', only 'picture', 'kind'. Set label_column_name to one of them\."
    expect_error(message, load, file, label_column_name="species")
    message = r"no encoded images in the column 'kind', which is of type Value\('string'\)"
    expect_error(message, load, file, image_column_name="kind", label_column_name="kind")
    assert classes(load(file, label_column_name="kind")) == ["a", "b"]


def test_saved_datasets_are_opened(tmp_path):
    train, test = dataset_of([0, 1], ["dog", "cat"], "img"), dataset_of([1], ["dog", "cat"], "img")
    DatasetDict({"train": train, "valid": test, "unsupervised": test}).save_to_disk(tmp_path / "all")
    assert by_split(load(tmp_path / "all")) == {"train": ["dog", "cat"], "validation": ["cat"]}
    train.save_to_disk(tmp_path / "one")
    assert names(load(tmp_path / "one"), "train") == ["dog", "cat"]
    # A single split is used for training, whatever its name.
    DatasetDict({"full": train}).save_to_disk(tmp_path / "full")
    assert list(load(tmp_path / "full")) == ["train"]
    DatasetDict({"full": train, "small": train}).save_to_disk(tmp_path / "two")
    expect_error("'full', 'small' are unknown. Rename them to one of train, training", load, tmp_path / "two")


def test_csv_with_usual_columns_and_tables_of_other_kinds(tmp_path):
    for columns in USUAL_COLUMNS.split(", "):
        write_pictures(tmp_path, "images/0.png", "images/1.png")
        write_csv(tmp_path / "list.csv", columns.split(), ["images/0.png", "dog"], ["images/1.png", "cat"])
        splits = load(tmp_path / "list.csv")
        assert (names(splits, "train"), classes(splits)) == (["dog", "cat"], ["cat", "dog"])
        assert np.array_equal(np.asarray(splits["train"][1]["image"]), np.asarray(picture(1)))
    write_pictures(tmp_path, "0.png", "1.png", "2.png")
    rows = [["0.png", 10], ["1.png", 9], ["2.png", 10]]
    write_csv(tmp_path / "tabs.tsv", ["path", "label"], *rows, delimiter="\t")
    write_csv(tmp_path / "semicolons.csv", ["path", "label"], *rows, delimiter=";")
    (tmp_path / "bom.csv").write_text("path, label\n0.png, 10\n\n1.png,9\n2.png,10\n", encoding="utf-8-sig")
    lines = [json.dumps({"path": path, "label": label, "box": [1, 2]}) for path, label in rows]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    for name in ("tabs.tsv", "semicolons.csv", "bom.csv", "lines.jsonl"):
        splits = load(tmp_path / name)
        assert (names(splits, "train"), classes(splits)) == (["10", "9", "10"], ["9", "10"])
    # Labels are read as text, even if they look like numbers or missing values.
    for label in ("NA", "null", "None", "nan", "007"):
        write_csv(tmp_path / "list.csv", ["image", "label"], ["0.png", label], ["1.png", "1"])
        assert names(load(tmp_path / "list.csv"), "train") == [label, "1"]


def test_folders_with_a_table_for_each_split(tmp_path):
    for split, folder in (("train", "train"), ("validation", "val"), ("test", "test")):
        write_pictures(tmp_path / folder, "0.png", "1.png")
        write_csv(tmp_path / f"{folder}.csv", ["image", "label"], [f"{folder}/0.png", "a"], [f"{folder}/1.png", "b"])
        write_csv(tmp_path / folder / "metadata.csv", ["file_name", "label"], ["0.png", "x"], ["1.png", "y"])
        assert names(load(tmp_path), split) == ["a", "b"]
    for file in tmp_path.glob("*.csv"):
        file.unlink()
    assert by_split(load(tmp_path)) == {split: ["x", "y"] for split in ("train", "validation", "test")}


def test_metadata_with_a_split_column_and_two_tables_for_a_split(tmp_path):
    write_pictures(tmp_path, "0.png", "1.png", "2.png")
    rows = [["0.png", "a", "train"], ["1.png", "a", "dev"], ["2.png", "b", "Training"]]
    write_csv(tmp_path / "metadata.csv", ["file_name", "label", "split"], *rows)
    assert by_split(load(tmp_path)) == {"train": ["a", "b"], "validation": ["a"]}
    write_csv(tmp_path / "metadata.csv", ["file_name", "label", "split"], *rows, ["0.png", "a", "fold 3"])
    expect_error(r"metadata.csv, row 4, has the split 'fold 3'. Use one of train", load, tmp_path)
    for name in ("val", "validation"):
        write_csv(tmp_path / "two" / f"{name}.csv", ["image", "label"])
    message = r"'val' and 'validation' are both names of the split 'validation'. Keep one"
    expect_error(message, load, tmp_path / "two")


def test_images_of_a_table_that_do_not_exist_are_listed(tmp_path):
    write_pictures(tmp_path, "here.png")
    write_csv(tmp_path / "list.csv", ["image", "label"], ["here.png", "a"], *([f"{n}.png", "b"] for n in range(12)))
    expect_error(r"(?s)12 of 13 images do not exist.*/0\.png.*/9\.png\n  and 2 more", load, tmp_path / "list.csv")


def test_tables_with_other_columns_ask_for_them(tmp_path):
    write_pictures(tmp_path, "0.png", "1.png")
    file = tmp_path / "list.csv"
    write_csv(file, ["id", "label", "class"], ["0.png", "a", "x"], ["1.png", "b", "y"])
    expect_error(r"list.csv has no column with a usual name \(image, .*only 'id', 'label', 'class'", load, file)
    expect_error(r"several possible columns: 'label', 'class'", load, file, image_column_name="id")
    assert classes(load(file, image_column_name="id", label_column_name="class")) == ["x", "y"]


def test_a_malformed_table_is_named(tmp_path):
    for name, content, message in (
        ("a.csv", b"image,label\n", "a.csv has no rows"),
        ("a.csv", b"", "a.csv has no rows"),
        (
            "a.csv",
            b"image,label\n0.png,cat, black\n",
            "1 rows with more or fewer cells than its header; the first is",
        ),
        ("a.csv", b"image,label\n0.png,cat\n1.png\n", "the first is row 2"),
        ("a.csv", "image,label\n0.png,épagneul\n".encode("latin-1"), "a.csv is not valid UTF-8 text"),
        ("a.jsonl", b'{"image": "0.png"}\n{"image": \n', "a.jsonl, line 2 is not a JSON object"),
        ("a.jsonl", b'{"image": "0.png", "label": 1}\n3\n', "a.jsonl, line 2 is not a JSON object"),
        ("a.jsonl", b'{"image": "0.png", "label": [1]}\n', r"a.jsonl, row 1, has the label \[1\]"),
    ):
        (tmp_path / name).write_bytes(content)
        expect_error(message, load, tmp_path / name)


def test_folders_of_splits_and_classes(tmp_path):
    for split_names in (("train", "validation", "test"), ("training", "val", "testing"), ("Train", "dev", "Test")):
        folder = tmp_path / split_names[1]
        train, validation, test = (folder / name for name in split_names)
        write_pictures(train, "b/1.png", "b/0.png", "a/2.png")
        write_pictures(validation, "a/3.png")
        write_pictures(test, "b/4.png", "a/5.png")
        splits = load(folder)
        assert by_split(splits) == {"train": ["a", "b", "b"], "validation": ["a"], "test": ["a", "b"]}
        # Images are sorted by name, so b/0.png is the first one.
        assert np.array_equal(np.asarray(splits["train"][1]["image"]), np.asarray(picture(1)))
    # Class folders outside of split folders form the training split. A test split may be the only split.
    write_pictures(tmp_path / "0", "train/0.png", "bus/1.png", "test-tube/2.png", "test-tube/more/3.PNG")
    write_pictures(tmp_path / "1", "test/b/0.png", "test/a/1.png")
    for name, expected in (("0", {"train": ["bus", "test-tube", "test-tube", "train"]}), ("1", {"test": ["a", "b"]})):
        splits = load(tmp_path / name)
        assert by_split(splits) == expected
        assert classes(splits) == list(dict.fromkeys(next(iter(expected.values()))))


def test_links_are_followed_hidden_files_ignored_and_paths_absolute(tmp_path, caplog, monkeypatch):
    write_pictures(tmp_path / "data", "a/0.png", "a/._0.png", "a/.thumbnails/1.png", ".cache/2.png", "b/3.png")
    write_pictures(tmp_path / "elsewhere", "4.png")
    (tmp_path / "data" / "c").symlink_to(tmp_path / "elsewhere")
    assert names(load(tmp_path / "data"), "train") == ["a", "b", "c"]
    assert not caplog.records
    # Loaded images do not depend on the working directory.
    write_pictures(tmp_path / "photos", "a/0.png", "b/1.png")
    write_csv(tmp_path / "data.csv", ["image", "label"], ["photos/a/0.png", "a"], ["photos/b/1.png", "b"])
    monkeypatch.chdir(tmp_path)
    loaded = [load(Path(source)) for source in ("photos", "data.csv")]
    monkeypatch.chdir("/")
    for splits in loaded:
        assert splits["train"][0]["image"].size == (8, 6)


@pytest.mark.parametrize(
    ("files", "empty", "message"),
    [
        ([], [], r"contains no image: no file ends in .bmp, .gif"),
        (["0.png"], [], r"only images without a class \('0.png'\). Put the images into one folder per"),
        (["0.png", "train/0.png", "test/a/1.png"], [], r"train contains only images without a class \('0.png'\)"),
        (["a/0.png", "d/1.png"], ["b", "c/deep"], r"without an image: 'b', 'c'. Remove them, or add images"),
    ],
)
def test_folders_without_images_are_refused(tmp_path, files, empty, message):
    write_pictures(tmp_path, *files)
    for place in empty:
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "notes.txt").touch()
    expect_error(message, load, tmp_path)


def test_ignored_files_of_a_folder_are_reported(tmp_path, caplog):
    write_pictures(tmp_path, *(f"train/{name}.png" for name in ("a/0", "b/1", "2")), "extra/a/3.png", "test/2.png")
    write_pictures(tmp_path, "val/a/3.png")
    (tmp_path / "train" / "a" / "photo.heic").touch()
    splits = load(tmp_path)
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 2, "validation": 1}
    for message in (
        "like a split: 'extra'", "not images, by suffix: {'.heic': 1}", "not in a class folder: '2.png'",
        "because their images are not in class folders: 'test'"
    ):  # fmt: skip
        assert message in caplog.text
    # If a folder contains a table, the error gives the path of the table.
    folder = tmp_path / "table"
    write_pictures(folder, "images/0.png", "images/1.png")
    write_csv(folder / "data.csv", ["image", "label"], ["images/0.png", "a"], ["images/1.png", "b"])
    expect_error(r"without a split in its name. Give the path of the table: '.*/data.csv'", load, folder)
    assert names(load(folder / "data.csv"), "train") == ["a", "b"]
    write_pictures(folder, "others/2.png")
    assert classes(load(folder)) == ["images", "others"]  # with two class folders, the CSV table is ignored


def test_wrong_classes_and_labels_are_named(tmp_path):
    write_pictures(tmp_path, "train/a/0.png", "train/b/1.png", "train/c/2.png", "test/a/3.png")
    assert classes(load(tmp_path)) == ["a", "b", "c"]
    write_pictures(tmp_path, "test/B/4.png", "test/x/5.png")
    expect_error(r"differ. Only in 'test': 'B', 'x'. Only in 'train': 'b', 'c'", load, tmp_path)
    file = tmp_path / "train.parquet"
    for labels, count, first in (([0, 1, 5, 7], 2, "5 at index 2"), ([0, -1, 1, 1], 1, "-1 at index 1")):
        plain = dataset_of(labels).cast_column("label", Value("int64"))
        table = plain.data.table.replace_schema_metadata(dataset_of([0], ["a", "b"]).data.table.schema.metadata)
        datasets.Dataset(datasets.table.InMemoryTable(table)).to_parquet(file)
        expect_error(f"{count} of 4 labels of the split 'train' .* the first is {first}. Labels of", load, file)
    fractions = dataset_of([0, 1]).remove_columns("label").add_column("label", [0.5, 0.7])
    fractions.to_parquet(file)
    expect_error(r"labels of the split 'train' are of type Value\('float64'\)", load, file)


def test_class_names_may_be_in_another_order_or_unused_and_other_files_are_ignored(tmp_path, caplog):
    for name, labels, given in (("train", [0, 2], "abc"), ("test", [0, 1], "cab"), ("extra", [0, 1], "abc")):
        dataset_of(labels, list(given)).to_parquet(tmp_path / f"{name}.parquet")
    splits = load(tmp_path)
    assert (classes(splits), by_split(splits)) == (["a", "b", "c"], {"train": ["a", "c"], "test": ["c", "a"]})
    assert "The split 'train' has no examples of the classes 'b'" in caplog.text
    assert "Ignored files because their names do not contain a split" in caplog.text
    assert "extra.parquet" in caplog.text


def test_a_missing_label_is_an_error_but_a_split_without_any_is_left_out(tmp_path, caplog):
    dataset_of([0, 1], ["a", "b"]).to_parquet(tmp_path / "train.parquet")
    dataset_of([-1, -1], ["a", "b"]).to_parquet(tmp_path / "test.parquet")
    assert list(load(tmp_path)) == ["train"]
    assert "Ignored the split 'test' because it has no labels: all are -1 or empty." in caplog.text
    write_pictures(tmp_path, "0.png", "1.png")
    write_csv(tmp_path / "list.csv", ["image", "label"], ["0.png", "a"], ["1.png", ""])
    expect_error(r"1 of 2 labels .* the first is '' at index 1. Add labels", load, tmp_path / "list.csv")


def test_empty_splits_and_single_classes_are_refused(tmp_path):
    write_idx(tmp_path, "train", [0, 1])
    write_idx(tmp_path, "t10k", [])
    expect_error(r"The split 'test' is empty. Add examples or remove the split", load, tmp_path)
    write_pictures(tmp_path / "one", "cat/0.png", "cat/1.png")
    expect_error(r"All labels of the split 'train' are 'cat', but at least 2", load, tmp_path / "one")
    write_pictures(tmp_path / "one" / "test", "cat/2.png")
    write_pictures(tmp_path / "scored", "test/cat/0.png", "validation/cat/0.png")
    assert classes(load(tmp_path / "scored")) == ["cat"]  # one class is enough for evaluation, but not for training


def test_images_are_called_by_their_paths_or_numbers(tmp_path):
    write_pictures(tmp_path, "folder/train/a/0.png", "folder/train/b/1.png", "folder/test/a/2.png")
    folder = tmp_path / "folder"
    splits = load(folder)
    assert splits["train"]["file"][:] == [f"{folder}/train/a/0.png", f"{folder}/train/b/1.png"]
    assert splits["test"]["file"][:] == [f"{folder}/test/a/2.png"]
    write_csv(tmp_path / "list.csv", ["image", "label"], ["folder/train/b/1.png", "b"], ["folder/train/a/0.png", "a"])
    assert load(tmp_path / "list.csv")["train"]["file"][:] == splits["train"]["file"][::-1]
    content = [{"bytes": encoded(picture(0)), "path": path} for path in ("cat.png", None, "")] + [None]
    features = Features({"image": Image(), "label": Value("string")})
    file = tmp_path / "test.parquet"
    datasets.Dataset.from_dict({"image": content, "label": list("abab")}, features).to_parquet(file)
    assert load(file)["test"]["file"][:] == ["cat.png", *(f"image {n} of test" for n in (1, 2, 3))]
    # When a dataset is split or shuffled, each image keeps its file name.
    write_pictures(tmp_path / "own", *(f"{label}/{number}.png" for label in "ab" for number in range(6)))
    train = load(tmp_path / "own")["train"]
    for split in (*hold_out(train, 0.5).values(), train.shuffle(seed=0).select(range(3))):
        for file, image, label in zip(split["file"], split["image"], split["label"], strict=True):
            assert (file, Path(file).parent.name) == (image.filename, "ab"[label])


def test_paths_that_do_not_exist_and_options_that_do_not_apply_are_refused(tmp_path):
    write_pictures(tmp_path / "clothing", "a/0.png")
    with pytest.raises(FileNotFoundError, match=r"no file or folder '.*/clothign'. Did you mean '.*/clothing'\?"):
        load(tmp_path / "clothign")
    expect_error(r"Did you mean '.*/clothing'\?", load, tmp_path / "cloting" / "train", error=FileNotFoundError)
    expect_error(r"has no 'birds'. It contains 'clothing'", load, tmp_path / "birds", error=FileNotFoundError)
    folder = tmp_path / "pets"
    write_pictures(folder, "a/0.png", "b/1.png")
    expect_error(r"dataset_revision='v1' applies to datasets on the Hub", load, folder, dataset_revision="v1")
    with pytest.raises(ValueError, match=r"dataset_config_name='plain_text' applies to datasets on the Hub"):
        load(folder, dataset_config_name="plain_text")
    expect_error(r"no column 'photo', only 'image', 'label'", load, folder, image_column_name="photo")
    (folder / "data.zip").touch()
    expect_error(r"data.zip is a file of an unknown format. Give one of .parquet, .csv", load, folder / "data.zip")
