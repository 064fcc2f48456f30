"""Test loading unlabeled images from all sources, as datasets and as streams."""

from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from datasets import Dataset, DatasetDict, IterableDataset
from PIL import Image

from hf_vit.data import load_unlabeled_images
from hf_vit.data.loaders.unlabeled_images import class_names_of, first_images, image_and_class, stream_images
from hf_vit.data.reading.columns import SourceOptions
from hf_vit.data.targets import encoded_bytes

from ..helpers import datasets as samples
from .errors import expect_error


pytestmark = pytest.mark.slow  # slow, because the tests start worker processes


def files_of(splits: DatasetDict, folder: Path) -> dict[str, list[str]]:
    return {name: [str(Path(file).relative_to(folder)) for file in split["file"]] for name, split in splits.items()}


def pixels_of(rows: Dataset) -> list[bytes]:
    """Return a sorted list with the RGB pixels of each image in a dataset as bytes."""
    images = rows.cast_column("image", rows.features["image"].__class__())["image"]
    return sorted(image.convert("RGB").tobytes() for image in images)


def test_images_are_found_at_any_depth_and_classes_and_splits_are_known(tmp_path: Path) -> None:
    found = ["a.png", "cats/3.webp", "trips/rome/1.jpg", "trips/rome/old/2.PNG"]
    samples.write_pictures(tmp_path, *found[::-1], ".hidden/4.png")
    (tmp_path / "trips" / "notes.txt").touch()
    splits = load_unlabeled_images([str(tmp_path)])
    assert files_of(splits, tmp_path) == {"train": found}
    assert splits["train"].column_names == ["image", "file", "number"]
    assert splits["train"]["number"][:] == [0, 1, 2, 3]
    samples.write_class_folders(tmp_path / "classes", ["dog", "cat"])
    samples.write_pictures(tmp_path / "classes", "test/unknown.png")
    splits = load_unlabeled_images([str(tmp_path / "classes")])
    assert list(splits) == ["train", "test"]
    assert splits["train"]["class_number"][:] == [0] * 4 + [1] * 4  # classes are numbered in alphabetical order
    assert splits["test"]["class_number"][:] == [0, 0, 1, 1, -1]


@pytest.mark.parametrize("targets", ["masks", "depths"])
def test_targets_beside_images_are_left_out(targets: str, tmp_path: Path) -> None:
    write = samples.write_mask_folders if targets == "masks" else samples.write_depth_folders
    write(tmp_path)
    splits = load_unlabeled_images([str(tmp_path)])
    assert files_of(splits, tmp_path) == {
        "train": [f"train/images/{number}.jpg" for number in range(4)],
        "validation": [f"val/images/{number}.jpg" for number in range(2)],
    }
    assert "class_number" not in splits["train"].column_names
    other = tmp_path / "other"
    for kind, suffix in (("images", "jpg"), (targets, "png")):
        samples.write_pictures(other, *(f"{kind}/{split}/1.{suffix}" for split in ("train", "test")))
    found = files_of(load_unlabeled_images([str(other)]), other)
    assert found == {split: [f"images/{split}/1.jpg"] for split in ("train", "test")}


def test_classification_layouts_and_columns_define_the_classes(tmp_path: Path) -> None:
    samples.dataset_of([1, 0, -1], ["cat", "dog"]).to_parquet(tmp_path / "parquet.parquet")
    samples.dataset_of(["b", "a", "b"]).save_to_disk(tmp_path / "saved")
    samples.write_idx(tmp_path / "idx", "train", [3, 1, 3])
    samples.write_pictures(tmp_path, "1.png", "2.png")
    (tmp_path / "table.csv").write_text("path,label\n1.png,dog\n2.png,cat\n")
    samples.dataset_of([1, 0]).remove_columns("label").to_parquet(tmp_path / "unlabeled" / "train.parquet")
    numbers = {"parquet.parquet": [1, 0, -1], "saved": [1, 0, 1], "idx": [1, 0, 1], "table.csv": [1, 0]}
    for name, expected in {**numbers, "unlabeled": None}.items():
        train = load_unlabeled_images([str(tmp_path / name)])["train"]
        assert (train["class_number"][:] if "class_number" in train.column_names else None) == expected
    # Options set the names of the image column and the label column of a table.
    samples.write_pictures(tmp_path / "given", "1.png", "2.png")
    (tmp_path / "given" / "train.csv").write_text("photo,breed\n1.png,poodle\n2.png,beagle\n")
    columns = {"image_column_name": "photo", "label_column_name": "breed"}
    splits = load_unlabeled_images([str(tmp_path / "given")], **columns)
    assert splits["train"]["class_number"][:] == [1, 0]
    assert list(stream_images([str(tmp_path / "given")], **columns)) == ["train"]


def test_several_datasets_are_joined(tmp_path: Path) -> None:
    samples.write_class_folders(tmp_path / "animals", ["cat", "dog"])
    samples.write_mask_folders(tmp_path / "streets")
    samples.dataset_of([0, 1, 1]).to_parquet(tmp_path / "more.parquet")
    sources = [str(tmp_path / name) for name in ("animals", "streets", "more.parquet")]
    splits = load_unlabeled_images(sources)
    assert {name: len(split) for name, split in splits.items()} == {"train": 8 + 4 + 3, "validation": 2, "test": 4}
    # Class numbers are dropped, because class numbers of different sources are not comparable.
    assert splits["train"].column_names == ["image", "file", "number"]
    assert splits["train"]["number"][:] == list(range(15))
    assert pixels_of(splits["train"]) == sorted(
        image for source in sources for image in pixels_of(load_unlabeled_images([source])["train"])
    )


@pytest.mark.parametrize("load", [load_unlabeled_images, stream_images])
def test_what_is_no_data_is_named(load: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").touch()
    empty, nowhere, notes = (str(tmp_path / name) for name in ("empty", "nowhere", "empty/notes.txt"))
    expect_error(r"empty contains no image: no file ends in \.bmp", load, [empty])
    expect_error("There is no file or folder '.*nowhere'", load, [nowhere], error=FileNotFoundError)
    expect_error("is a file of an unknown format. Give a folder", load, [notes])
    expect_error("require a single dataset, but there are 2", load, [empty, nowhere], dataset_revision="v1")


def test_a_stream_has_the_images_that_a_list_has(tmp_path: Path) -> None:
    samples.write_class_folders(tmp_path / "animals", ["cat", "dog"])
    samples.dataset_of([1, 0, 1], ["cat", "dog"], "img").to_parquet(tmp_path / "more.parquet")
    animals, more = str(tmp_path / "animals"), str(tmp_path / "more.parquet")
    for places, classes in (([animals], [0] * 4 + [1] * 4), ([more], [0, 1, 1]), ([animals, more], None)):
        joined, stream = load_unlabeled_images(places), stream_images(places)
        assert list(stream) == list(joined)
        first = first_images(stream, dict.fromkeys(stream, 100))
        for name, rows in first.items():
            assert set(rows.column_names) == set(joined[name].column_names)
            assert pixels_of(rows) == pixels_of(joined[name])
        known = first["train"].column_names.count("class_number")
        assert (sorted(first["train"]["class_number"][:]) if known else None) == classes
    shuffled = {"train": stream["train"].shuffle(seed=0, buffer_size=5)}
    assert len(first_images(shuffled, {"train": 4})["train"]) == 4


def test_images_of_many_classes_are_among_the_first_of_a_stream(tmp_path: Path) -> None:
    for name in "abcdefghijklmnop":
        (tmp_path / "train" / name).mkdir(parents=True)
        for number in range(50):  # 800 images are distributed over 64 shards
            (tmp_path / "train" / name / f"{number}.png").touch()
    stream = stream_images([str(tmp_path)])["train"].shuffle(seed=0, buffer_size=10)
    first = first_images({"train": stream}, {"train": 40})["train"]
    assert len(set(first["class_number"])) > 10


def test_classes_of_splits_of_a_stream_are_the_same_ones_and_may_be_words_or_missing(tmp_path: Path) -> None:
    for name, labels in (("words", ["b", "a", "", None, "b"]), ("numbers", [3, None, 10, -1, 3])):
        samples.dataset_of(labels).to_parquet(tmp_path / f"{name}.parquet")
        first = first_images(stream_images([str(tmp_path / f"{name}.parquet")]), {"train": 5})["train"]
        joined = load_unlabeled_images([str(tmp_path / f"{name}.parquet")])["train"]
        assert first["class_number"][:] == joined["class_number"][:]
        assert first["class_number"][:].count(-1) == 2
    for split, labels in (("train", ["b", "c", "a"]), ("test", ["c", "b"])):
        samples.dataset_of(labels).to_parquet(tmp_path / "pets" / f"{split}.parquet")
    first = first_images(stream_images([str(tmp_path / "pets")]), {"train": 2, "test": 2})
    assert {name: rows["class_number"][:] for name, rows in first.items()} == {"train": [0, 1], "test": [1, 0]}


def test_classes_of_splits_are_matched_by_name_and_numbers_keep_their_order(tmp_path: Path) -> None:
    samples.dataset_of([0, 1, 1, -1], ["cat", "dog", "ape"]).to_parquet(tmp_path / "pets" / "train.parquet")
    samples.dataset_of([0, 1, 2], ["dog", "cat", "bee"]).to_parquet(tmp_path / "pets" / "test.parquet")
    splits = load_unlabeled_images([str(tmp_path / "pets")])
    assert splits["train"].features["class_number"].names == ["cat", "dog", "ape", "bee"]
    names = {split: class_names_of(rows) for split, rows in splits.items()}
    assert names == {"train": ["cat", "dog", "dog", None], "test": ["dog", "cat", "bee"]}
    first = first_images(stream_images([str(tmp_path / "pets")]), {"train": 4, "test": 3})
    assert {split: class_names_of(rows) for split, rows in first.items()} == names
    samples.dataset_of([*range(12)]).to_parquet(tmp_path / "numbers.parquet")
    train = load_unlabeled_images([str(tmp_path / "numbers.parquet")])["train"]
    assert train["class_number"][:] == [*range(12)]
    assert train.features["class_number"].names == [str(number) for number in range(12)]


def test_streams_declare_their_columns_and_may_lie_in_an_archive(tmp_path: Path) -> None:
    stream = IterableDataset.from_generator(lambda: iter([{"image": samples.encoded(samples.picture(0))}]))
    message = r"'test' of the stream does not declare its columns.* Disable streaming"
    expect_error(message, image_and_class, stream, "test", SourceOptions("images"))
    with ZipFile(tmp_path / "pets.zip", "w") as archive:
        archive.writestr("cats/1.png", samples.encoded(samples.picture(0)))
    content = encoded_bytes({"path": f"zip://cats/1.png::{tmp_path}/pets.zip", "bytes": None}, "image")
    assert Image.open(BytesIO(content)).tobytes() == samples.picture(0).tobytes()
