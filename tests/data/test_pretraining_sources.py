"""Unlabeled images from all sources, as lists and as streams."""

from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from datasets import Dataset, DatasetDict, IterableDataset
from PIL import Image

from hf_vit.data import load_unlabeled_images
from hf_vit.data.formats.columns import SourceOptions
from hf_vit.data.loaders.unlabeled_images import first_images, image_and_class, stream_images
from hf_vit.data.targets import encoded_bytes

from ..helpers.datasets import (
    dataset_of,
    encoded,
    picture,
    write_class_folders,
    write_depth_folders,
    write_idx,
    write_mask_folders,
    write_pictures,
)


pytestmark = pytest.mark.slow  # starts worker processes


def files_of(splits: DatasetDict, folder: Path) -> dict[str, list[str]]:
    return {
        name: [Path(file).relative_to(folder).as_posix() for file in split["file"]] for name, split in splits.items()
    }


def pixels_of(rows: Dataset) -> list[bytes]:
    """Return the sorted pixels of the images in a dataset, which may be encoded or decoded."""
    images = rows.cast_column("image", rows.features["image"].__class__())["image"]
    return sorted(image.convert("RGB").tobytes() for image in images)


def test_images_are_found_at_any_depth_and_need_no_classes(tmp_path: Path) -> None:
    write_pictures(tmp_path, "a.png", "trips/rome/1.jpg", "trips/rome/old/2.PNG", "cats/3.webp", ".hidden/4.png")
    (tmp_path / "trips" / "notes.txt").touch()
    splits = load_unlabeled_images([str(tmp_path)])
    assert files_of(splits, tmp_path) == {
        "train": ["a.png", "cats/3.webp", "trips/rome/1.jpg", "trips/rome/old/2.PNG"]
    }
    assert splits["train"].column_names == ["image", "file", "number"]
    assert splits["train"]["number"][:] == [0, 1, 2, 3]


def test_folders_of_classes_and_splits_are_known_as_such(tmp_path: Path) -> None:
    write_class_folders(tmp_path, ["dog", "cat"])
    write_pictures(tmp_path, "test/unknown.png")
    splits = load_unlabeled_images([str(tmp_path)])
    assert list(splits) == ["train", "test"]
    assert splits["train"]["class_number"][:] == [0] * 4 + [1] * 4  # classes are numbered alphabetically
    assert splits["test"]["class_number"][:] == [0, 0, 1, 1, -1]


@pytest.mark.parametrize(("write", "targets"), [(write_mask_folders, "masks"), (write_depth_folders, "depths")])
def test_targets_beside_images_are_left_out(write: Any, targets: str, tmp_path: Path) -> None:
    write(tmp_path)
    splits = load_unlabeled_images([str(tmp_path)])
    assert files_of(splits, tmp_path) == {
        "train": [f"train/images/{number}.jpg" for number in range(4)],
        "validation": [f"val/images/{number}.jpg" for number in range(2)],
    }
    assert "class_number" not in splits["train"].column_names
    other = tmp_path / "other"
    for kind, suffix in (("images", "jpg"), (targets, "png")):
        write_pictures(other, *(f"{kind}/{split}/1.{suffix}" for split in ("train", "test")))
    assert files_of(load_unlabeled_images([str(other)]), other) == {
        "train": ["images/train/1.jpg"],
        "test": ["images/test/1.jpg"],
    }


def test_layouts_of_classifiers_tell_their_classes(tmp_path: Path) -> None:
    dataset_of([1, 0, -1], ["cat", "dog"]).to_parquet(tmp_path / "parquet.parquet")
    dataset_of(["b", "a", "b"]).save_to_disk(tmp_path / "saved")
    write_idx(tmp_path / "idx", "train", [3, 1, 3])
    write_pictures(tmp_path, "1.png", "2.png")
    (tmp_path / "table.csv").write_text("path,label\n1.png,dog\n2.png,cat\n")
    (tmp_path / "unlabeled").mkdir()
    dataset_of([1, 0]).remove_columns("label").to_parquet(tmp_path / "unlabeled" / "train.parquet")
    for name, expected in {
        "parquet.parquet": [1, 0, -1],
        "saved": [1, 0, 1],
        "idx": [1, 0, 1],
        "table.csv": [1, 0],
        "unlabeled": None,
    }.items():
        train = load_unlabeled_images([str(tmp_path / name)])["train"]
        assert (train["class_number"][:] if "class_number" in train.column_names else None) == expected


def test_columns_of_a_table_may_be_given(tmp_path: Path) -> None:
    write_pictures(tmp_path, "1.png", "2.png")
    (tmp_path / "train.csv").write_text("photo,breed\n1.png,poodle\n2.png,beagle\n")
    columns = {"image_column_name": "photo", "label_column_name": "breed"}
    splits = load_unlabeled_images([str(tmp_path)], **columns)
    assert splits["train"]["class_number"][:] == [1, 0]
    assert list(stream_images([str(tmp_path)], **columns)) == ["train"]


def test_several_datasets_are_joined(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "animals", ["cat", "dog"])
    write_mask_folders(tmp_path / "streets")
    dataset_of([0, 1, 1]).to_parquet(tmp_path / "more.parquet")
    sources = [str(tmp_path / name) for name in ("animals", "streets", "more.parquet")]
    splits = load_unlabeled_images(sources)
    assert {name: len(split) for name, split in splits.items()} == {"train": 8 + 4 + 3, "validation": 2, "test": 4}
    # Class numbers are dropped, because those of different sources are not comparable.
    assert splits["train"].column_names == ["image", "file", "number"]
    assert splits["train"]["number"][:] == list(range(15))
    assert pixels_of(splits["train"]) == sorted(
        image for source in sources for image in pixels_of(load_unlabeled_images([source])["train"])
    )


@pytest.mark.parametrize(
    ("sources", "options", "message"),
    [
        (["empty"], {}, r"empty contains no image: no file ends in \.bmp"),
        (["nowhere"], {}, "There is no file or folder '.*nowhere'"),
        (["empty/notes.txt"], {}, "is a file of an unknown format. Give a folder"),
        (["empty", "nowhere"], {"dataset_revision": "v1"}, "require a single dataset, but there are 2"),
    ],
)
def test_what_is_no_data_is_named(sources: list[str], options: dict[str, str], message: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").touch()
    for load in (load_unlabeled_images, stream_images):
        with pytest.raises((ValueError, OSError), match=message):
            load([str(tmp_path / source) for source in sources], **options)


def test_a_stream_has_the_images_that_a_list_has(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "animals", ["cat", "dog"])
    dataset_of([1, 0, 1], ["cat", "dog"], "img").to_parquet(tmp_path / "more.parquet")
    for sources, classes in (
        (["animals"], [0] * 4 + [1] * 4),
        (["more.parquet"], [0, 1, 1]),
        (["animals", "more.parquet"], None),
    ):
        places = [str(tmp_path / source) for source in sources]
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
        dataset_of(labels).to_parquet(tmp_path / f"{name}.parquet")
        first = first_images(stream_images([str(tmp_path / f"{name}.parquet")]), {"train": 5})["train"]
        joined = load_unlabeled_images([str(tmp_path / f"{name}.parquet")])["train"]
        assert first["class_number"][:] == joined["class_number"][:]
        assert first["class_number"][:].count(-1) == 2
    (tmp_path / "pets").mkdir()
    for split, labels in (("train", ["b", "c", "a"]), ("test", ["c", "b"])):
        dataset_of(labels).to_parquet(tmp_path / "pets" / f"{split}.parquet")
    first = first_images(stream_images([str(tmp_path / "pets")]), {"train": 2, "test": 2})
    assert {name: rows["class_number"][:] for name, rows in first.items()} == {"train": [0, 1], "test": [1, 0]}


def test_a_stream_that_does_not_say_its_columns_is_refused() -> None:
    stream = IterableDataset.from_generator(lambda: iter([{"image": encoded(picture(0))}]))
    with pytest.raises(ValueError, match=r"'test' of the stream does not declare its columns.* Disable streaming"):
        image_and_class(stream, "test", SourceOptions("images"))


def test_an_image_of_a_stream_may_lie_in_an_archive(tmp_path: Path) -> None:
    with ZipFile(tmp_path / "pets.zip", "w") as archive:
        archive.writestr("cats/1.png", encoded(picture(0)))
    content = encoded_bytes({"path": f"zip://cats/1.png::{tmp_path}/pets.zip", "bytes": None}, "image")
    assert Image.open(BytesIO(content)).tobytes() == picture(0).tobytes()
