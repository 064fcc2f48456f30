"""Test WebDataset tar files, loaded as datasets and as streams, and errors for invalid files."""

import gzip
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from hf_vit.data import load_image_classification, load_unlabeled_images, stream_image_classification
from hf_vit.data.formats import tar
from hf_vit.data.loaders.image_classification import held_out_images_of_stream
from hf_vit.data.loaders.unlabeled_images import stream_images

from ..helpers.datasets import dataset_of, encoded, picture, write_class_folders, write_tar, write_tars
from .errors import expect_error


pytestmark = pytest.mark.slow  # slow, because the tests start worker processes


LABELS = {"train": [2, 0, 1, 2, 0], "val": [1, 2], "test": [-1, -1]}
WORDS = {"train": ["dog", "cat", "fox", "dog", "cat"], "val": ["fox", "cat"]}
IN_JSON = {"train": [{"label": word, "width": 8} for word in WORDS["train"]], "val": [{"label": "fox", "width": 1}]}


def labels_of(rows: Dataset) -> list[tuple[str, str]]:
    """Return a sorted list with the WebDataset key and class name of each image."""
    names = rows.features["label"].names
    keys = [Path(file.split(": ")[-1]).stem for file in rows["file"]]
    return sorted((key, names[label]) for key, label in zip(keys, rows["label"], strict=True))


@pytest.mark.parametrize(("labels", "kind"), [(LABELS, "cls"), (WORDS, "txt"), (IN_JSON, "json")])
def test_a_list_and_a_stream_have_the_same_images_and_classes(labels: Any, kind: str, tmp_path: Path) -> None:
    write_tars(tmp_path, labels, kind)
    joined, stream = load_image_classification(str(tmp_path)), stream_image_classification(str(tmp_path))
    assert list(joined) == ["train", "validation"]  # a test split without labels is not loaded
    train = stream.first("train", 9, 3)
    assert labels_of(train) == labels_of(joined["train"])
    assert labels_of(stream.joined["validation"]) == labels_of(joined["validation"])
    assert sorted(image.tobytes() for image in train["image"]) == sorted(picture(n).tobytes() for n in range(5))
    assert (stream.rows.num_shards, stream.held_out) == (2, 0)


def test_names_of_classes_are_given_or_read_from_files_without_their_images(tmp_path: Path) -> None:
    folder = write_tars(tmp_path / "pets", LABELS)
    given = stream_image_classification(str(folder), class_names=["ant", "bee", "cow", "doe"])
    assert given.names == ("ant", "bee", "cow", "doe")
    assert [name for _, name in labels_of(given.first("train", 9, 3))] == ["cow", "ant", "bee", "cow", "ant"]
    (folder / "classes.txt").write_text("ant\nbee\ncow\n")
    beside, joined = stream_image_classification(str(folder)), load_image_classification(str(folder))
    assert beside.names == tuple(joined["train"].features["label"].names) == ("ant", "bee", "cow")
    assert labels_of(beside.first("train", 9, 3)) == labels_of(joined["train"])
    write_tars(tmp_path / "words", WORDS, "txt", num_files=1)
    file = tmp_path / "words" / "train-00000.tar"
    file.write_bytes(file.read_bytes().replace(b"PNG", b"XXX"))  # corrupts all images
    assert stream_image_classification(str(tmp_path / "words")).names == ("cat", "dog", "fox")
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "train.tar.gz").write_bytes(gzip.compress(file.read_bytes()))
    expect_error(r"has no class names, .* Set class_names", stream_image_classification, str(tmp_path / "packed"))
    given = stream_image_classification(str(tmp_path / "packed"), class_names=["cat", "dog", "fox"])
    assert given.names == ("cat", "dog", "fox")


def test_wrong_labels_json_and_images_are_named_with_tar_file_and_key(tmp_path: Path) -> None:
    cow = r"train-00001\.tar: tr/001\.png has the label 'cow', which is not one of the 2 classes"
    for labels, kind, message in (
        (["dog", "cow"], "txt", cow),
        (["dog", ""], "txt", r"tr/001\.png has no label \(value ''\)\. Add a label"),
        ([0, 2], "cls", r"tr/001\.png has the label 2, which is not one of the 2 classes 'cat', 'dog'"),
    ):
        folder = write_tars(tmp_path / str(labels), {"train": labels, "val": labels[:1]}, kind)
        stream = stream_image_classification(str(folder), class_names=["cat", "dog"])
        expect_error(message, stream.first, "train", 9, 3)
    twice = r"train\.tar: 1\.json .* is not a label: the key 'label' occurs 2 times"
    for text, message in (
        ('{"label": "cat", "label": "dog"}', twice),
        ('{"label": "cat"', r"1\.json|cannot be read from .*train\.tar"),
    ):
        write_tar(tmp_path / "json" / "train.tar", {"1": encoded(picture(0))}, {"1": text}, "json")
        expect_error(message, stream_image_classification, str(tmp_path / "json"))
    folder, images = tmp_path / "no image", {str(key): encoded(picture(key)) for key in range(9)}
    write_tar(folder / "0.tar", images, dict.fromkeys(images, 0))
    write_tar(folder / "1.tar", {"9": encoded(picture(9))}, {"9": 1}, suffix="dat")
    stream = stream_image_classification(str(folder), class_names=["cat", "dog"])
    expect_error(r"1\.tar: 9 has no image \(png\)\. Add one, or remove", list, stream.train)
    for names, given, message in (
        (["dog", "cat"], ["dog", "ape"], "the class names in the data, 'dog', 'cat'"),
        (None, ["a"], "at least 2"),
    ):
        dataset_of([1, 0, 1], names).to_parquet(tmp_path / "train.parquet")
        expect_error(message, stream_image_classification, str(tmp_path / "train.parquet"), class_names=given)


def test_what_is_held_out_of_a_stream_is_never_trained_on(tmp_path: Path) -> None:
    write_tars(tmp_path, {"train": [number % 3 for number in range(40)]}, num_files=3)
    stream = stream_image_classification(str(tmp_path), train_val_split=0.3)
    held_out = set(stream.first("validation", 99, 10)["file"])
    trained = [row["file"] for row in stream.train]
    assert 4 < len(held_out) < 20
    assert len(trained) == 40 - len(held_out)
    assert not held_out & set(trained)
    assert set(stream.first("train", 99, 10)["file"]) == set(trained)
    images = load_image_classification(str(tmp_path))["train"]
    # The function receives the images as an argument, so it does not open a source on the Hub.
    for source in (str(tmp_path), "user/on-the-hub"):
        assert len(held_out_images_of_stream(images, source, 0.3)) == len(held_out)


def test_parquet_and_folders_stream_with_the_classes_that_they_have(tmp_path: Path) -> None:
    for split, labels in (("train", ["b", "c", "a", "b"]), ("test", ["c", "a"])):
        dataset_of(labels).to_parquet(tmp_path / "parquet" / f"{split}.parquet")
    dataset_of([1, 0, 1], ["dog", "cat", "ape"]).to_parquet(tmp_path / "train.parquet")
    write_class_folders(tmp_path / "folders", ["cow", "bee"])
    for source, names, train, test in (
        ("parquet", "abc", [0, 1, 1, 2], [2, 0]),
        ("train.parquet", ["dog", "cat", "ape"], [0, 1, 1], []),
        ("folders", ["bee", "cow"], [0] * 4 + [1] * 4, [0, 0, 1, 1]),
    ):
        stream = stream_image_classification(str(tmp_path / source), train_val_split=0)
        assert stream.names == tuple(names)
        assert sorted(row["label"] for row in stream.train) == train
        assert (stream.joined["test"]["label"][:] if test else []) == test
    held_out = stream_image_classification(str(tmp_path / "folders"), train_val_split=0.25)
    # The split is stratified, as for datasets that are not streamed: one image of each class is held out.
    assert sorted(held_out.joined["validation"]["label"]) == [0, 1]
    assert len(list(held_out.train)) == 6


def test_images_without_labels_come_from_tar_files_too_but_not_beside_images(tmp_path: Path) -> None:
    write_tars(tmp_path / "words", WORDS, "txt")
    joined = load_unlabeled_images([str(tmp_path / "words")])
    streamed = stream_images([str(tmp_path / "words")])
    assert {name: len(rows) for name, rows in joined.items()} == {"train": 5, "validation": 2}
    assert joined["train"].features["class_number"].names == ["cat", "dog", "fox"]
    assert sorted(row["class_number"] for row in streamed["train"]) == sorted(WORDS["train"])
    write_tar(tmp_path / "only.tar", {"1": encoded(picture(0))}, {"1": {"width": 8}}, "json")
    assert load_unlabeled_images([str(tmp_path / "only.tar")])["train"].column_names == ["image", "file", "number"]
    assert len(list(stream_images([str(tmp_path / "only.tar")])["train"])) == 1
    expect_error("no column with a usual name", load_image_classification, str(tmp_path / "only.tar"))
    # Tar files next to class folders are ignored.
    write_class_folders(tmp_path / "folders", ["cat", "dog"])
    write_tars(tmp_path / "folders", {"train": [1, 0]})
    assert tar.detect(tmp_path / "folders", "classes") is None
    assert load_image_classification(str(tmp_path / "folders"))["train"].num_rows == 8
