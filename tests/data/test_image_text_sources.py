"""Test loading images with captions from all sources. All captions of an image are grouped in one example."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict, Features, Image, List, Value

from hf_vit.data import AugmentedDataset, check_dense, load_image_text
from hf_vit.data.augmentation.classification import cropped_example_augmentation
from hf_vit.data.collators import draw_caption
from hf_vit.data.datasets import TargetData

from ..helpers.datasets import encoded, picture, write_pictures
from .errors import expect_error


CAPTIONS = [["a dog", "it runs"], ["two cats"], ["a car", "it is red"]]


def by_file(data: TargetData, split: str = "train") -> dict[str, list[str]]:
    """Return the captions of each image, keyed by file name."""
    rows = data.splits[split]
    return {Path(row["file"]).name: row["captions"] for row in rows.select_columns(["file", "captions"])}


def write_table(folder: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    """Write a table, and the images named in its rows."""
    write_pictures(folder, *sorted({row["file_name"] for row in rows}))
    if name.endswith(".jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with (folder / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return folder


def rows_of(*captions: list[str]) -> list[dict[str, Any]]:
    return [{"file_name": f"{number}.png", "captions": texts} for number, texts in enumerate(captions)]


def test_rows_of_an_image_are_one_example_whatever_the_table(tmp_path: Path) -> None:
    single = [{"file_name": f"{number}.png", "text": text} for number in range(3) for text in CAPTIONS[number]]
    apart = [single[0], *single[2:], single[1]]  # the rows of an image need not be adjacent
    lists = [{**row, "text": row["captions"][0]} for row in rows_of(*CAPTIONS)]
    for name, rows in (("train.csv", apart), ("metadata.jsonl", apart), ("metadata.jsonl", lists)):
        folder = tmp_path / f"{name}-{len(rows)}"
        data = load_image_text(str(write_table(folder, name, rows)))
        assert by_file(data) == {f"{number}.png": texts for number, texts in enumerate(CAPTIONS)}
        example = data.examples("train")[0]
        assert example["captions"] == CAPTIONS[0]
        assert example["image"].size == picture(0).size
    chosen = load_image_text(str(folder), caption_column_name="text")
    assert by_file(chosen) == {f"{number}.png": texts[:1] for number, texts in enumerate(CAPTIONS)}


def test_splits_are_folders_or_a_column_and_lists_of_captions_are_taken(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_table(tmp_path / "folders" / split, "metadata.jsonl", rows_of(*CAPTIONS))
    assert list(load_image_text(str(tmp_path / "folders")).splits) == ["train", "validation"]
    rows = [{**row, "split": "test" if row["file_name"] == "1.png" else "train"} for row in rows_of(*CAPTIONS)]
    data = load_image_text(str(write_table(tmp_path / "column", "captions.jsonl", rows) / "captions.jsonl"))
    assert by_file(data, "test") == {"1.png": ["two cats"]}
    images = [{"bytes": encoded(picture(number)), "path": None} for number in range(3)]
    features = Features({"image": Image(), "captions": List(Value("string")), "text": Value("string")})
    content = {"image": images, "captions": CAPTIONS, "text": ["?"] * 3}
    Dataset.from_dict(content, features=features).to_parquet(tmp_path / "lists" / "test.parquet")
    assert load_image_text(str(tmp_path / "lists")).splits["test"]["captions"][:] == CAPTIONS


@pytest.mark.parametrize("with_paths", [True, False])
@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_stored_rows_with_the_same_image_are_one_example(kind: str, with_paths: bool, tmp_path: Path) -> None:
    numbers = [number for number in range(3) for _ in CAPTIONS[number]]
    texts = [text for own in CAPTIONS for text in own]
    images = [{"bytes": encoded(picture(n)), "path": f"{n}.png" if with_paths else None} for n in numbers]
    features = Features({"img": Image(), "caption": Value("string"), "url": Value("string")})
    rows = Dataset.from_dict({"img": images, "caption": texts, "url": texts}, features=features)
    if kind == "parquet":
        rows.to_parquet(tmp_path / "train.parquet")
    else:
        DatasetDict({"train": rows}).save_to_disk(tmp_path)
    data = load_image_text(str(tmp_path))
    assert data.splits["train"]["captions"][:] == CAPTIONS
    found = [data.examples("train")[number]["image"] for number in range(3)]
    assert [image.tobytes() for image in found] == [picture(number).tobytes() for number in range(3)]


def test_images_without_words_and_what_is_no_data_are_named(tmp_path: Path) -> None:
    for captions, message in (([], "1.png has no caption"), (["a", "  "], "2 captions, but caption 2 is empty")):
        data = load_image_text(str(write_table(tmp_path, "train.jsonl", rows_of(CAPTIONS[0], captions))))
        faults = check_dense(data.examples("train"), show_progress=False)
        assert list(faults) == [1]
        assert message in faults[1]
    folder = tmp_path / "bad"
    folder.mkdir()
    expect_error(r"contains no captions\. Put a metadata\.jsonl", load_image_text, str(folder))
    write_table(folder / "a", "train.jsonl", rows_of(*CAPTIONS))
    (folder / "a" / "1.png").unlink()
    expect_error(r"1 of 3 images do not exist.*\n.*1\.png", load_image_text, str(folder / "a"))
    write_table(folder / "b", "train.jsonl", [{"file_name": "1.png", "words": "a dog"}])
    with pytest.raises(ValueError, match=r"no column with a usual name \(caption, .*only 'file_name', 'words'"):
        load_image_text(str(folder / "b"))
    write_table(folder / "c", "train.jsonl", [{"file_name": "1.png", "text": 3}])
    expect_error(r"train\.jsonl, row 1, has the caption 3", load_image_text, str(folder / "c"))
    features = Features({"image": Image(), "text": Value("int64")})
    rows = Dataset.from_dict({"image": [{"bytes": encoded(picture(0)), "path": None}], "text": [1]}, features=features)
    rows.to_parquet(folder / "d" / "train.parquet")
    expect_error(r"no texts in the column 'text'.* to the right column: 'image'", load_image_text, str(folder / "d"))


def test_each_epoch_draws_a_caption_of_each_image_by_itself(tmp_path: Path) -> None:
    data = load_image_text(str(write_table(tmp_path, "train.jsonl", rows_of(*CAPTIONS))))
    augmentation = cropped_example_augmentation(draw_caption, (8, 8), 3, min_crop_scale=0.5, horizontal_flip=0.5)
    images = AugmentedDataset(data.examples("train"), augmentation, seed=0, column=None)
    drawn: list[list[str]] = []
    for epoch in range(12):
        images.set_epoch(epoch)
        drawn.append([images[number]["caption"] for number in range(3)])
        assert [images[number]["caption"] for number in (2, 1, 0)] == drawn[-1][::-1]
    for own, of_image in zip(CAPTIONS, zip(*drawn, strict=True), strict=True):
        assert set(of_image) == set(own)
    assert images[0]["image"].shape == (3, 8, 8)
