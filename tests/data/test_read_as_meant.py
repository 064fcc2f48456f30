"""Data files with unusual contents are read as intended or raise an error."""

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
from hf_vit.data.datasets import TargetData
from hf_vit.data.formats.classes import read_class_file
from hf_vit.data.formats.files import parse_flag

from ..helpers.datasets import (
    dataset_of,
    encoded,
    picture,
    write_class_folders,
    write_instances,
    write_mask_folders,
    write_panoptic,
    write_pictures,
    write_tars,
)
from ..helpers.object_files import (
    SCENES,
    coco_content,
    voc_xml,
    write_coco_boxes,
    write_scenes,
    write_voc_beside,
)
from .errors import expect_error
from .mac import pack_on_a_mac


# Tests of flags in annotations.


@pytest.mark.parametrize(
    ("values", "meant"),
    [
        ((0, 0.0, False, "0", " False ", "no", "", None, "Unspecified"), False),
        ((1, 1.0, True, "1", "TRUE", "yes"), True),
    ],
)
def test_a_flag_may_be_a_number_a_truth_value_or_text(values: tuple, meant: bool) -> None:
    assert [parse_flag(value, "iscrowd") for value in values] == [meant] * len(values)


@pytest.mark.parametrize("value", ["perhaps", 2, -1, [0]])
def test_what_is_no_flag_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"iscrowd of 3 is .*, which is neither true nor false\. Use 1 or 0"):
        parse_flag(value, "iscrowd of 3")


def crowds(data: TargetData, split: str = "train") -> list[bool]:
    return [flag for row in data.splits[split]["is_crowd"] for flag in row]


def marked(written: Any, other: Any) -> list[dict[str, Any]]:
    annotations = coco_content("train")["annotations"]
    return [{**annotation, "iscrowd": written if n == 1 else other} for n, annotation in enumerate(annotations)]


@pytest.mark.parametrize(("crowd", "single"), [("1", "0"), ("true", "false"), (True, False), (1.0, None)])
def test_crowds_in_annotations_of_coco_may_be_marked_by_text(tmp_path: Path, crowd: Any, single: Any) -> None:
    data = load_object_detection(str(write_coco_boxes(tmp_path, annotations=marked(crowd, single))))
    expected = load_object_detection(str(write_coco_boxes(tmp_path, annotations=marked(1, 0))))
    assert crowds(data) == crowds(expected)
    assert sum(crowds(data)) == 1
    write_coco_boxes(tmp_path, annotations=marked("perhaps", 0))
    expect_error(r"annotation \d of .*annotations\.json as a crowd is 'perhaps'", load_object_detection, str(tmp_path))


def test_crowds_and_things_of_masks_may_be_marked_by_text(tmp_path: Path) -> None:
    write_panoptic(tmp_path)
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
    write_instances(tmp_path / "own", {**polygon, "iscrowd": "0"}, {**polygon, "iscrowd": "1"})
    instances = load_universal_segmentation(str(tmp_path / "own"))
    assert instances.examples("train")[0]["is_crowd"].tolist() == [False, True]


@pytest.mark.parametrize(
    ("text", "meant"), [("true", True), ("True", True), (" 1 ", True), ("Unspecified", False), ("0", False)]
)
def test_objects_of_voc_may_be_difficult_in_words(tmp_path: Path, text: str, meant: bool) -> None:
    write_scenes(tmp_path, {"train": "train", "val": "val"})
    write_voc_beside(tmp_path, {"train": "train", "val": "val"})
    (tmp_path / "train" / "c.xml").write_text(voc_xml(SCENES["train"][2], f"<difficult>{text}</difficult>"))
    assert crowds(load_object_detection(str(tmp_path))) == [False, False, meant]


@pytest.mark.parametrize("kind", ["string", "bool", "int64"])
def test_crowds_in_columns_may_be_of_any_type(tmp_path: Path, kind: str) -> None:
    flags = {"string": ["false", "true"], "bool": [False, True], "int64": [0, 1]}[kind]
    objects = {"bbox": List(Value("float32")), "category": Value("string"), "iscrowd": Value(kind)}
    rows = [
        [{"bbox": [5, 4, 3, 2], "category": name, "iscrowd": flag} for name, flag in zip("ab", flags, strict=True)]
    ]
    features = Features({"image": Image(), "objects": List(objects)})
    Dataset.from_dict({"image": [encoded(picture(0))], "objects": rows}, features).to_parquet(tmp_path / "a.parquet")
    assert crowds(load_object_detection(str(tmp_path))) == [False, True]


# Tests of duplicate annotations.


def test_boxes_that_are_written_twice_count_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    annotations = coco_content("train")["annotations"]
    first = annotations[0]
    others = [{**first, "id": 7}, {**first, "id": 8, "category_id": 9}, {**first, "id": 9, "iscrowd": 1}]
    data = load_object_detection(str(write_coco_boxes(tmp_path, annotations=[*annotations, others[0]])))
    plain = load_object_detection(str(write_coco_boxes(tmp_path)))
    for split in plain.splits:
        assert data.splits[split]["boxes"][:] == plain.splits[split]["boxes"][:]
        assert data.splits[split]["class_labels"][:] == plain.splits[split]["class_labels"][:]
    assert data.notes == ("1 exact duplicates of boxes with the same image and class were removed.",)
    assert plain.notes == ()
    assert "1 exact duplicates of boxes" in caplog.text
    # An equal box of another class, or of a crowd, is a separate object.
    apart = load_object_detection(str(write_coco_boxes(tmp_path, annotations=[*annotations, *others[1:]])))
    assert sum(map(len, apart.splits["train"]["boxes"])) == len(annotations) + 2
    assert apart.notes == ()


def test_images_of_one_file_name_are_refused(tmp_path: Path) -> None:
    images = coco_content("train")["images"]
    write_coco_boxes(tmp_path, images=[*images, {**images[0], "id": 77}])
    with pytest.raises(ValueError, match=r"1 file_names of images in .*\.json occur more than once:\n  file_name a"):
        load_object_detection(str(tmp_path))


def write_rows(file: Path, *rows: list[Any]) -> Path:
    with file.open("w", newline="") as stream:
        csv.writer(stream).writerows(rows)
    return file


def test_a_table_with_two_columns_of_one_name_is_refused(tmp_path: Path) -> None:
    write_pictures(tmp_path, "0.png", "1.png")
    rows = [["0.png", "a", "", "b"], ["1.png", "b", "", "a"]]
    file = write_rows(tmp_path / "train.csv", ["file", "label", "", "label"], *rows)
    with pytest.raises(ValueError, match=r"train\.csv has several columns named 'label'\. Rename or remove"):
        load_image_classification(str(file))
    unnamed = write_rows(tmp_path / "test.csv", ["file", "label", "", ""], *rows)  # spreadsheets write unnamed columns
    assert len(load_image_classification(str(unnamed))["test"]) == 2


def as_text(content: dict[str, Any], key: str) -> str:
    """Return `content` as JSON text in which an object has a duplicate key."""
    return json.dumps(content).replace(f'"{key}":', f'"{key}": 1, "{key}":', 1)


def test_a_key_that_json_has_twice_is_refused(tmp_path: Path) -> None:
    write_coco_boxes(tmp_path)
    (tmp_path / "train" / "annotations.json").write_text(as_text(coco_content("train"), "category_id"))
    with pytest.raises(ValueError, match=r"annotations\.json is not valid JSON: the key 'category_id' occurs 2 times"):
        load_object_detection(str(tmp_path))
    write_pictures(tmp_path / "texts", "0.png")
    line = '{"file_name": "0.png", "text": "a dog", "text": "a cat"}\n'
    (tmp_path / "texts" / "metadata.jsonl").write_text(line)
    with pytest.raises(ValueError, match=r"jsonl, line 1 is not a JSON object: the key 'text' occurs 2 times"):
        load_image_text(str(tmp_path / "texts"))
    names = tmp_path / "id2label.json"
    names.write_text('{"0": "sky", "0": "road", "1": "car"}')
    expect_error(r"id2label\.json is not a JSON object .*: the key '0' occurs 2 times", read_class_file, names)


# Tests of class names.


@pytest.mark.parametrize(
    "lines",
    [
        ["0 sky", "1 road", "2 car"], ["0: sky", "1: road", "2: car"], ["0,sky", "1,road", "2,car"],
        ["0 - sky", "1 - road", "2 - car"], ["2\tcar", "0\tsky", "1\troad"], ["0. sky", "1. road", "2. car"],
        ["sky", "road", "car"]
    ],
)  # fmt: skip
def test_numbers_in_front_of_class_names_are_no_part_of_them(tmp_path: Path, lines: list[str]) -> None:
    write_mask_folders(tmp_path)
    (tmp_path / "classes.txt").write_text("\n".join(lines))
    assert load_semantic_segmentation(str(tmp_path)).names == ("sky", "road", "car")


@pytest.mark.parametrize("lines", [["20 mph", "30 mph"], ["3D print", "photo"], ["0", "1", "2"], ["4x4", "bus"]])
def test_names_that_have_numbers_keep_them(tmp_path: Path, lines: list[str]) -> None:
    (tmp_path / "classes.txt").write_text("\n".join(lines))
    assert read_class_file(tmp_path / "classes.txt")[0] == lines


def test_spaces_around_labels_are_no_part_of_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset_of(["cat", "cat ", " dog", "dog"]).to_parquet(tmp_path / "train.parquet")
    labels = load_image_classification(str(tmp_path))["train"].features["label"]
    assert labels.names == ["cat", "dog"]
    assert "2 labels of the split 'train' differ from others only in leading or trailing spaces" in caplog.text
    assert stream_image_classification(str(tmp_path)).names == ("cat", "dog")
    caplog.clear()
    folders = write_class_folders(tmp_path / "folders", ["cat", "cat ", "dog"])
    assert load_image_classification(str(folders))["train"].features["label"].names == ["cat", "dog"]
    assert "1 labels of the split 'train' differ from others only in leading or trailing spaces" in caplog.text


# Tests of metadata files that operating systems write.

LEFT = (
    "__MACOSX/cat/._1.png", "@eaDir/cat/1.png", "cat/@eaDir/0.png/THUMB.png", "cat/._0.png", "$RECYCLE.BIN/a/1.png"
)  # fmt: skip


def leave(folder: Path) -> None:
    write_pictures(folder, *LEFT)
    for name in (".DS_Store", "Thumbs.db", "desktop.ini"):
        for place in (folder, folder / "cat"):
            (place / name).write_bytes(b"\0" * 9)


def test_what_systems_leave_is_no_class_and_no_image(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_class_folders(tmp_path, ["cat", "dog"])
    counts = {split: len(images) for split, images in load_image_classification(str(folder)).items()}
    for split in counts:
        leave(folder / split)
    write_pictures(folder, "__MACOSX/train/._1.png", "@eaDir/a/1.png")
    loaded = load_image_classification(str(folder))
    assert {split: len(images) for split, images in loaded.items()} == counts
    assert loaded["train"].features["label"].names == ["cat", "dog"]
    unlabeled = load_unlabeled_images([str(folder / "train")])["train"]
    assert (len(unlabeled), unlabeled.features["class_number"].names) == (counts["train"], ["cat", "dog"])
    assert not caplog.records


def write_parquet(folder: Path) -> None:
    dataset_of(["a", "b"]).to_parquet(folder / "train-00000-of-00001.parquet")


def write_shards(folder: Path) -> None:
    write_tars(folder, {"train": [0, 1]})


def write_table(folder: Path) -> None:
    write_pictures(folder, "0.png", "1.png")
    write_rows(folder / "train.csv", ["file", "label"], ["0.png", "a"], ["1.png", "b"])


@pytest.mark.parametrize("write", [write_parquet, write_shards, write_table])
def test_data_that_a_mac_has_packed_are_read(write: Callable[[Path], Any], tmp_path: Path) -> None:
    def values(folder: Path) -> dict[str, list]:
        return {split: rows["label"][:] for split, rows in load_image_classification(str(folder)).items()}

    folder = tmp_path / "data"
    folder.mkdir()
    write(folder)
    expected = values(folder)
    pack_on_a_mac(folder)
    assert values(folder) == expected


# Tests of sharded files.


@pytest.mark.parametrize("first", [0, 1])
def test_shards_that_are_missing_are_named(tmp_path: Path, first: int) -> None:
    names = [f"train-{number:05}-of-00003-ab{number}.parquet" for number in range(first, first + 3)]
    for name in names:
        dataset_of(["a", "b"]).to_parquet(tmp_path / name)
    dataset_of(["a", "b"]).to_parquet(tmp_path / "test-00000-of-00001.parquet")
    assert len(load_image_classification(str(tmp_path))["train"]) == 6
    (tmp_path / names[1]).unlink()
    message = rf"(?s)1 shards of the data are missing:\n  {tmp_path}/train-0000{first + 1}-of-00003\n.*rename"
    for load in (load_image_classification, stream_image_classification, lambda path: load_unlabeled_images([path])):
        expect_error(message, load, str(tmp_path))
    # A single shard is loaded if its path is given.
    assert len(load_image_classification(str(tmp_path / names[0]))["train"]) == 2


def test_tar_files_that_are_missing_are_named(tmp_path: Path) -> None:
    write_tars(tmp_path, {"train": [0, 1, 0, 1]})
    for number, file in enumerate(sorted(tmp_path.glob("*.tar"))):
        file.rename(tmp_path / f"train-0000{number}-of-00002.tar")
    assert len(load_image_classification(str(tmp_path))["train"]) == 4
    (tmp_path / "train-00001-of-00002.tar").unlink()
    with pytest.raises(ValueError, match=r"1 shards of the data are missing:\n  .*train-00001-of-00002"):
        load_image_classification(str(tmp_path))
