"""Test that data files with unusual contents are read as intended or raise an error."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, Image, List, Value

from hf_vit.data import (
    load_image_classification,
    load_image_text,
    load_object_detection,
    load_semantic_segmentation,
    load_universal_segmentation,
    load_unlabeled_images,
    stream_image_classification,
)
from hf_vit.data.reading.classes import read_class_file
from hf_vit.data.reading.files import parse_flag

from ..helpers import datasets as samples
from ..helpers import object_files as scenes
from .errors import expect_error
from .mac import pack_on_a_mac


def test_a_flag_may_be_a_number_a_truth_value_or_text() -> None:
    for value in (0, 0.0, False, "0", " False ", "no", "", None, "Unspecified"):
        assert parse_flag(value, "iscrowd") is False, value
    for value in (1, 1.0, True, "1", "TRUE", "yes"):
        assert parse_flag(value, "iscrowd") is True, value
    message = r"iscrowd of 3 is .*, which is neither true nor false\. Use 1 or 0"
    for value in ("perhaps", 2, -1, [0]):
        expect_error(message, parse_flag, value, "iscrowd of 3")


def crowds(source: Path) -> list[bool]:
    return [flag for row in load_object_detection(str(source)).splits["train"]["is_crowd"] for flag in row]


def marked(folder: Path, crowd: Any, single: Any) -> Path:
    """Write COCO annotations with the `iscrowd` value `crowd` for the second object and `single` for all others."""
    annotations = scenes.coco_content("train")["annotations"]
    marks = [{**annotation, "iscrowd": crowd if n == 1 else single} for n, annotation in enumerate(annotations)]
    return scenes.write_coco_boxes(folder, annotations=marks)


def test_crowds_in_annotations_of_coco_may_be_marked_by_text(tmp_path: Path) -> None:
    expected = crowds(marked(tmp_path, 1, 0))
    assert sum(expected) == 1
    for crowd, single in (("1", "0"), ("true", "false"), (True, False), (1.0, None)):
        assert crowds(marked(tmp_path, crowd, single)) == expected
    unclear = str(marked(tmp_path, "perhaps", 0))
    expect_error(r"annotation \d of .*annotations\.json as a crowd is 'perhaps'", load_object_detection, unclear)


def test_crowds_and_things_of_masks_may_be_marked_by_text(tmp_path: Path) -> None:
    samples.write_panoptic(tmp_path)
    file = tmp_path / "annotations" / "panoptic_val2017.json"
    content = json.loads(file.read_text())
    for category in content["categories"]:
        category["isthing"] = str(category.get("isthing", 1))
    for segment in content["annotations"][0]["segments_info"]:
        segment["iscrowd"] = "true" if segment.get("iscrowd") else "false"
    file.write_text(json.dumps(content))
    data = load_universal_segmentation(str(tmp_path))
    assert (data.names, data.thing_ids) == (("cat", "sky"), (0,))
    assert data.examples("validation")[0]["is_crowd"].tolist() == [False, False, False, True]
    polygon = {"category_id": 3, "segmentation": [[1, 1, 5, 1, 5, 4, 1, 4]]}
    samples.write_instances(tmp_path / "own", {**polygon, "iscrowd": "0"}, {**polygon, "iscrowd": "1"})
    example = load_universal_segmentation(str(tmp_path / "own")).examples("train")[0]
    assert example["is_crowd"].tolist() == [False, True]


def test_crowds_of_voc_and_in_columns_may_be_of_any_type(tmp_path: Path) -> None:
    scenes.write_scenes(tmp_path, {"train": "train", "val": "val"})
    scenes.write_voc_beside(tmp_path, {"train": "train", "val": "val"})
    for text, meant in (("true", True), ("True", True), (" 1 ", True), ("Unspecified", False), ("0", False)):
        written = scenes.voc_xml(scenes.SCENES["train"][2], f"<difficult>{text}</difficult>")
        (tmp_path / "train" / "c.xml").write_text(written)
        assert crowds(tmp_path) == [False, False, meant]
    for kind, flags in (("string", ["false", "true"]), ("bool", [False, True]), ("int64", [0, 1])):
        objects = {"bbox": List(Value("float32")), "category": Value("string"), "iscrowd": Value(kind)}
        row = [{"bbox": [5, 4, 3, 2], "category": n, "iscrowd": flag} for n, flag in zip("ab", flags, strict=True)]
        features = Features({"image": Image(), "objects": List(objects)})
        rows = Dataset.from_dict({"image": [samples.encoded(samples.picture(0))], "objects": [row]}, features)
        rows.to_parquet(tmp_path / kind / "a.parquet")
        assert crowds(tmp_path / kind) == [False, True]


def test_boxes_that_are_written_twice_count_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    annotations = scenes.coco_content("train")["annotations"]
    first = annotations[0]
    others = [{**first, "id": 7}, {**first, "id": 8, "category_id": 9}, {**first, "id": 9, "iscrowd": 1}]
    data = load_object_detection(str(scenes.write_coco_boxes(tmp_path, annotations=[*annotations, others[0]])))
    plain = load_object_detection(str(scenes.write_coco_boxes(tmp_path)))
    for split in plain.splits:
        assert data.splits[split]["boxes"][:] == plain.splits[split]["boxes"][:]
        assert data.splits[split]["class_labels"][:] == plain.splits[split]["class_labels"][:]
    assert data.notes == ("1 exact duplicates of boxes with the same image and class were removed.",)
    assert plain.notes == ()
    assert "1 exact duplicates of boxes" in caplog.text
    # Two boxes with equal coordinates are separate objects if their classes differ or one of them is a crowd.
    apart = load_object_detection(str(scenes.write_coco_boxes(tmp_path, annotations=[*annotations, *others[1:]])))
    assert sum(map(len, apart.splits["train"]["boxes"])) == len(annotations) + 2
    assert apart.notes == ()


def write_rows(file: Path, *rows: list[Any]) -> Path:
    with file.open("w", newline="") as stream:
        csv.writer(stream).writerows(rows)
    return file


def test_a_table_with_two_columns_of_one_name_is_refused(tmp_path: Path) -> None:
    samples.write_pictures(tmp_path, "0.png", "1.png")
    rows = [["0.png", "a", "", "b"], ["1.png", "b", "", "a"]]
    file = write_rows(tmp_path / "train.csv", ["file", "label", "", "label"], *rows)
    with pytest.raises(ValueError, match=r"train\.csv has several columns named 'label'\. Rename or remove"):
        load_image_classification(str(file))
    # Spreadsheet programs may write columns without a name.
    unnamed = write_rows(tmp_path / "test.csv", ["file", "label", "", ""], *rows)
    assert len(load_image_classification(str(unnamed))["test"]) == 2


def test_a_file_name_or_a_key_that_json_has_twice_is_refused(tmp_path: Path) -> None:
    content = scenes.coco_content("train")
    scenes.write_coco_boxes(tmp_path, images=[*content["images"], {**content["images"][0], "id": 77}])
    message = r"1 file_names of images in .*\.json occur more than once:\n  file_name a"
    expect_error(message, load_object_detection, str(tmp_path))
    twice = json.dumps(content).replace('"category_id":', '"category_id": 1, "category_id":', 1)
    (tmp_path / "train" / "annotations.json").write_text(twice)
    message = r"annotations\.json is not valid JSON: the key 'category_id' occurs 2 times"
    expect_error(message, load_object_detection, str(tmp_path))
    samples.write_pictures(tmp_path / "texts", "0.png")
    line = '{"file_name": "0.png", "text": "a dog", "text": "a cat"}\n'
    (tmp_path / "texts" / "metadata.jsonl").write_text(line)
    message = r"jsonl, line 1 is not a JSON object: the key 'text' occurs 2 times"
    expect_error(message, load_image_text, str(tmp_path / "texts"))
    names = tmp_path / "id2label.json"
    names.write_text('{"0": "sky", "0": "road", "1": "car"}')
    expect_error(r"id2label\.json is not a JSON object .*: the key '0' occurs 2 times", read_class_file, names)


def test_class_names_are_read_without_leading_class_numbers(tmp_path: Path) -> None:
    file = samples.write_mask_folders(tmp_path) / "classes.txt"
    for lines in (
        ["0 sky", "1 road", "2 car"], ["0: sky", "1: road", "2: car"], ["0,sky", "1,road", "2,car"],
        ["0 - sky", "1 - road", "2 - car"], ["2\tcar", "0\tsky", "1\troad"], ["0. sky", "1. road", "2. car"],
        ["sky", "road", "car"]
    ):  # fmt: skip
        file.write_text("\n".join(lines))
        assert load_semantic_segmentation(str(tmp_path)).names == ("sky", "road", "car"), lines
    for lines in (["20 mph", "30 mph"], ["3D print", "photo"], ["0", "1", "2"], ["4x4", "bus"]):
        file.write_text("\n".join(lines))
        assert read_class_file(file)[0] == lines


def test_spaces_around_labels_are_no_part_of_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    samples.dataset_of(["cat", "cat ", " dog", "dog"]).to_parquet(tmp_path / "train.parquet")
    labels = load_image_classification(str(tmp_path))["train"].features["label"]
    assert labels.names == ["cat", "dog"]
    assert "2 labels of the split 'train' differ from others only in leading or trailing spaces" in caplog.text
    assert stream_image_classification(str(tmp_path)).names == ("cat", "dog")
    caplog.clear()
    folders = samples.write_class_folders(tmp_path / "folders", ["cat", "cat ", "dog"])
    assert load_image_classification(str(folders))["train"].features["label"].names == ["cat", "dog"]
    assert "1 labels of the split 'train' differ from others only in leading or trailing spaces" in caplog.text


LEFT = (
    "__MACOSX/cat/._1.png", "@eaDir/cat/1.png", "cat/@eaDir/0.png/THUMB.png", "cat/._0.png", "$RECYCLE.BIN/a/1.png"
)  # fmt: skip


def leave(folder: Path) -> None:
    samples.write_pictures(folder, *LEFT)
    for name in (".DS_Store", "Thumbs.db", "desktop.ini"):
        for place in (folder, folder / "cat"):
            (place / name).write_bytes(b"\0" * 9)


def test_operating_system_files_are_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = samples.write_class_folders(tmp_path, ["cat", "dog"])
    counts = {split: len(images) for split, images in load_image_classification(str(folder)).items()}
    for split in counts:
        leave(folder / split)
    samples.write_pictures(folder, "__MACOSX/train/._1.png", "@eaDir/a/1.png")
    loaded = load_image_classification(str(folder))
    assert {split: len(images) for split, images in loaded.items()} == counts
    assert loaded["train"].features["label"].names == ["cat", "dog"]
    unlabeled = load_unlabeled_images([str(folder / "train")])["train"]
    assert (len(unlabeled), unlabeled.features["class_number"].names) == (counts["train"], ["cat", "dog"])
    assert not caplog.records


def write_table(folder: Path) -> None:
    samples.write_pictures(folder, "0.png", "1.png")
    write_rows(folder / "train.csv", ["file", "label"], ["0.png", "a"], ["1.png", "b"])


WRITERS: dict[str, Callable[[Path], Any]] = {
    "parquet": lambda folder: samples.dataset_of(["a", "b"]).to_parquet(folder / "train-00000-of-00001.parquet"),
    "shards": lambda folder: samples.write_tars(folder, {"train": [0, 1]}),
    "table": write_table,
}


@pytest.mark.parametrize("kind", WRITERS)
def test_data_that_a_mac_has_packed_are_read(kind: str, tmp_path: Path) -> None:
    def values(folder: Path) -> dict[str, list]:
        return {split: rows["label"][:] for split, rows in load_image_classification(str(folder)).items()}

    WRITERS[kind](tmp_path / "data")
    expected = values(tmp_path / "data")
    pack_on_a_mac(tmp_path / "data")
    assert values(tmp_path / "data") == expected


@pytest.mark.parametrize("first", [0, 1])
def test_shards_that_are_missing_are_named(tmp_path: Path, first: int) -> None:
    names = [f"train-{number:05}-of-00003-ab{number}.parquet" for number in range(first, first + 3)]
    for name in names:
        samples.dataset_of(["a", "b"]).to_parquet(tmp_path / name)
    samples.dataset_of(["a", "b"]).to_parquet(tmp_path / "test-00000-of-00001.parquet")
    assert len(load_image_classification(str(tmp_path))["train"]) == 6
    (tmp_path / names[1]).unlink()
    message = rf"(?s)1 shards of the data are missing:\n  {tmp_path}/train-0000{first + 1}-of-00003\n.*rename"
    for load in (load_image_classification, stream_image_classification, lambda path: load_unlabeled_images([path])):
        expect_error(message, load, str(tmp_path))
    # A single shard can be loaded by its path.
    assert len(load_image_classification(str(tmp_path / names[0]))["train"]) == 2


def test_tar_files_that_are_missing_are_named(tmp_path: Path) -> None:
    samples.write_tars(tmp_path, {"train": [0, 1, 0, 1]})
    for number, file in enumerate(sorted(tmp_path.glob("*.tar"))):
        file.rename(tmp_path / f"train-0000{number}-of-00002.tar")
    assert len(load_image_classification(str(tmp_path))["train"]) == 4
    (tmp_path / "train-00001-of-00002.tar").unlink()
    with pytest.raises(ValueError, match=r"1 shards of the data are missing:\n  .*train-00001-of-00002"):
        load_image_classification(str(tmp_path))
